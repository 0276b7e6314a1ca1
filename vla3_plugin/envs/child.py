"""The child's side: builds the environment and serves frames until the pipe closes. Needs numpy and the simulator.

What the environment hands over is checked here, against its declaration and before it is copied into shared memory,
where a wrong shape or type would no longer show.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import traceback
from typing import Any

import numpy as np

from vla3_plugin.contract import ChunkResult, EnvSpec, Episode, Observation, check_results
from vla3_plugin.envs import wire


def main(request_fd: int, reply_fd: int, memory_fd: int) -> None:
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    try:
        hello = wire.receive(request_fd)
        assert hello is not None
        os.nice(hello["nice"])
        module, _, name = hello["target"].partition(":")
        env = getattr(importlib.import_module(module), name)(num_slots=hello["num_slots"], **hello["options"])
        block = wire.Block(memory_fd, env.spec, env.num_slots, create=True)
        wire.send(reply_fd, {"ok": True, "spec": env.spec.to_json(), "num_slots": env.num_slots})
    except wire.Disconnected:
        return
    except BaseException as error:
        wire.send(reply_fd, _failure(error))
        return
    try:
        while True:
            request = wire.receive(request_fd)
            if request is None or request["do"] == "close":
                break
            try:
                reply = _HANDLERS[request["do"]](env, block, request)
            except Exception as error:
                reply = _failure(error)
            wire.send(reply_fd, reply)
    except wire.Disconnected:
        pass
    finally:
        env.close()


def _die_with_parent() -> None:
    """Linux ends this process with the thread that started it; elsewhere the closed pipe does, once the env returns."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _failure(error: BaseException) -> dict[str, Any]:
    return {"ok": False, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}


def _put(block: wire.Block, slot: int, kind: str, observation: Observation) -> str:
    for camera, image in observation.images.items():
        block[f"{slot}.{kind}.{camera}"][...] = image
    block[f"{slot}.{kind}.state"][...] = observation.state
    return observation.instruction


def _put_results(
    spec: EnvSpec, block: wire.Block, slots: list[int], length: int, results: list[ChunkResult]
) -> list[dict[str, Any]]:
    check_results(results, spec, slots, length, spec.name)
    return [_put_result(block, slot, length, results[i]) for i, slot in enumerate(slots)]


def _put_result(block: wire.Block, slot: int, length: int, result: ChunkResult) -> dict[str, Any]:
    for name in ("rewards", "terminated", "truncated", "valid"):
        block[f"{slot}.{name}"][:length] = getattr(result, name)
    frames, final = result.frames, result.final_observation
    if frames is not None:
        block[f"{slot}.frames"][: len(frames)] = frames
    return {
        "steps": length,
        "success": bool(result.success),
        "instruction": _put(block, slot, "observation", result.observation),
        "final": None if final is None else _put(block, slot, "final", final),
        "frames": None if frames is None else len(frames),
    }


def _reset(env: Any, block: wire.Block, request: dict[str, Any]) -> dict[str, Any]:
    slot = request["slot"]
    observation = env.reset(slot, Episode(**request["episode"]))
    observation.check(env.spec, f"{env.spec.name}, slot {slot}")
    return {"ok": True, "instruction": _put(block, slot, "observation", observation)}


def _chunk_step(env: Any, block: wire.Block, request: dict[str, Any]) -> dict[str, Any]:
    slots, length = request["slots"], request["length"]
    actions = np.stack([block[f"{slot}.actions"][:length] for slot in slots])
    results = env.chunk_step(slots, actions, record=request["record"])
    return {"ok": True, "results": _put_results(env.spec, block, slots, length, results)}


def _expert_chunk(env: Any, block: wire.Block, request: dict[str, Any]) -> dict[str, Any]:
    slots, length = request["slots"], request["length"]
    chunks = env.expert_chunk(slots, length, noise=request["noise"])
    for i, slot in enumerate(slots):
        block[f"{slot}.expert"][:length] = chunks[i].actions
    return {"ok": True, "results": _put_results(env.spec, block, slots, length, [c.result for c in chunks])}


_HANDLERS = {"reset": _reset, "chunk_step": _chunk_step, "expert_chunk": _expert_chunk}
