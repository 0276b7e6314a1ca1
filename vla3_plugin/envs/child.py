"""The child's side: builds the environment and serves frames until the pipe closes. Needs numpy and the simulator."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import traceback
from typing import Any

import numpy as np

from vla3_plugin.contract import ChunkResult, Episode, Observation
from vla3_plugin.envs import wire


def main(request_fd: int, reply_fd: int, memory_fd: int) -> None:
    _die_with_parent()
    try:
        hello = wire.receive(request_fd)
        assert hello is not None
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
    """Linux ends this process when the thread that started it ends; elsewhere the closed pipe does it a little later."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _failure(error: BaseException) -> dict[str, Any]:
    return {"ok": False, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}


def _put(block: wire.Block, slot: int, kind: str, observation: Observation) -> str:
    for camera, image in observation.images.items():
        block[f"{slot}.{kind}.{camera}"][...] = image
    block[f"{slot}.{kind}.state"][...] = observation.state
    return observation.instruction


def _put_result(block: wire.Block, slot: int, result: ChunkResult) -> dict[str, Any]:
    steps = len(result.valid)
    for name in ("rewards", "terminated", "truncated", "valid"):
        block[f"{slot}.{name}"][:steps] = getattr(result, name)
    final = result.final_observation
    frames = 0 if result.frames is None else len(result.frames)
    if frames:
        block[f"{slot}.frames"][:frames] = result.frames
    return {
        "steps": steps,
        "success": bool(result.success),
        "instruction": _put(block, slot, "observation", result.observation),
        "final": None if final is None else _put(block, slot, "final", final),
        "frames": None if result.frames is None else frames,
    }


def _reset(env: Any, block: wire.Block, request: dict[str, Any]) -> dict[str, Any]:
    observation = env.reset(request["slot"], Episode(**request["episode"]))
    return {"ok": True, "instruction": _put(block, request["slot"], "observation", observation)}


def _chunk_step(env: Any, block: wire.Block, request: dict[str, Any]) -> dict[str, Any]:
    slots, length = request["slots"], request["length"]
    actions = np.stack([block[f"{slot}.actions"][:length] for slot in slots])
    results = env.chunk_step(slots, actions, record=request["record"])
    return {"ok": True, "results": [_put_result(block, s, r) for s, r in zip(slots, results)]}


def _expert_chunk(env: Any, block: wire.Block, request: dict[str, Any]) -> dict[str, Any]:
    chunks = env.expert_chunk(request["slots"], request["length"], noise=request["noise"])
    results = []
    for slot, chunk in zip(request["slots"], chunks):
        block[f"{slot}.expert"][: request["length"]] = chunk.actions
        results.append(_put_result(block, slot, chunk.result))
    return {"ok": True, "results": results}


_HANDLERS = {"reset": _reset, "chunk_step": _chunk_step, "expert_chunk": _expert_chunk}

if __name__ == "__main__":
    main(*(int(a) for a in os.environ["VLA3_ENV_FDS"].split(",")))
