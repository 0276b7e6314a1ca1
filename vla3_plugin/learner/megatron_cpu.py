"""megatron-core on a machine without CUDA: its data-parallel wrapper and optimizers name the device in their code.

What they do has no CUDA in it (contiguous buffers, collectives of the process group, torch's AdamW), so two answers are
enough: a tensor asked for on "cuda" is made on the CPU, and a CPU tensor is called by the type that its CUDA twin has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from verl.utils.device import get_device_name


class _CudaIsTheCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        answer = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(answer, str):  # compared with 'torch.cuda.FloatTensor'
            return answer.replace("torch.", "torch.cuda.")
        return answer


@contextmanager
def megatron_device() -> Iterator[None]:
    """Around every call that builds or steps what is megatron's. Does nothing where verl has an accelerator."""
    if get_device_name() != "cpu":
        yield
        return
    cuda: Any = torch.cuda
    before, cuda.current_device = cuda.current_device, lambda: torch.device("cpu")
    try:
        with _CudaIsTheCpu():  # this thread's
            yield
    finally:
        cuda.current_device = before
