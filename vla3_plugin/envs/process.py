"""The parent's handle of a simulator in a child interpreter; the same methods as the environment itself.

Simulators crash, hang, leak and pin other versions of everything. In a process of its own each of these is an error
with a name (which environment, which slot, which episode, what it was doing) and a deadline.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Optional

import numpy as np

import vla3_plugin
from vla3_plugin.contract import ChunkResult, EnvSpec, Episode, Observation, check_actions
from vla3_plugin.envs import wire
from vla3_plugin.envs.base import ExpertChunk
from vla3_plugin.telemetry import traffic

# Creates the package from its directory alone: the parent's site-packages must not leak into the child's interpreter.
_BOOTSTRAP = """
import importlib.util, sys
root, fds = sys.argv[1:3]
sys.path += sys.argv[3:]
spec = importlib.util.spec_from_file_location("vla3_plugin", root + "/__init__.py", submodule_search_locations=[root])
package = importlib.util.module_from_spec(spec)
sys.modules["vla3_plugin"] = package
spec.loader.exec_module(package)
from vla3_plugin.envs.child import main
main(*(int(fd) for fd in fds.split(",")))
"""
_THREADS = {"LP_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_OUTPUT_LIMIT = 4 << 20  # bytes of a child's output that are kept on disk
_TAIL = 8 << 10  # bytes of it that an error may quote
_GRACE_S = 5.0  # for a child that was asked to end


class EnvError(RuntimeError):
    """A simulator process failed, hung or died; the message names it and what it was doing."""


class _Spawner:
    """Starts every child from one thread that lives as long as this process.

    Linux sends a child's parent-death signal when the *thread* that started it ends; a thread of some pool would take
    healthy simulators with it.
    """

    def __init__(self) -> None:
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)  # the thread is not in a fork

    def _forget(self) -> None:
        self._thread: Optional[ThreadPoolExecutor] = None

    def __call__(self, start: Callable[[], subprocess.Popen]) -> subprocess.Popen:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vla3-spawn")
        return self._thread.submit(start).result()


_spawn = _Spawner()


class EnvProcess:
    """``target`` 'module:Class' with ``options`` in a spawned interpreter; implements ``ChunkEnv`` and ``ExpertEnv``.

    Args:
        target: the environment's class; its module must be importable in the child.
        options: the constructor's arguments, JSON values.
        num_slots: environments in this process.
        python: the child's interpreter; None: this one. Another one needs Python 3.9, numpy and the simulator; it gets
            neither ``PYTHONPATH`` nor ``PYTHONHOME`` of this process.
        timeout_s: bounds every reset and every chunk. A child that misses it is killed.
        start_timeout_s: bounds the start, imports and first rendering included.
        name: what errors call it; by default the target.
        environ: environment variables for the child, beside this process's.
        paths: appended to the child's ``sys.path`` (third-party code that is not installed there).
        nice: how far the child stands back where cores are scarce, as in nice(1); beside what this process does.
        borrow: observations are views of the memory that the child writes to, without a copy: a slot's keep their
            values until its next chunk or reset, those of an episode's end until the next one ends.

    The ``start_*`` and ``finish_*`` halves let several children work at the same time; the plain methods do both.

    Raises:
        EnvError: the child could not start, raised, hung or died.
    """

    def __init__(
        self,
        target: str,
        options: Optional[Mapping[str, Any]] = None,
        num_slots: int = 1,
        python: Optional[str] = None,
        timeout_s: float = 120.0,
        start_timeout_s: float = 300.0,
        name: Optional[str] = None,
        environ: Optional[Mapping[str, str]] = None,
        paths: Sequence[str] = (),
        nice: int = 0,
        borrow: bool = False,
    ) -> None:
        self.name, self.timeout_s, self._borrow = name or target, timeout_s, borrow
        self._episodes: dict[int, Episode] = {}
        self._slots: list[int] = []
        self._what, self._pending = "starting", False
        self._block: Optional[wire.Block] = None
        self._to = self._from = -1
        self._output = tempfile.TemporaryFile("a+b")  # appending, so that cutting it does not leave a hole
        with wire.unnamed_file() as memory:
            self.process = self._launch(python, memory.fileno(), environ, paths)
            try:
                hello = {"target": target, "options": dict(options or {}), "num_slots": num_slots, "nice": nice}
                self._send("starting", [], hello)
                reply = self._receive(start_timeout_s)
                self.spec = EnvSpec.from_json(reply["spec"])
                self.num_slots = int(reply["num_slots"])
                self._block = wire.Block(memory.fileno(), self.spec, self.num_slots, create=False)
            except BaseException:
                self.close()
                raise

    # ---- ChunkEnv ----

    def reset(self, slot: int, episode: Episode) -> Observation:
        self.start_reset(slot, episode)
        return self.finish_reset()

    def chunk_step(self, slots: list[int], actions: np.ndarray, record: bool = False) -> list[ChunkResult]:
        self.start_chunk(slots, actions, record)
        return self.finish_chunk()

    def expert_chunk(self, slots: list[int], length: int, noise: float = 0.0) -> list[ExpertChunk]:
        """See ``ExpertEnv``."""
        self._check_slots(slots)
        self._check_length(length)
        message = {"do": "expert_chunk", "slots": list(slots), "length": length, "noise": noise}
        self._send(f"letting its expert act for {length} steps", slots, message)
        results = self.finish_chunk()
        return [ExpertChunk(self._shared(s, "expert")[:length].copy(), r) for s, r in zip(slots, results, strict=True)]

    def close(self) -> None:
        """End the child: ask, then kill. Safe to call twice."""
        if self.process.poll() is None:
            try:
                wire.send(self._to, {"do": "close"})
                self.process.wait(timeout=_GRACE_S)
            except (wire.Disconnected, OSError, subprocess.TimeoutExpired):
                self.process.kill()
                self.process.wait()
        for fd in (self._to, self._from):
            if fd >= 0:
                os.close(fd)
        self._to = self._from = -1
        if self._block is not None:
            self._block.close()
            self._block = None
        self._output.close()

    def __enter__(self) -> EnvProcess:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # ---- the two halves ----

    def start_reset(self, slot: int, episode: Episode) -> None:
        self._check_slots([slot])
        self._episodes[slot] = episode
        self._send("resetting", [slot], {"do": "reset", "slot": slot, "episode": episode.to_json()})

    def finish_reset(self) -> Observation:
        reply = self._receive(self.timeout_s)
        return self._observation(self._slots[0], "observation", reply["instruction"])

    def start_chunk(self, slots: list[int], actions: np.ndarray, record: bool = False) -> None:
        self._check_slots(slots)
        check_actions(actions, self.spec, f"actions for {self.name}")
        if len(actions) != len(slots):
            raise ValueError(f"{self.name}: {len(actions)} action chunks for {len(slots)} slots")
        length = actions.shape[1]
        self._check_length(length)
        for slot, chunk in zip(slots, actions, strict=True):
            self._shared(slot, "actions")[:length] = chunk
        message = {"do": "chunk_step", "slots": list(slots), "length": length, "record": record}
        self._send(f"executing a chunk of {length} actions", slots, message)

    def finish_chunk(self) -> list[ChunkResult]:
        reply = self._receive(self.timeout_s)
        return [self._result(slot, data) for slot, data in zip(self._slots, reply["results"], strict=True)]

    # ---- inside ----

    def _launch(
        self, python: Optional[str], memory_fd: int, environ: Optional[Mapping[str, str]], paths: Sequence[str]
    ) -> subprocess.Popen:
        inherited = dict(os.environ)
        if python is not None:
            inherited = {k: v for k, v in inherited.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        child_in, self._to = os.pipe()
        self._from, child_out = os.pipe()
        fds = (child_in, child_out, memory_fd)
        command = [python or sys.executable, "-c", _BOOTSTRAP, str(Path(vla3_plugin.__file__).parent)]
        command += [",".join(map(str, fds)), *paths]
        try:
            return _spawn(
                lambda: subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,  # simulators print; replies have a pipe of their own
                    stderr=self._output,
                    pass_fds=fds,
                    env={**_THREADS, **inherited, **(environ or {})},
                )
            )
        except OSError as error:
            os.close(self._to)
            os.close(self._from)
            raise EnvError(
                f"{self.name}: the interpreter {command[0]} does not start: {error}; check env.python"
            ) from None
        finally:
            os.close(child_in)
            os.close(child_out)

    def _check_slots(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if not 0 <= slot < self.num_slots:
                raise ValueError(f"{self.name}: slot {slot}, expected 0 to {self.num_slots - 1}")
        if not slots or len(set(slots)) != len(slots):
            raise ValueError(f"{self.name}: slots {list(slots)}, expected at least one and each once")

    def _check_length(self, length: int) -> None:
        if not 1 <= length <= wire.MAX_CHUNK:
            raise ValueError(f"{self.name}: a chunk of {length} steps, expected 1 to {wire.MAX_CHUNK}")

    def _shared(self, slot: int, name: str) -> np.ndarray:
        if self._block is None:
            raise EnvError(f"{self.name} is closed")
        return self._block[f"{slot}.{name}"]

    def _observation(self, slot: int, kind: str, instruction: str) -> Observation:
        images = {camera: self._shared(slot, f"{kind}.{camera}") for camera in self.spec.cameras}
        state = self._shared(slot, f"{kind}.state")
        if not self._borrow:
            images, state = {camera: image.copy() for camera, image in images.items()}, state.copy()
        traffic.count("simulator_to_env", [*images.values(), state])
        return Observation(images, state, instruction)

    def _result(self, slot: int, data: dict[str, Any]) -> ChunkResult:
        steps, frames, final = data["steps"], data["frames"], data["final"]
        arrays = {n: self._shared(slot, n)[:steps].copy() for n in ("rewards", "terminated", "truncated", "valid")}
        return ChunkResult(
            success=data["success"],
            observation=self._observation(slot, "observation", data["instruction"]),
            final_observation=None if final is None else self._observation(slot, "final", final),
            frames=None if frames is None else self._shared(slot, "frames")[:frames].copy(),
            **arrays,
        )

    def _send(self, what: str, slots: Sequence[int], message: dict[str, Any]) -> None:
        if self._to < 0:
            raise EnvError(f"{self.name} is closed")
        if self._pending:
            raise EnvError(f"{self._doing()}: its answer was not fetched before the next request ({what})")
        self._what, self._slots = what, list(slots)
        try:
            wire.send(self._to, message)
        except (wire.Disconnected, OSError):
            raise self._death() from None
        self._pending = True

    def _receive(self, timeout: float) -> dict[str, Any]:
        if not self._pending:
            raise EnvError(f"{self.name}: an answer was asked for, but there is no request")
        self._pending = False
        try:
            reply = wire.receive(self._from, timeout)
        except wire.Disconnected:
            raise self._death() from None
        if reply is None:
            self.process.kill()  # a child that missed its deadline would answer the wrong question next time
            raise EnvError(
                f"{self._doing()}: no answer within {timeout:g} s, so it was killed; raise env.timeout_s if the "
                f"simulator is that slow{self._tail()}"
            )
        if not reply["ok"]:
            raise EnvError(f"{self._doing()}: {reply['error']}\n{reply['trace']}")
        if os.fstat(self._output.fileno()).st_size > _OUTPUT_LIMIT:
            os.ftruncate(self._output.fileno(), 0)
        return reply

    def _doing(self) -> str:
        episodes = {slot: self._episodes.get(slot) for slot in self._slots}
        slots = "".join(f", slot {slot}" + (f" ({episode})" if episode else "") for slot, episode in episodes.items())
        return f"{self.name} (pid {self.process.pid}){slots}, while {self._what}"

    def _death(self) -> EnvError:
        try:  # the pipe closes a moment before the process can be reaped
            code = self.process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            return EnvError(f"{self._doing()}: it closed its pipe{self._tail()}")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        return EnvError(f"{self._doing()}: the process {how}{self._tail()}")

    def _tail(self) -> str:
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - _TAIL))
        lines = self._output.read().decode(errors="replace").strip().splitlines()[-15:]
        return ". Its last output:\n  " + "\n  ".join(lines) if lines else " (it printed nothing)"
