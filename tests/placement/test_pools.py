"""Two pools on a GPU: budgets refused before the device is full, high-water marks and fragmentation as they are."""

from contextlib import contextmanager

import pytest

from vla3_plugin.placement import pools
from vla3_plugin.placement.pools import GB, MODEL, SIMULATOR, DevicePools, OverBudgetError, Usage, budget_faults

CAPACITY = 80 * GB


class FakeAllocator:
    """A caching allocator: what is freed stays reserved as a hole, and holes are filled first; no two are joined."""

    def __init__(self, capacity=CAPACITY):
        self.capacity, self.used, self.holes = capacity, {}, {}
        self.current = None

    @contextmanager
    def into(self, pool):
        self.current = pool
        yield
        self.current = None

    def allocate(self, size, pool=None):
        pool = pool or self.current
        holes = self.holes.setdefault(pool, [])
        hole = min((h for h in holes if h >= size), default=None)
        if hole is not None:
            holes.remove(hole)
            holes += [hole - size] * (hole > size)
        elif self.reserved() + size > self.capacity:
            raise MemoryError("out of memory")
        self.used.setdefault(pool, []).append(size)

    def free(self, size, pool):
        self.used[pool].remove(size)
        self.holes[pool].append(size)

    def reserved(self):
        return sum(sum(sizes) for kind in (self.used, self.holes) for sizes in kind.values())

    def usage(self, pool):
        used, holes = self.used.get(pool, []), self.holes.get(pool, [])
        return Usage(sum(used), sum(used) + sum(holes), max(holes, default=0))


@pytest.fixture
def device():
    return DevicePools(FakeAllocator(), {MODEL: 50 * GB, SIMULATOR: 20 * GB}, "node 0 GPU 1")


def test_budgets_that_the_device_does_not_have_are_refused():
    with pytest.raises(
        OverBudgetError, match="60.00 GB for the model pool [+] 30.00 GB for the simulator pool = 90.00"
    ):
        DevicePools(FakeAllocator(), {MODEL: 60 * GB, SIMULATOR: 30 * GB})


def test_a_request_beyond_the_budget_fails_before_the_device_is_full(device):
    device.allocator.allocate(40 * GB, MODEL)
    with pytest.raises(
        OverBudgetError, match="optimizer states needs 15.00 GB in the model pool, which holds 40.00 GB"
    ) as e:
        device.request(MODEL, 15 * GB, "optimizer states")
    assert "node 0 GPU 1" in str(e.value) and "the simulator pool holds 0.00 GB of the device's 80.00 GB" in str(
        e.value
    )
    device.allocator.allocate(15 * GB, MODEL)  # the device would have had it: it is the budget that speaks first


def test_each_pool_has_its_own_budget(device):
    device.allocator.allocate(50 * GB, MODEL)
    device.request(SIMULATOR, 20 * GB, "scenes")
    with pytest.raises(OverBudgetError, match="vla3.env.envs_per_shard.*raise vla3.placement.simulator_memory_gb"):
        device.request(SIMULATOR, 21 * GB, "scenes")


def test_a_pool_that_outgrew_its_budget_is_found_and_named(device):
    device.check()
    device.allocator.allocate(23 * GB, SIMULATOR)
    with pytest.raises(OverBudgetError, match="after 4 resets the simulator pool holds 23.00 GB, 3.00 GB more than"):
        device.check("4 resets")


def test_a_pool_without_a_budget_may_take_what_the_other_leaves():
    device = DevicePools(FakeAllocator(), {MODEL: None, SIMULATOR: 30 * GB})
    device.request(MODEL, 50 * GB, "weights")
    with pytest.raises(OverBudgetError):
        device.request(MODEL, 51 * GB, "weights")


def test_allocations_inside_use_come_from_the_pool_and_are_checked_after(device):
    with device.use(MODEL, "weights", expect=30 * GB):
        device.allocator.allocate(30 * GB)
    assert device.allocator.usage(MODEL).allocated == 30 * GB
    with pytest.raises(OverBudgetError, match="after activations the model pool holds 60.00 GB"):
        with device.use(MODEL, "activations"):
            device.allocator.allocate(30 * GB)
    with pytest.raises(OverBudgetError), device.use(SIMULATOR, "scenes", expect=21 * GB):
        pytest.fail("nothing is allocated that was refused")


def test_holes_are_used_and_fragmentation_says_what_they_are_worth(device):
    for _ in range(5):
        device.allocator.allocate(10 * GB, MODEL)
    for _ in range(3):
        device.allocator.free(10 * GB, MODEL)
    assert device.allocator.usage(MODEL).fragmentation == pytest.approx(2 / 3)  # 30 GB free, 10 in one piece
    device.request(MODEL, 10 * GB, "a layer")
    with pytest.raises(
        OverBudgetError, match="holds 50.00 GB of 50.00 GB .30.00 GB of them free, 10.00 GB in one piece"
    ):
        device.request(MODEL, 20 * GB, "a larger layer")


def test_the_high_water_mark_stays_and_metrics_hold_every_figure(device):
    device.allocator.allocate(40 * GB, MODEL)
    device.check()
    device.allocator.free(40 * GB, MODEL)
    device.allocator.holes[MODEL].clear()  # given back to the device
    found = device.metrics()
    assert (found["model_gb"], found["model_allocated_gb"], found["model_high_water_gb"]) == (0, 0, 40)
    assert (found["model_budget_gb"], found["simulator_budget_gb"], found["simulator_fragmentation"]) == (50, 20, 0)
    assert len(found) == 10


def test_budgets_are_added_up_by_device_before_the_start():
    budgets = {MODEL: 30.0, SIMULATOR: 30.0}
    assert budget_faults({"node 0 GPU 0": 1}, budgets, CAPACITY) == []
    (fault,) = budget_faults({"node 0 GPU 0": 1, "node 0 GPU 1": 2}, budgets, CAPACITY)
    assert "2 x 30 GB + 30 GB for simulators = 90 GB on node 0 GPU 1, which has 80.00 GB" in fault
    assert budget_faults({"node 0 GPU 0": 9}, {MODEL: None, SIMULATOR: None}, CAPACITY) == []


class FakeCuda:
    """What ``torch.cuda`` answers, as PyTorch documents it; the real one has not been run."""

    def __init__(self):
        block = {"size": 6 * GB, "state": "active_allocated"}
        hole = {"size": 2 * GB, "state": "inactive"}
        self.segment = {"device": 0, "total_size": 8 * GB, "allocated_size": 6 * GB, "blocks": [block, hole]}

    def memory_snapshot(self, include_traces):
        return [self.segment, {**self.segment, "device": 1}]

    def mem_get_info(self, device):
        return 55 * GB, CAPACITY


def test_what_other_processes_hold_is_the_simulators():
    allocator = pools.TorchAllocator.__new__(pools.TorchAllocator)
    allocator._cuda, allocator.device, allocator._pool = FakeCuda(), 0, None
    assert allocator.usage(MODEL) == Usage(6 * GB, 8 * GB, 2 * GB)
    assert allocator.usage(SIMULATOR).reserved == CAPACITY - 55 * GB - 8 * GB
    with pytest.raises(OverBudgetError, match="the simulator pool holds 17.00 GB, 2.00 GB more"):
        DevicePools(allocator, {MODEL: 60 * GB, SIMULATOR: 15 * GB}).check()
