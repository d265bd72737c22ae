"""Python code in a process of its own, at a fraction of a process's start

`run` is for tests that say something before the XLA client starts: how many devices, or a flag. A server has imported torch, fastai and
torch_xla, and started no thread; each run is a fork of it. Code that blocks or replaces these imports needs `subprocess`."""
import json, os, runpy, subprocess, sys, traceback, types
from functools import lru_cache
from pathlib import Path

root = Path(__file__).resolve().parent.parent

def _child(args, env, cwd, files):
    for fd,file in zip((1, 2), files): os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    for k in started_with - env.keys(): os.environ.pop(k, None)
    os.environ.update(env)
    os.chdir(cwd)
    how,what,*rest = args
    sys.argv,sys.path[0] = [what, *rest],str(cwd)
    try:
        if how == '-m': runpy.run_module(what, run_name='__main__', alter_sys=True)
        else:
            main = sys.modules['__main__'] = types.ModuleType('__main__')
            exec(compile(what, '<string>', 'exec'), main.__dict__)
        code = 0
    except SystemExit as e: code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)

def serve():
    "Answer each line of standard input, a request in JSON, by a line with the exit code"
    import torch, fastai.vision.all, fastai.tabular.all, fastai.text.all, fastai.collab, torch_xla
    assert len(os.listdir('/proc/self/task')) == 1, 'a fork would lack threads'
    for line in sys.stdin:
        if not (pid := os.fork()): _child(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)

@lru_cache
def _server():
    return subprocess.Popen([sys.executable, '-m', 'tests.own_process'], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

def run(args, tmp_path, cwd=root, env=None):
    "`python *args` (`-c code` or `-m module`) with just `env` -> `subprocess.CompletedProcess`, texts in `stdout` and `stderr`"
    files = [str(tmp_path/f) for f in ('stdout', 'stderr')]
    server = _server()
    server.stdin.write(json.dumps([[str(a) for a in args], dict(os.environ if env is None else env), str(cwd), files]) + '\n')
    server.stdin.flush()
    return subprocess.CompletedProcess(args, int(server.stdout.readline()), *(Path(f).read_text() for f in files))

if __name__ == '__main__':
    started_with = set(os.environ)
    serve()
