"""How parent and child talk: small JSON frames over two pipes, arrays in a shared memory block.

The block is an unnamed file whose descriptor the child inherits: whatever dies, and however, nothing is left behind.
No pickle: the child may be another Python, and neither side runs what the other sends.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import struct
import tempfile
import time
from typing import IO, Any, Optional

import numpy as np

from vla3_plugin.contract import EnvSpec

MAX_CHUNK = 64  # control steps of one chunk, and frames of one recorded chunk


class Disconnected(Exception):
    """The other side closed its end of the pipe."""


def send(fd: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    view = memoryview(struct.pack("<I", len(data)) + data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BrokenPipeError:
            raise Disconnected() from None


def receive(fd: int, timeout: Optional[float] = None) -> Optional[dict[str, Any]]:
    """The next frame, or None where it has not arrived whole after ``timeout`` seconds."""
    deadline = None if timeout is None else time.monotonic() + timeout
    head = _exactly(fd, 4, deadline)
    body = None if head is None else _exactly(fd, struct.unpack("<I", head)[0], deadline)
    return None if body is None else json.loads(body)


def _exactly(fd: int, size: int, deadline: Optional[float]) -> Optional[bytes]:
    parts = []
    while size:
        if deadline is not None and not _readable(fd, deadline):
            return None
        part = os.read(fd, size)
        if not part:
            raise Disconnected()
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _readable(fd: int, deadline: float) -> bool:
    """Wait for data or the other side's end. ``select`` would fail above 1024 open files."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


def unnamed_file() -> IO[bytes]:
    """A file with no name, in memory where the system has a place for that.

    ``memfd`` first: it does not count against /dev/shm, which containers often limit to 64 MB.
    """
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("vla3-env"), "w+b")
    shm = "/dev/shm"
    return tempfile.TemporaryFile(dir=shm if os.path.isdir(shm) and os.access(shm, os.W_OK) else None)


class Block:
    """Arrays of every slot at fixed places of the shared file, laid out from the spec alone, the same on both sides.

    The images of all slots and cameras lie one after another, so that a batch of them needs no copy: see ``rows``.
    """

    def __init__(self, fd: int, spec: EnvSpec, num_slots: int, create: bool) -> None:
        layout: list[tuple[str, tuple[int, ...], str]] = []
        slots = range(num_slots)
        first = next(iter(spec.cameras.values()), (1, 1))
        for kind in ("observation", "final"):
            layout += [(f"{s}.{kind}.{c}", (*size, 3), "uint8") for s in slots for c, size in spec.cameras.items()]
        layout += [(f"{s}.frames", (MAX_CHUNK, *first, 3), "uint8") for s in slots]
        for kind in ("observation", "final"):
            layout += [(f"{s}.{kind}.state", (spec.state_dim,), "float32") for s in slots]
        for slot in slots:
            layout.append((f"{slot}.actions", (MAX_CHUNK, spec.action_dim), "float32"))
            layout.append((f"{slot}.expert", (MAX_CHUNK, spec.action_dim), "float32"))
            layout.append((f"{slot}.rewards", (MAX_CHUNK,), "float32"))
            for flag in ("terminated", "truncated", "valid"):
                layout.append((f"{slot}.{flag}", (MAX_CHUNK,), "bool"))
        places, offset = [], 0
        for name, shape, dtype in layout:
            size, align = int(np.prod(shape)) * np.dtype(dtype).itemsize, np.dtype(dtype).itemsize
            offset = -(-offset // align) * align
            places.append((name, shape, dtype, offset))
            offset += size
        if create:
            os.ftruncate(fd, offset)
        self._map = mmap.mmap(fd, max(offset, 1))
        self.bytes = offset
        whole = np.frombuffer(self._map, dtype=np.uint8)
        self.arrays = {
            name: whole[place : place + int(np.prod(shape)) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)
            for name, shape, dtype, place in places
        }

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def close(self) -> None:
        self.arrays.clear()
        try:
            self._map.close()
        except BufferError:
            pass  # somebody still holds a view; the mapping goes with it
