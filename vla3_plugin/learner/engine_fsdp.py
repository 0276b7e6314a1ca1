"""verl's FSDP engine for a ``VLAPolicy``.

Everything about sharding, mixed precision, offload, optimizer, clipping and sharded checkpoints stays verl's; what does
not depend on FSDP is in ``engine_common``.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from verl.utils.fsdp_utils import fsdp_version
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from vla3_plugin.learner.engine_common import VLAEngine


@EngineRegistry.register(model_type="vla_policy", backend=["fsdp", "fsdp2"], device=["cuda", "npu", "cpu"])
class VLAFSDPEngine(VLAEngine, FSDPEngine):
    """One rank of the learner. FSDP2 runs everywhere; FSDP1 needs parameters on an accelerator."""

    def _parameter_dtype(self) -> torch.dtype:
        return PrecisionType.to_dtype(self.engine_config.model_dtype or "fp32")

    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> Any:
        return FSDPEngine._gradient_sync_context(self, is_last_micro_batch=is_last_micro_batch)

    def _build_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        from verl.workers.config.optimizer import build_optimizer

        value_lr = self.model_config.value_lr
        trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        if value_lr is None:
            return build_optimizer([p for _, p in trained], self.optimizer_config)
        groups = [
            {"params": [p for n, p in trained if "value_head" not in n]},
            {"params": [p for n, p in trained if "value_head" in n], "lr": value_lr},
        ]
        return build_optimizer([g for g in groups if g["params"]], self.optimizer_config)

    def _divide_gradients(self, total: float) -> None:
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(total)

    def _take_step(self) -> Any:
        return FSDPEngine.optimizer_step(self)

    def trained_tensors(self) -> Iterator[tuple[str, Tensor]]:
        if fsdp_version(self.module) == 1:  # its shards do not say what trains
            return iter(self.get_per_tensor_param()[0])
        return super().trained_tensors()

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """verl's sharded checkpoint, and beside it the whole policy as plain safetensors in ``policy/``."""
        super().save_checkpoint(local_path, *args, **kwargs)
        self._save_policy(Path(local_path).parent / "policy")
