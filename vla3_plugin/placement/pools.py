"""Memory of a GPU that hosts simulators and models, in two pools: what each may take, takes, and took at most.

A pool that outgrows its budget is an error that names both pools, raised before the device is full; the device's own
error comes later, and in whichever process happened to ask last. On a GPU the model pool is this process's (PyTorch's
allocator, or a ``torch.cuda.MemPool`` of its own), and the simulator pool is what other processes hold there: a
simulator is a process, with an allocator that no one else can ask. The CUDA part is unverified until a GPU has run it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

GB = 10**9
MODEL, SIMULATOR = "model", "simulator"


class OverBudgetError(RuntimeError):
    """A pool needs more than its budget; the message holds the arithmetic of the device."""


@dataclass(frozen=True)
class Usage:
    """Bytes: ``allocated`` of ``reserved`` are in use; ``largest_free`` is the largest hole between them."""

    allocated: int
    reserved: int
    largest_free: int = 0

    @property
    def fragmentation(self) -> float:
        """The part of the free bytes that the largest request still served could not have: 0 is one hole, or none."""
        free = self.reserved - self.allocated
        return 1 - self.largest_free / free if free > 0 else 0.0


class Allocator(Protocol):
    """A device's memory, by pool."""

    @property
    def capacity(self) -> int: ...

    def usage(self, pool: str) -> Usage: ...

    def into(self, pool: str) -> AbstractContextManager[Any]:
        """Allocations inside come from ``pool``."""
        ...


class DevicePools:
    """Budgets and figures of one device. ``budgets``: bytes by pool; a pool without one may take what others leave.

    Raises:
        OverBudgetError: the budgets are more than the device has.
    """

    def __init__(self, allocator: Allocator, budgets: Mapping[str, int | None], name: str = "GPU") -> None:
        self.allocator, self.name = allocator, name
        self.budgets = dict(budgets)
        self.high_water = dict.fromkeys(budgets, 0)
        given = {pool: budget for pool, budget in budgets.items() if budget is not None}
        if sum(given.values()) > allocator.capacity:
            parts = " + ".join(f"{_gb(budget)} for the {pool} pool" for pool, budget in given.items())
            raise OverBudgetError(
                f"{name}: {parts} = {_gb(sum(given.values()))} are more than its {_gb(allocator.capacity)}; lower "
                "vla3.placement.model_memory_gb or vla3.placement.simulator_memory_gb"
            )

    def budget(self, pool: str) -> int:
        """What ``pool`` may reserve: its budget, or all that other pools' budgets leave."""
        own = self.budgets[pool]
        others = sum(budget or 0 for name, budget in self.budgets.items() if name != pool)
        return own if own is not None else self.allocator.capacity - others

    def request(self, pool: str, size: int, what: str) -> None:
        """Ask before allocating ``size`` bytes at once for ``what``.

        Raises:
            OverBudgetError: no hole of the pool holds them, and the pool must not grow by as much.
        """
        usage = self._observe(pool)
        if size > usage.largest_free and usage.reserved + size > self.budget(pool):
            raise OverBudgetError(
                f"{self.name}: {what} needs {_gb(size)} in the {pool} pool, which holds {_gb(usage.reserved)} of "
                f"{_gb(self.budget(pool))} ({_gb(usage.reserved - usage.allocated)} of them free, "
                f"{_gb(usage.largest_free)} in one piece). {self._levers(pool)}"
            )

    @contextmanager
    def use(self, pool: str, what: str, expect: int = 0) -> Iterator[None]:
        """Allocate inside from ``pool``; ``expect``: bytes that must be had at once."""
        if expect:
            self.request(pool, expect, what)
        with self.allocator.into(pool):
            yield
        self.check(what)

    def check(self, what: str = "the run") -> None:
        """Note what every pool holds now.

        Raises:
            OverBudgetError: one holds more than its budget.
        """
        for pool in self.budgets:
            usage = self._observe(pool)
            if usage.reserved > self.budget(pool):
                raise OverBudgetError(
                    f"{self.name}: after {what} the {pool} pool holds {_gb(usage.reserved)}, "
                    f"{_gb(usage.reserved - self.budget(pool))} more than its budget of {_gb(self.budget(pool))}. "
                    f"{self._levers(pool)}"
                )

    def metrics(self) -> dict[str, float]:
        """Of each pool ``_gb`` (reserved), ``_allocated_gb``, ``_high_water_gb``, ``_budget_gb`` and fragmentation."""
        found: dict[str, float] = {}
        for pool in self.budgets:
            usage = self._observe(pool)
            sizes = {"": usage.reserved, "_allocated": usage.allocated, "_high_water": self.high_water[pool]}
            sizes["_budget"] = self.budget(pool)
            found |= {f"{pool}{name}_gb": size / GB for name, size in sizes.items()}
            found[f"{pool}_fragmentation"] = usage.fragmentation
        return found

    def _observe(self, pool: str) -> Usage:
        usage = self.allocator.usage(pool)
        self.high_water[pool] = max(self.high_water[pool], usage.reserved)
        return usage

    def _levers(self, pool: str) -> str:
        others = ", ".join(f"the {p} pool holds {_gb(self._observe(p).reserved)}" for p in self.budgets if p != pool)
        smaller = "the micro-batch" if pool == MODEL else "vla3.env.envs_per_shard, or camera_size"
        there = f"{others} of the device's {_gb(self.allocator.capacity)}" if others else ""
        return f"Lower {smaller}, or raise vla3.placement.{pool}_memory_gb ({there})"


def budget_faults(models: Mapping[Any, int], budgets: Mapping[str, float | None], capacity: int) -> list[str]:
    """Devices that the budgets do not fit.

    Args:
        models: learner ranks and policy workers on each device that hosts a simulator too.
        budgets: GB; of one of them under ``model``, of all simulators of a device under ``simulator``.
        capacity: bytes of a device.
    """
    model, simulator = (budgets[pool] or 0 for pool in (MODEL, SIMULATOR))
    return [
        f"vla3.placement.model_memory_gb: {count} x {model:g} GB + {simulator:g} GB for simulators = "
        f"{count * model + simulator:g} GB on {device}, which has {_gb(capacity)}; lower one of them, or place env "
        "elsewhere"
        for device, count in models.items()
        if (count * model + simulator) * GB > capacity
    ]


def _gb(size: float) -> str:
    return f"{size / GB:.2f} GB"


# ---------------------------------------------------------------- CUDA: unverified until a GPU has run it


class TorchAllocator:
    """A CUDA device as this process sees it. The model pool is a ``torch.cuda.MemPool`` where ``own_pool`` is set, else
    all that PyTorch holds in this process; the simulator pool is what other processes hold on the device."""

    def __init__(self, device: Any = None, own_pool: bool = False) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self.device = torch.cuda.current_device() if device is None else device
        self._pool: Any = torch.cuda.MemPool() if own_pool else None

    @property
    def capacity(self) -> int:
        return int(self._cuda.mem_get_info(self.device)[1])

    def usage(self, pool: str) -> Usage:
        segments = self._segments(None)
        if pool == SIMULATOR:
            free, total = self._cuda.mem_get_info(self.device)
            others = max(0, total - free - sum(segment["total_size"] for segment in segments))
            return Usage(others, others)
        own = self._segments(self._pool) if self._pool is not None else segments
        holes = [b["size"] for s in own for b in s["blocks"] if b["state"] == "inactive"]
        allocated = sum(segment["allocated_size"] for segment in own)
        return Usage(allocated, sum(segment["total_size"] for segment in own), max(holes, default=0))

    def into(self, pool: str) -> AbstractContextManager[Any]:
        if pool != MODEL or self._pool is None:
            raise ValueError(f"{pool}: only the model pool of an allocator with own_pool takes allocations")
        return self._cuda.use_mem_pool(self._pool, self.device)

    def _segments(self, pool: Any) -> list[dict[str, Any]]:
        snapshot = self._cuda.memory_snapshot if pool is None else pool.snapshot
        found = snapshot(include_traces=False)
        return [segment for segment in found if segment["device"] == self.device]


_here: dict[str, DevicePools] = {}  # of this process, by the process's name


def report(_actor: Any, name: str, budgets: Mapping[str, float | None]) -> dict[str, float]:
    """Run inside a worker: limit PyTorch to the model budget at the first call; figures, or an ``OverBudgetError``."""
    if name not in _here:
        import torch

        allocator = TorchAllocator()
        sizes = {pool: None if size is None else int(size * GB) for pool, size in budgets.items()}
        _here[name] = DevicePools(allocator, sizes, name)
        if (model := sizes[MODEL]) is not None:
            torch.cuda.set_per_process_memory_fraction(model / allocator.capacity, allocator.device)
    _here[name].check()
    return _here[name].metrics()


def collect(policy_workers: list[Any], budgets: Mapping[str, float | None]) -> dict[str, float]:
    """``report`` of every policy worker, as metrics ``memory/policy<rank>_<figure>``."""
    import ray

    calls = [w.__ray_call__.remote(report, f"policy worker {i}", budgets) for i, w in enumerate(policy_workers)]
    return {f"memory/policy{i}_{key}": value for i, found in enumerate(ray.get(calls)) for key, value in found.items()}
