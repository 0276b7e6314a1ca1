"""verl builds its global process group with 'cpu:gloo,{device}:{backend}', on a CPU twice the device 'cpu'."""

import functools

TARGET = "verl.utils.distributed"
VERSIONS = ">=0.9,<0.10"
WHY = "torch refuses 'cpu:gloo,cpu:gloo' (ValueError: Duplicate device type cpu), so no worker starts without a GPU"
UPSTREAM = "verl/utils/distributed.py initialize_global_process_group_ray; goes when verl ships a CPU platform"


def apply(module):
    original = module.initialize_global_process_group_ray

    @functools.wraps(original)
    def initialize(timeout_second=None, backend=None):
        if backend is None and module.get_device_name() == "cpu":
            backend = "cpu:gloo"
        return original(timeout_second=timeout_second, backend=backend)

    module.initialize_global_process_group_ray = initialize
