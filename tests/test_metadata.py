"settings.ini is the one source of metadata: the keys that pyproject.toml repeats for nbdev say the same, and the wheel carries them all"
import re, subprocess, sys, zipfile
from configparser import ConfigParser
from pathlib import Path
from nbdev.config import get_config

root = Path(__file__).resolve().parent.parent
parser = ConfigParser(delimiters=['='])
parser.read(root/'settings.ini', encoding='utf-8')
ini = parser['DEFAULT']

def test_pyproject_repeats_settings():
    cfg = get_config(root)
    assert (cfg.lib_name, cfg.description, cfg.git_url) == (ini['lib_name'], ini['description'], ini['git_url'])
    assert f'{cfg.doc_host}{cfg.doc_baseurl}'.rstrip('/') == f"{ini['doc_host']}{ini['doc_baseurl']}"
    assert (cfg.branch, cfg.lib_path.name) == (ini['branch'], ini['lib_path'])

def test_pyproject_holds_nothing_else():
    project = re.search(r'^\[project\]\n(.*?)^\[', (root/'pyproject.toml').read_text(), re.M|re.S)[1]
    assert set(re.findall(r'^(\w+) =', project, re.M)) == {'name', 'description', 'dynamic'}
