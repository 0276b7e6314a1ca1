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
from typing import Any, NamedTuple

import ray
import torch
import torch.distributed as dist
from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from vla3_plugin.telemetry import traffic

BACKEND = "vla3_gloo"
_ALIGNED = 16  # bytes: where each tensor begins in the buffer, so that it can be looked at where it lies
TRAINED_ONLY = "vla3.trained_only"  # a publication with this entry leaves out what training does not change
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
        parts += [data, torch.zeros(-data.numel() % _ALIGNED, dtype=torch.uint8)]
        offset += data.numel() + parts[-1].numel()
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
    """The named tensors of a publication, as views of ``buffer``.

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
        tensors.append((name, buffer[offset : offset + size].view(kind).reshape(shape)))
    return tensors


def _listen(address: str) -> socket.socket:
    """Listens on a free port of this address alone; a store by itself takes every interface."""
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


class Circle(NamedTuple):
    """A broadcast that this process takes part in: rank 0 sends, and listens at ``address``."""

    rank: int
    world_size: int
    address: str
    port: int
    between_nodes: bool = False  # what rank 0 sends to this rank leaves a node


def topology(master: dict[str, Any], receivers: list[dict[str, Any]]) -> tuple[list[Circle | None], ...]:
    """(where each receiver gets weights from, to whom it hands them on), and the master's own circle at the end.

    The master sends to the receivers on its node and to one on every other node, which hands them on there: weights
    cross the network once a node, however many policy workers it has.
    """
    nodes: dict[str, list[int]] = {}
    for i, receiver in enumerate(receivers):
        nodes.setdefault(receiver["node"], []).append(i)
    first = nodes.pop(master["node"], []) + [members[0] for members in nodes.values()]
    sources: list[Circle | None] = [None] * len(receivers)
    relays: list[Circle | None] = [None] * (len(receivers) + 1)
    relays[-1] = circle = Circle(0, 1 + len(first), master["address"], master["port"])
    for rank, i in enumerate(first, 1):
        sources[i] = circle._replace(rank=rank, between_nodes=receivers[i]["node"] != master["node"])
    for head, *others in nodes.values():
        if others:
            relays[head] = circle = Circle(0, 1 + len(others), receivers[head]["address"], receivers[head]["port"])
            for rank, i in enumerate(others, 1):
                sources[i] = circle._replace(rank=rank)
    return sources, relays


@CheckpointEngineRegistry.register(BACKEND)
class GlooCheckpointEngine(CheckpointEngine):
    """Actor rank 0 sends, as ``topology`` says; the other actor ranks only take part in the all-gathers."""

    def __init__(self, bucket_size: int, is_master: bool = False, **_: Any) -> None:
        self.is_master = is_master
        self.source: Circle | None = None
        self.relay: Circle | None = None
        self.listener: socket.socket | None = None

    def prepare(self) -> dict[str, Any]:
        address = ray.util.get_node_ip_address().strip("[]")
        return {"address": address, "port": self.listen(address), "node": ray.get_runtime_context().get_node_id()}

    def listen(self, address: str) -> int:
        """Let others connect from now on, and return the port: a store's client that is refused tries again only after
        half a second or so, and a whole publication takes a tenth of that."""
        self._stop_listening()
        self.listener = _listen(address)
        return self.listener.getsockname()[1]

    def _stop_listening(self) -> None:
        if self.listener is not None:
            self.listener.close()
            self.listener = None

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]):
        sources, relays = topology(metadata[0], metadata[actor_wg_world_size:])
        *relays, master = relays
        idle = [None] * (actor_wg_world_size - 1)
        return {"source": [None, *idle], "relay": [master, *idle]}, {"source": sources, "relay": relays}

    def init_process_group(self, source: Circle | None, relay: Circle | None) -> None:
        """Only noted: connecting waits for the other side, and this process answers requests meanwhile."""
        self.source, self.relay = source, relay
        if relay is None:
            self._stop_listening()

    def finalize(self) -> None:
        self.source = self.relay = None
        self._stop_listening()

    # Packing reads the weights and must be done before the next call of this process changes them. Sending and
    # receiving only wait for the network, on a thread, so that gradients and inference go on.

    async def send_weights(self, weights, global_steps: int | None = None) -> dict[str, float]:
        if self.relay is None:
            for _ in weights:  # the all-gathers need every rank
                pass
            return {}
        if self.listener is not None and self.listener.getsockname()[1] != self.relay.port:
            for _ in weights:
                pass
            raise RuntimeError("another attempt to publish has begun since this one was prepared")
        manifest, buffer = pack(weights, -1 if global_steps is None else global_steps)
        header = torch.frombuffer(bytearray(json.dumps(manifest).encode()), dtype=torch.uint8)
        listener, self.listener = self.listener, None
        await asyncio.to_thread(_send, self.relay, listener, header, buffer)
        return {"weights/bytes": float(buffer.numel()), "weights/tensors": float(manifest["count"])}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, Tensor], None]:
        assert self.source is not None
        listener, self.listener = self.listener, None
        tensors = await asyncio.to_thread(_receive, self.source, self.relay, listener, global_steps)
        for name, tensor in tensors:
            yield name, tensor


def _connect(circle: Circle, listener: socket.socket | None = None) -> Callable[[Tensor], Tensor]:
    """The broadcast of this publication. Its connection is its own: one that hangs on a dead peer must not meet the
    next one. Rank 0 brings the ``listener`` that the others connect to; the store owns it then.
    """
    at = (circle.address, circle.port)
    listen: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener.detach()}
    store = dist.TCPStore(*at, circle.world_size, circle.rank == 0, timeout=_TIMEOUT, **listen)
    group: Any = dist.ProcessGroupGloo(store, circle.rank, circle.world_size, _TIMEOUT)

    def broadcast(tensor: Tensor) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        group.broadcast([tensor], options).wait()
        return tensor

    return broadcast


def _send(circle: Circle, listener: socket.socket | None, header: Tensor, buffer: Tensor) -> None:
    broadcast = _connect(circle, listener)
    for part in (torch.tensor([header.numel(), buffer.numel()]), header, buffer):
        broadcast(part)


def _receive(
    source: Circle, relay: Circle | None, listener: socket.socket | None, version: int | None
) -> list[tuple[str, Tensor]]:
    broadcast = _connect(source)
    sizes = broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
    header, buffer = (broadcast(torch.empty(size, dtype=torch.uint8)) for size in sizes)
    if source.between_nodes:
        traffic.count("between_nodes", [buffer])
    if relay is not None:  # as it came: each receiver verifies for itself, and none waits in vain
        _send(relay, listener, header, buffer)
    return unpack(json.loads(header.numpy().tobytes()), buffer, version)
