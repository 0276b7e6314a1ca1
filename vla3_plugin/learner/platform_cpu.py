"""A verl platform for machines without an accelerator.

verl registers nvidia, amd and huawei only and falls back to nvidia, whose first collective fails without NCCL. This one
claims the process only when CUDA is absent.
"""

import functools
import types
from contextlib import contextmanager
from typing import Any

import torch


@functools.cache
def _device_module() -> types.ModuleType:
    """What verl calls on ``torch.cuda``, with the process's own memory in the place of the device's."""
    import psutil

    module: Any = types.ModuleType("vla3_cpu_device")
    module.is_available = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: "cpu"
    module.get_device_name = lambda *_: "CPU"
    for name in ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"):
        setattr(module, name, lambda *_args, **_kwargs: None)
    module.manual_seed = module.manual_seed_all = torch.manual_seed
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, lambda *_: psutil.Process().memory_info().rss)
    module.mem_get_info = lambda *_: (psutil.virtual_memory().available, psutil.virtual_memory().total)
    module.get_rng_state = lambda *_: torch.get_rng_state()
    module.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    return module


class _CpuIndex(str):
    """``tensor.to(get_device_id())`` needs "cpu", ``f"{device}:{get_device_id()}"`` needs a number."""

    def __format__(self, spec: str) -> str:
        return "0"


def register() -> None:
    from verl.plugin.platform import PlatformBase, PlatformRegistry

    class PlatformCPU(PlatformBase):
        device_name = property(lambda self: "cpu")
        vendor_name = property(lambda self: "cpu")

        @property
        def device_module(self):
            return _device_module()

        def is_available(self):
            return True

        def is_platform_available(self, use_smi_check=False):
            return not torch.cuda.is_available()

        def current_device(self):
            return _CpuIndex("cpu")

        def device_count(self):
            return 1

        def set_device(self, device_index):
            pass

        def synchronize(self, device_index=None):
            pass

        def manual_seed(self, seed):
            torch.manual_seed(seed)

        def manual_seed_all(self, seed):
            torch.manual_seed(seed)

        def set_allocator_settings(self, settings):
            pass

        def empty_cache(self):
            pass

        def get_device_capability(self, device_index=0):
            return None, None

        def communication_backend_name(self):
            return "gloo"

        def visible_devices_envvar(self):
            return "CUDA_VISIBLE_DEVICES"

        @contextmanager
        def nvtx_range(self, msg):
            yield

        def profiler_start(self):
            pass

        def profiler_stop(self):
            pass

        def ray_resource_name(self):
            # verl's pools ask for one GPU a worker; on a CPU these are logical, declared when the cluster starts
            return "GPU"

        def ray_resource_options(self, num_gpus):
            return {"num_gpus": num_gpus}

        def ray_noset_envvars(self):
            return []

        def is_ipc_supported(self):
            return False

        def cudart(self):
            return None

    PlatformRegistry.register(platform="cpu")(PlatformCPU)
