"""``python -m MODULE ARGUMENTS``, many times, without importing torch, transformers and verl anew each time.

One interpreter a set of environment variables imports what every start imports, and forks for each command. What is
run, its arguments, directory, output, exit and everything that it starts are those of the command itself; tests of the
start as such, and of what happens to its processes, use the command.
"""

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

_interpreters: dict[frozenset[tuple[str, str]], subprocess.Popen] = {}


def run_module(module: str, *arguments: str, cwd: Path, env: dict[str, str], timeout: float | None = None) -> Any:
    """As ``subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True)``."""
    env = {name: value for name, value in env.items() if name != "PYTEST_CURRENT_TEST"}
    key = frozenset(env.items())
    if key not in _interpreters or _interpreters[key].poll() is not None:
        _interpreters[key] = subprocess.Popen(
            [sys.executable, __file__], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    interpreter = _interpreters[key]
    with tempfile.TemporaryDirectory() as kept:
        texts = [Path(kept, name) for name in ("stdout", "stderr")]
        job = {"module": module, "arguments": arguments, "cwd": str(cwd), "texts": [str(text) for text in texts]}
        pid, late = 0, threading.Event()

        def stop() -> None:
            late.set()
            os.kill(pid, signal.SIGKILL)

        limit = threading.Timer(timeout or 1e6, stop)
        limit.daemon = True
        try:
            interpreter.stdin.write(json.dumps(job) + "\n")
            interpreter.stdin.flush()
            pid = int(interpreter.stdout.readline())
            limit.start()
            status = int(interpreter.stdout.readline())
        except BaseException:  # the test was interrupted: nobody would read this answer
            _interpreters.pop(key).kill()
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise
        finally:
            limit.cancel()
        if late.is_set():
            raise subprocess.TimeoutExpired([module, *arguments], timeout)
        out, err = (text.read_text(errors="replace") for text in texts)
    return subprocess.CompletedProcess([sys.executable, "-m", module, *arguments], status, out, err)


def _jobs() -> dict[str, Any] | None:
    """Returns a job in its own process, and nothing once there are no more."""
    import verl.trainer.main_ppo  # noqa: F401

    import vla3_plugin.launch  # noqa: F401

    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            return json.loads(line)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    return None


def _become(job: dict[str, Any]) -> None:
    os.chdir(job["cwd"])
    sys.argv, sys.path[0] = [job["module"], *job["arguments"]], job["cwd"]
    for descriptor, path, flags in [
        (0, os.devnull, os.O_RDONLY),
        *((n, path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for n, path in enumerate(job["texts"], start=1)),
    ]:
        opened = os.open(path, flags)
        os.dup2(opened, descriptor)
        os.close(opened)


if __name__ == "__main__":
    if (job := _jobs()) is not None:
        _become(job)
        runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
