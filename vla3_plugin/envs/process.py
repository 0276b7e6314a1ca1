"""The parent's handle of a simulator in a child interpreter; the same methods as the environment itself.

Simulators crash, hang, leak and pin other versions of everything. In a process of its own each of these is an error with
a name (which environment, which slot, which episode, what it was doing) and a deadline.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np

import vla3_plugin
from vla3_plugin.contract import ChunkResult, EnvSpec, Episode, Observation, check_actions
from vla3_plugin.envs import wire
from vla3_plugin.envs.base import ExpertChunk

# Creates the package from its directory alone: the parent's site-packages must not leak into the child's interpreter.
_BOOTSTRAP = """
import importlib.util, sys, os
root = sys.argv[1]
spec = importlib.util.spec_from_file_location("vla3_plugin", root + "/__init__.py", submodule_search_locations=[root])
package = importlib.util.module_from_spec(spec)
sys.modules["vla3_plugin"] = package
spec.loader.exec_module(package)
for path in sys.argv[3:]:
    sys.path.append(path)
from vla3_plugin.envs.child import main
main(*(int(fd) for fd in sys.argv[2].split(",")))
"""
_THREADS = {"LP_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class EnvError(RuntimeError):
    """A simulator process failed, hung or died; the message names it and what it was doing."""


class EnvProcess:
    """``target`` 'module:Class' with ``options`` in a spawned interpreter; implements ``ChunkEnv``.

    ``python``: the interpreter, by default this one; ``paths``: appended to the child's ``sys.path`` (third-party code
    that is not installed there). ``timeout_s`` bounds every reset and every chunk, ``start_timeout_s`` the start.
    ``start_*``/``finish_*`` pairs let several children work at the same time; the plain methods do both.
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
    ) -> None:
        self.name, self.timeout_s = name or target, timeout_s
        self._what, self._episodes = "starting", {}  # type: tuple[str, dict[int, Episode]]
        self._block: Optional[wire.Block] = None
        self._stderr = tempfile.TemporaryFile()
        memory = wire.unnamed_file()
        child_in, self._to = os.pipe()
        self._from, child_out = os.pipe()
        command = [python or sys.executable, "-c", _BOOTSTRAP, str(Path(vla3_plugin.__file__).parent)]
        fds = (child_in, child_out, memory.fileno())
        try:
            self.process = subprocess.Popen(
                [*command, ",".join(map(str, fds)), *paths],
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                pass_fds=fds,
                env={**_THREADS, **os.environ, **(environ or {})},
            )
        except OSError as error:
            raise EnvError(f"{self.name}: the interpreter {command[0]} does not start: {error}; check env.python") from None
        finally:
            os.close(child_in)
            os.close(child_out)
        try:
            self._send({"target": target, "options": dict(options or {}), "num_slots": num_slots})
            reply = self._receive(start_timeout_s)
            self.spec = EnvSpec.from_json(reply["spec"])
            self.num_slots = int(reply["num_slots"])
            self._block = wire.Block(memory.fileno(), self.spec, self.num_slots, create=False)
        except BaseException:
            self.close()
            raise
        finally:
            memory.close()

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
        self._slots, self._what = list(slots), f"letting its expert act for {length} steps"
        self._send({"do": "expert_chunk", "slots": self._slots, "length": length, "noise": noise})
        results = self.finish_chunk()
        return [ExpertChunk(self._shared(s, "expert")[:length].copy(), r) for s, r in zip(self._slots, results)]

    def close(self) -> None:
        """End the child: ask, then kill. Safe to call twice."""
        if self.process.poll() is None:
            try:
                wire.send(self._to, {"do": "close"})
                self.process.wait(timeout=5)
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
        self._stderr.close()

    # ---- the two halves ----

    def start_reset(self, slot: int, episode: Episode) -> None:
        self._check_slots([slot])
        self._slots, self._episodes[slot] = [slot], episode
        self._what = "resetting"
        self._send({"do": "reset", "slot": slot, "episode": episode.to_json()})

    def finish_reset(self) -> Observation:
        reply = self._receive(self.timeout_s)
        return self._observation(self._slots[0], "observation", reply["instruction"])

    def start_chunk(self, slots: list[int], actions: np.ndarray, record: bool = False) -> None:
        self._check_slots(slots)
        check_actions(actions, self.spec, f"actions for {self.name}")
        length = actions.shape[1]
        if len(actions) != len(slots) or not 1 <= length <= wire.MAX_CHUNK:
            raise ValueError(
                f"actions have shape {list(actions.shape)} for {len(slots)} slots; expected [{len(slots)}, 1 to "
                f"{wire.MAX_CHUNK}, {self.spec.action_dim}]"
            )
        for slot, chunk in zip(slots, actions):
            self._shared(slot, "actions")[:length] = chunk
        self._slots, self._what = list(slots), f"executing a chunk of {length} actions"
        self._send({"do": "chunk_step", "slots": self._slots, "length": length, "record": record})

    def finish_chunk(self) -> list[ChunkResult]:
        reply = self._receive(self.timeout_s)
        return [self._result(slot, data) for slot, data in zip(self._slots, reply["results"])]

    # ---- inside ----

    def _check_slots(self, slots: list[int]) -> None:
        for slot in slots:
            if not 0 <= slot < self.num_slots:
                raise ValueError(f"{self.name}: slot {slot}, expected 0 to {self.num_slots - 1}")

    def _shared(self, slot: int, name: str) -> np.ndarray:
        assert self._block is not None, "the environment is closed"
        return self._block[f"{slot}.{name}"]

    def _observation(self, slot: int, kind: str, instruction: str) -> Observation:
        images = {camera: self._shared(slot, f"{kind}.{camera}").copy() for camera in self.spec.cameras}
        observation = Observation(images, self._shared(slot, f"{kind}.state").copy(), instruction)
        observation.check(self.spec, self._who(slot))
        return observation

    def _result(self, slot: int, data: dict[str, Any]) -> ChunkResult:
        steps, frames = data["steps"], data["frames"]
        arrays = {n: self._shared(slot, n)[:steps].copy() for n in ("rewards", "terminated", "truncated", "valid")}
        final = data["final"]
        result = ChunkResult(
            success=data["success"],
            observation=self._observation(slot, "observation", data["instruction"]),
            final_observation=None if final is None else self._observation(slot, "final", final),
            frames=None if frames is None else self._shared(slot, "frames")[:frames].copy(),
            **arrays,
        )
        result.check(self.spec, self._who(slot))
        return result

    def _who(self, slot: int) -> str:
        episode = self._episodes.get(slot)
        return f"{self.name}, slot {slot}" + (f", {episode}" if episode else "")

    def _doing(self) -> str:
        slots = getattr(self, "_slots", [])
        who = "; ".join(self._who(slot) for slot in slots) or self.name
        return f"{who} (pid {self.process.pid}), while {self._what}"

    def _send(self, message: dict[str, Any]) -> None:
        if self._to < 0:
            raise EnvError(f"{self.name} is closed")
        try:
            wire.send(self._to, message)
        except (wire.Disconnected, OSError):
            raise self._death() from None

    def _receive(self, timeout: float) -> dict[str, Any]:
        try:
            reply = wire.receive(self._from, timeout)
        except wire.Disconnected:
            raise self._death() from None
        if reply is None:
            self.process.kill()  # a child that missed its deadline would answer the wrong question next time
            raise EnvError(
                f"{self._doing()}, did not answer within {timeout:g} s and was ended; raise env.timeout_s if the "
                f"simulator is that slow.{self._tail()}"
            )
        if not reply["ok"]:
            raise EnvError(f"{self._doing()}, failed: {reply['error']}\n{reply['trace']}")
        return reply

    def _death(self) -> EnvError:
        deadline = time.monotonic() + 5
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)  # the pipe closes a moment before the process can be reaped
        code = self.process.poll()
        if code is None:
            how = "closed its pipe"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"exited with status {code}"
        return EnvError(f"{self._doing()}, {how}.{self._tail()}")

    def _tail(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()[-15:]
        return "\nIts last output:\n  " + "\n  ".join(lines) if lines else ""
