"""megatron-core's data-parallel wrapper and distributed optimizer around a ``VLAPolicy``, as an engine of verl.

Every rank holds the whole policy; gradients lie in megatron's contiguous buffers, frozen parameters in none. With the
distributed optimizer (the default) an update is one reduce-scatter, Adam on each rank's part, and one all-gather.
Tensor, pipeline and context parallelism are refused: the policies are whole modules of transformers.

On an accelerator parameters are bfloat16, gradients and what Adam updates float32 (not verified: no GPU has run it).
On a CPU everything is float32 (``megatron_cpu``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.engine.base import BaseEngineCtx
from verl.workers.engine.utils import enable_full_determinism

from vla3_plugin import config_megatron
from vla3_plugin.learner.engine_common import VLAEngine, full
from vla3_plugin.learner.megatron_cpu import megatron_device


@EngineRegistry.register(model_type="vla_policy", backend="megatron", device=["cuda", "cpu"])
class VLAMegatronEngine(VLAEngine, BaseEngine):
    """One rank of the learner; all ranks of the process group are data parallel.

    Raises:
        ImportError: megatron-core is not installed; the message says what to install.
        ValueError: settings that this engine does not have; one line each.
    """

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any = None
    ) -> None:
        super().__init__()
        if fault := config_megatron.missing():
            raise ImportError(fault)
        given = {"megatron": engine_config, "optim": optimizer_config, "checkpoint": checkpoint_config}
        if faults := config_megatron.faults(given):
            raise ValueError("\n".join(faults))
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.mode: str | None = None
        self.rank = dist.get_rank()
        self.lr_scheduler: Any = None
        if engine_config.full_determinism:
            enable_full_determinism(seed=engine_config.seed)

    # ---------------------------------------------------------------- building

    def initialize(self) -> None:
        module = self._build_module()
        if self.model_config.lora_rank > 0:
            module = self._build_lora_module(module)
        module.to(get_device_id())
        _same_on_all_ranks(module)
        if self.engine_config.forward_only:
            self.module, self.optimizer = module, None
            return
        with megatron_device():
            self.module = self._wrapped(module)
            self.optimizer = self._build_optimizer()
        from verl.utils.megatron.optimizer import get_megatron_optimizer_param_scheduler

        from vla3_plugin.learner.megatron_checkpoint import MegatronCheckpoint

        self.lr_scheduler = get_megatron_optimizer_param_scheduler(self.optimizer, self.optimizer_config)
        self.checkpoint_manager = MegatronCheckpoint(
            self._inner, self.optimizer, lr_scheduler=self.lr_scheduler, checkpoint_config=self.checkpoint_config
        )

    def _parameter_dtype(self) -> torch.dtype:
        return torch.float32 if get_device_name() == "cpu" else torch.bfloat16

    def _wrapped(self, module: nn.Module) -> Any:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer import TransformerConfig

        if not parallel_state.is_initialized():
            parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        settings = DistributedDataParallelConfig(
            **{
                "use_distributed_optimizer": self.engine_config.use_distributed_optimizer,
                "grad_reduce_in_fp32": True,
                **self.engine_config.override_ddp_config,
            }
        )
        # the wrapper reads how gradients are scaled from it (the mean over ranks), and nothing of a transformer
        nominal = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1)
        return DistributedDataParallel(nominal, settings, module)

    def _build_optimizer(self) -> Any:
        from megatron.core.optimizer import ParamKey, get_megatron_optimizer
        from verl.utils.megatron.optimizer import init_megatron_optim_config

        config = init_megatron_optim_config(
            self.optimizer_config,
            use_distributed_optimizer=self.engine_config.use_distributed_optimizer,
            bf16=self._parameter_dtype() == torch.bfloat16,
        )
        config.adam_beta1, config.adam_beta2 = self.optimizer_config.betas  # verl leaves megatron's
        value_lr = self.model_config.value_lr
        # given, if empty: without it megatron exempts biases from the weight decay that FSDP's AdamW gives them
        groups: dict[Any, Any] = {} if value_lr is None else {ParamKey(name="*value_head*"): {"max_lr": value_lr}}
        return get_megatron_optimizer(config, [self.module], config_overrides=groups, use_gloo_process_groups=False)

    @property
    def _inner(self) -> Any:
        return self.module if self.engine_config.forward_only else self.module.module

    # ---------------------------------------------------------------- training

    @contextmanager
    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> Iterator[None]:
        if not is_last_micro_batch:
            with self.module.no_sync():
                yield
            return
        yield
        if self.module.ddp_config.overlap_grad_reduce:
            self._check_overlap()
        self.module.finish_grad_sync()

    def _check_overlap(self) -> None:
        """megatron learns in its first update which gradients to wait for, and expects one of each parameter."""
        names = {parameter: name for name, parameter in self._inner.named_parameters()}
        groups = [group for group in self.module.bucket_groups if group.is_first_batch]
        without = [names[p] for group in groups for p in group.params if p not in group.per_param_grad_ready_counts]
        if without:
            raise ValueError(
                f"actor_rollout_ref.actor.megatron.override_ddp_config.overlap_grad_reduce: true, but {len(without)} "
                f"parameters that train got no gradient, {min(without)} among them, and its bucket would be waited for "
                "forever; set it to false"
            )

    def _divide_gradients(self, total: float) -> None:
        for buffer in self.module.buffers:
            buffer.grad_data.div_(total)

    def _take_step(self) -> float:
        with megatron_device():
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())  # over all ranks, so that all of them decide alike
            if math.isfinite(norm):  # megatron itself would step
                self.optimizer.step()
            else:
                print(f"WARN: grad_norm is not finite: {norm}")
        return norm

    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.module.zero_grad_buffer()

    def lr_scheduler_step(self) -> float:
        self.lr_scheduler.step(1)
        return self.optimizer.param_groups[0]["lr"]  # of the policy, as FSDP's engine reports it

    def train_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return _Mode(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return _Mode(self, "eval", **kwargs)

    def disable_adapter(self) -> Any:
        return self._inner.disable_adapter()

    # ---------------------------------------------------------------- what verl asks

    @property
    def is_param_offload_enabled(self) -> bool:
        return False

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return False

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Everything stays where it is: offload is refused."""

    def get_data_parallel_rank(self) -> int:
        return self.rank

    def get_data_parallel_size(self) -> int:
        return dist.get_world_size()

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Copies of all tensors under the policy's own names, adapters merged. No rank waits for another."""
        if hasattr(self._inner, "peft_config"):
            return self._merged_lora_per_tensor_param(), None
        return ((name, full(tensor)) for name, tensor in self._inner.state_dict().items()), None

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """See ``megatron_checkpoint``; beside it the whole policy as plain safetensors in ``policy/``."""
        self.checkpoint_manager.save_checkpoint(local_path)
        self._save_policy(Path(local_path).parent / "policy")

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        self.checkpoint_manager.load_checkpoint(local_path)


class _Mode(BaseEngineCtx):
    def __enter__(self) -> None:
        super().__enter__()
        self.engine.module.train(self.mode == "train")

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or exc_type is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(exc_type, exc_val, exc_tb)


def _same_on_all_ranks(module: nn.Module) -> None:
    """Rank 0's parameters and buffers: what a checkpoint does not hold (a new value head) each rank drew for itself."""
    for tensor in module.state_dict().values():
        if tensor.numel():
            data = tensor.detach()
            flat = data.reshape(-1).contiguous().view(torch.uint8)  # every dtype, on every backend
            dist.broadcast(flat, src=0)
            data.copy_(flat.view(data.dtype).view(data.shape))
