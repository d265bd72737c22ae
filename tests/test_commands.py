"The console scripts: what a pipe or a file gets"
import os, re, subprocess, sys
from configparser import ConfigParser
from importlib import import_module
from pathlib import Path
import pytest
from fastai_xla import cli, commands, coverage

root = Path(__file__).resolve().parent.parent
parser = ConfigParser(delimiters=['='])
parser.read(root/'settings.ini', encoding='utf-8')
scripts = dict(line.split('=') for line in parser['DEFAULT']['console_scripts'].split())

def piped(tmp_path, name, *args, **env):
    "A script as pip makes it, its output to a pipe, where nothing has been chosen"
    module,function = scripts[name].split(':')
    (tmp_path/name).write_text(f"import sys\nfrom {module} import {function} as f\nif __name__ == '__main__': sys.exit(f())\n")
    chosen = ('PJRT_DEVICE', 'PYTHONWARNINGS', 'XLA_FLAGS')   # the last: what is compiled in less time trains in more
    full = {k: v for k,v in os.environ.items() if k not in chosen} | dict(PYTHONPATH=str(root)) | env
    return subprocess.run([sys.executable, tmp_path/name, *args], capture_output=True, text=True, env=full, cwd=tmp_path)

def test_demo_writes_lines(tmp_path):
    "One for each epoch, no bar, and no word of torch_xla's"
    res = piped(tmp_path, 'fastai_xla_demo', '--epochs', '2')
    assert res.returncode == 0 and not res.stderr, res.stderr
    assert not re.search('[\r█|]', res.stdout)
    assert re.findall(r'^(epoch|\d+) +\S+ +\S+ +\S+ +\S+ *$', res.stdout, re.M) == ['epoch', '0', '1']
    assert res.stdout.startswith('Training on xla:0: 2 epochs of 22 steps\n') and cli._count(1, 'epoch') == '1 epoch'

def test_group_that_does_not_exist(capsys):
    "One line on stderr, exit code 1"
    with pytest.raises(SystemExit) as e: coverage.coverage_cli(groups='model,bogus')
    assert e.value.code.startswith("There is no group 'bogus' of cases. The groups: model, ") and '\n' not in e.value.code
    assert capsys.readouterr().out == ''

@pytest.mark.parametrize('name', scripts)
def test_every_script_has_its_function(name):
    module,function = scripts[name].split(':')
    assert module == 'fastai_xla.commands'   # which is not asked: it would quiet this process
    module,function = commands._functions[function].rsplit('.', 1)
    assert callable(getattr(import_module(f'fastai_xla.{module}'), function))
