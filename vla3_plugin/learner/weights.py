"""The weight plane on CPUs: a verl checkpoint-engine backend that broadcasts one verified flat buffer over gloo.

On GPUs the recipes use verl's own backends (nccl); this one exists because all of verl's need an accelerator. Each
publication carries its version, its parameter count and a checksum; a receiver yields nothing it has not verified.
"""

import asyncio
import json
import socket
import zlib
from collections.abc import AsyncGenerator, Callable, Generator
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

BACKEND = "vla3_gloo"
_TIMEOUT = timedelta(minutes=30)  # the other side may be in the middle of an update


class WeightError(RuntimeError):
    """A publication that is not what its manifest says."""


def _checksum(buffer: Tensor) -> int:
    return zlib.crc32(buffer.numpy().data)


def pack(weights: Generator[tuple[str, Tensor], None, None], version: int) -> tuple[dict[str, Any], Tensor]:
    """One contiguous byte buffer and the manifest that describes and verifies it."""
    entries, parts, offset = [], [], 0
    for name, tensor in weights:  # every actor rank must drain the generator: it runs the all-gathers
        tensor = tensor.detach().cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
        entries.append([name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), offset])
        parts.append(data)
        offset += data.numel()
    buffer = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    manifest = {
        "version": version,
        "count": len(entries),
        "bytes": buffer.numel(),
        "crc32": _checksum(buffer),
        "entries": entries,
    }
    return manifest, buffer


def unpack(manifest: dict[str, Any], buffer: Tensor, expected_version: int | None) -> list[tuple[str, Tensor]]:
    """The named tensors of a publication.

    Raises:
        WeightError: version, count, size or checksum differ from the manifest or from what was announced.
    """
    if expected_version is not None and manifest["version"] != expected_version:
        raise WeightError(f"weights of version {manifest['version']} arrived, version {expected_version} was announced")
    if manifest["count"] != len(manifest["entries"]) or manifest["bytes"] != buffer.numel():
        raise WeightError(
            f"version {manifest['version']}: {len(manifest['entries'])} tensors in {buffer.numel()} bytes arrived, "
            f"the manifest says {manifest['count']} in {manifest['bytes']}"
        )
    checksum = _checksum(buffer)
    if checksum != manifest["crc32"]:
        published = manifest["crc32"]
        raise WeightError(f"version {manifest['version']}: checksum {checksum:#010x}, published {published:#010x}")
    tensors = []
    for name, shape, dtype, offset in manifest["entries"]:
        kind = getattr(torch, dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        # a copy, because views into the buffer need not be aligned to their dtype
        tensors.append((name, buffer[offset : offset + size].clone().view(kind).reshape(shape)))
    return tensors


def _listen(address: str, port: int) -> int:
    """A descriptor that listens on this address alone, for the store to own: by itself it takes every interface."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family).detach()


@CheckpointEngineRegistry.register(BACKEND)
class GlooCheckpointEngine(CheckpointEngine):
    """Actor rank 0 broadcasts to every rollout worker; the other actor ranks only take part in the all-gathers."""

    def __init__(self, bucket_size: int, is_master: bool = False, **_: Any) -> None:
        self.is_master = is_master
        self.member: tuple[int, int, dict[str, Any]] | None = None

    def prepare(self) -> dict[str, Any]:
        if not self.is_master:
            return {}
        address = ray.util.get_node_ip_address().strip("[]")
        with socket.socket() as probe:
            probe.bind((address, 0))
            return {"address": address, "port": probe.getsockname()[1]}

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]):
        world = 1 + rollout_world_size

        def side(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks, "world_size": [world] * len(ranks), "meta": [metadata[0]] * len(ranks)}

        return side([0] + [-1] * (actor_wg_world_size - 1)), side(list(range(1, world)))

    def init_process_group(self, rank: int, world_size: int, meta: dict[str, Any]) -> None:
        """Only noted: connecting waits for the other side, and this process answers requests meanwhile."""
        self.member = (rank, world_size, meta) if rank >= 0 else None

    def _connect(self) -> Callable[[Tensor], Tensor]:
        """The broadcast of this publication. Its connection is its own: one that hangs on a dead peer must not meet the
        next one.
        """
        assert self.member is not None
        rank, world_size, meta = self.member
        listen: dict[str, Any] = {"master_listen_fd": _listen(meta["address"], meta["port"])} if rank == 0 else {}
        store = dist.TCPStore(meta["address"], meta["port"], world_size, rank == 0, timeout=_TIMEOUT, **listen)
        group: Any = dist.ProcessGroupGloo(store, rank, world_size, _TIMEOUT)

        def broadcast(tensor: Tensor) -> Tensor:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            group.broadcast([tensor], options).wait()
            return tensor

        return broadcast

    def finalize(self) -> None:
        self.member = None

    # Packing reads the weights and must be done before the next call of this process changes them. Sending and
    # receiving only wait for the network, on a thread, so that gradients and inference go on.

    async def send_weights(self, weights, global_steps: int | None = None) -> dict[str, float]:
        manifest, buffer = pack(weights, -1 if global_steps is None else global_steps)
        if self.member is None:
            return {}
        await asyncio.to_thread(self._send, manifest, buffer)
        return {"weights/bytes": float(buffer.numel()), "weights/tensors": float(manifest["count"])}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, Tensor], None]:
        for name, tensor in await asyncio.to_thread(self._receive, global_steps):
            yield name, tensor

    def _send(self, manifest: dict[str, Any], buffer: Tensor) -> None:
        broadcast = self._connect()
        header = torch.frombuffer(bytearray(json.dumps(manifest).encode()), dtype=torch.uint8)
        broadcast(torch.tensor([header.numel(), buffer.numel()]))
        broadcast(header)
        broadcast(buffer)

    def _receive(self, version: int | None) -> list[tuple[str, Tensor]]:
        broadcast = self._connect()
        sizes = broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
        header = broadcast(torch.empty(sizes[0], dtype=torch.uint8))
        buffer = broadcast(torch.empty(sizes[1], dtype=torch.uint8))
        return unpack(json.loads(header.numpy().tobytes()), buffer, version)
