"""What the engines share, whatever wraps the policy: how it is built, run on a micro-batch, streamed, exported.

An engine mixes this in before a class that implements verl's ``BaseEngine`` and its four hooks: ``_parameter_dtype``,
``_gradient_sync_context``, ``_divide_gradients`` and ``_take_step``.
"""

from collections import UserDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from vla3_plugin.learner import fields
from vla3_plugin.learner.model_config import ModelCard
from vla3_plugin.learner.streamed_counts import StreamedCounts
from vla3_plugin.telemetry import traffic

_SKIPS = 10  # updates in a row whose gradient is not finite, before the run ends


class VLAEngine:
    """One rank of the learner, without what shards or replicates its parameters."""

    model_config: Any
    engine_config: Any
    optimizer_config: Any
    module: Any  # the policy as it is run: wrapped
    policy: Any  # the unwrapped object: processing, save()
    optimizer: Any
    scaler: Any = None
    rank: int
    # verl's own, of the class mixed in after this one
    optimizer_zero_grad: Any
    get_data_parallel_group: Any
    get_data_parallel_size: Any
    get_per_tensor_param: Any

    # ---------------------------------------------------------------- hooks

    def _parameter_dtype(self) -> torch.dtype:
        raise NotImplementedError

    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Around forward and backward: gradients of all but the last micro-batch stay on this rank. After the last they
        are the mean over the ranks.
        """
        raise NotImplementedError

    def _divide_gradients(self, total: float) -> None:
        raise NotImplementedError

    def _take_step(self) -> Any:
        """Clip and update; leaves the parameters alone where the gradient is not finite. Returns its norm."""
        raise NotImplementedError

    @property
    def _inner(self) -> Any:
        """The module whose ``state_dict`` has the policy's own names (with adapters: peft's)."""
        return self.module

    # ---------------------------------------------------------------- building

    def _build_module(self) -> Any:  # a VLAPolicy; verl says nn.Module
        from vla3_plugin.policies.registry import load_policy

        policy: Any = load_policy(self.model_config.path, **self.model_config.options)
        self.policy = policy
        policy.to(self._parameter_dtype())
        if self.model_config.enable_gradient_checkpointing:
            policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return policy

    def _build_lora_module(self, module: nn.Module) -> nn.Module:
        from peft import LoraConfig, get_peft_model
        from verl.utils.py_functional import convert_to_regular_types

        config = self.model_config
        targets = convert_to_regular_types(config.target_modules)
        lora = LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            target_modules=module.lora_targets if targets == "all-linear" else targets,
            exclude_modules=convert_to_regular_types(config.exclude_modules),
            # new in RL, so there is nothing to adapt: all of it must train
            modules_to_save=getattr(module, "lora_whole", ["value_head"]),
            bias="none",
        )
        wrapped = get_peft_model(module, lora)
        wrapped.config = ModelCard(config.model_type)
        wrapped.can_generate = lambda: False
        return wrapped

    # ---------------------------------------------------------------- training

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Any, forward_only: bool = False
    ) -> dict[str, Any]:
        """Micro-batches of any size, the last one shorter: losses are sums, divided once by the global counts."""
        data = fields.densify(data)
        if forward_only:
            traffic.count("store_to_learner", dict(data.items()))
        size = data["micro_batch_size_per_gpu"]
        totals = self._global_counts(loss_function.counts(data)) if loss_function is not None else {}
        starts = range(0, len(data), size)
        outputs = []
        for start in starts:
            last = start + size >= len(data)
            sync = nullcontext() if forward_only else self._gradient_sync_context(is_last_micro_batch=last)
            with torch.set_grad_enabled(not forward_only), sync:
                micro_batch = tu.index_select_tensor_dict(data, list(range(start, min(start + size, len(data)))))
                tu.assign_non_tensor(micro_batch, **totals)
                loss, meta = self.forward_step(micro_batch, loss_function, forward_only)
                if not forward_only:
                    loss.backward() if self.scaler is None else self.scaler.scale(loss).backward()
                    meta.pop("model_output")
            outputs.append(meta)
        return _merge(outputs)

    def accumulate(self, data: TensorDict, loss_function: Any, *, first: bool, last: bool) -> dict[str, Any]:
        """One streamed micro-batch of a mini-batch whose size is not known yet.

        Losses are added up as sums; after the ``last`` micro-batch there is one reduction, the gradient is divided by
        the total count, and the optimizer takes its step. The result is the gradient of the whole mini-batch, whatever
        the sizes and the order of the micro-batches (up to rounding).

        Raises:
            ValueError: the terms of the loss are counted in different units, so that no single division is right.
        """
        if first:
            self.optimizer_zero_grad()
            self._streamed = StreamedCounts()
        self.module.train()
        data = fields.densify(data)
        tu.assign_non_tensor(data, **self._streamed.add(loss_function.counts(data)))
        with torch.enable_grad(), self._gradient_sync_context(is_last_micro_batch=last):
            loss, meta = self.forward_step(data, loss_function, forward_only=False)
            loss.backward() if self.scaler is None else self.scaler.scale(loss).backward()
        if last:
            total = self._sum_over_ranks({"policy": self._streamed.policy})["policy"]
            if total > 0:
                self._divide_gradients(total)
                meta["metrics"]["grad_norm"] = self.optimizer_step()
            self.optimizer_zero_grad()
        return meta

    def optimizer_step(self) -> Any:
        """verl leaves the parameters alone where the gradient is not finite; here that is counted, and has an end.

        Raises:
            FloatingPointError: ``_SKIPS`` updates in a row were skipped.
        """
        grad_norm = self._take_step()
        if torch.isfinite(torch.as_tensor(grad_norm)):
            self._skipped_in_a_row = 0
            return grad_norm
        self.skipped_updates, self._skipped_in_a_row = self.skipped_updates + 1, self._skipped_in_a_row + 1
        if self._skipped_in_a_row >= _SKIPS:
            raise FloatingPointError(
                f"the gradient was not finite in {_SKIPS} updates in a row (norm {float(grad_norm)}), "
                "lower actor_rollout_ref.actor.optim.lr or look at the rewards and observations"
            )
        return grad_norm

    skipped_updates = 0  # since the start
    _skipped_in_a_row = 0

    def _global_counts(self, local: dict[str, float]) -> dict[str, float]:
        return {f"{name}_count": max(count, 1.0) for name, count in self._sum_over_ranks(local).items()}

    def _sum_over_ranks(self, local: dict[str, float]) -> dict[str, float]:
        names = sorted(local)
        counts = torch.tensor([local[name] for name in names], dtype=torch.float64).to(get_device_id())
        torch.distributed.all_reduce(counts, group=self.get_data_parallel_group())
        return dict(zip(names, counts.tolist(), strict=True))

    def forward_step(
        self, micro_batch: TensorDict, loss_function: Any, forward_only: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        from verl.workers.engine.utils import detach_tree  # its package, once imported, imports the engines: see plugin

        # every time: it is a thread's own, and TransferQueue's client resets it to its default after each transfer
        torch.set_num_threads(self.model_config.cpu_threads)
        micro_batch = micro_batch.to(get_device_id())
        # not a dict, so that mixed precision leaves it alone: a rounded sample has another sample's likelihood
        task = tu.get_non_tensor_data(micro_batch, "task", "evaluate")
        output = self.module(UserDict(fields.policy_batch(micro_batch)), task=task)
        if loss_function is None:
            loss, metrics = torch.zeros(()), {}
        else:
            loss, metrics = loss_function(
                model_output=output, data=micro_batch, dp_group=self.get_data_parallel_group()
            )
            loss = loss * self.get_data_parallel_size()  # gradients are averaged over ranks; the loss is a sum
        # names of their own: forward-only outputs go into the store beside the rollout's
        reported = {f"learner_{name}": value for name, value in detach_tree(output).items()}
        return loss, {"model_output": reported, "loss": loss.detach().item(), "metrics": metrics}

    # ---------------------------------------------------------------- exporting

    def trained_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Of what ``get_per_tensor_param`` gives, the part that training changes: parameters that train, layers with
        adapters, buffers. Nothing else is gathered. Every rank must drain it.
        """
        if hasattr(self._inner, "peft_config"):
            yield from self._merged_lora_per_tensor_param(trained_only=True)
            return
        for name, tensor in self._inner.state_dict(keep_vars=True).items():  # by tensor: two names may share one
            if tensor.requires_grad or not isinstance(tensor, nn.Parameter):
                yield name, full(tensor)

    def _merged_lora_per_tensor_param(self, trained_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Base plus adapters under the names of the policy without adapters, full tensors in the parameters' own dtype.

        verl's own rounds them to bfloat16, and rollout and learner would then disagree about log-probs in float32.
        Every rank must drain it: it runs the all-gathers.
        """
        from peft.tuners.lora import LoraLayer

        prefix = "base_model.model."
        layers = {n.removeprefix(prefix): m for n, m in self._inner.named_modules() if isinstance(m, LoraLayer)}
        with torch.no_grad():
            for name, tensor in self._inner.state_dict(keep_vars=True).items():
                plain = name.removeprefix(prefix)
                if ".lora_" in plain or ".original_module." in plain:
                    continue
                owner, based, leaf = plain.partition(".base_layer.")
                adapted = bool(based) and leaf == "weight"
                if trained_only and not adapted and isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
                    continue
                whole = full(tensor)
                if adapted:
                    whole = (whole + _lora_delta(layers[owner])).to(whole.dtype)  # adapters of bf16 may be float32
                plain = f"{owner}.{leaf}" if based else plain
                yield plain.replace(".modules_to_save.default.", "."), whole

    def _save_policy(self, directory: Path) -> None:
        """The whole policy as plain safetensors in ``directory``; every rank must call it."""
        state = {name: tensor.detach().cpu().clone() for name, tensor in self.get_per_tensor_param()[0]}
        if self.rank == 0:
            self.policy.save(directory, state)
        torch.distributed.barrier()


def full(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor, without its history. Of a shard: every rank must ask."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    moved: Any = tensor.to(get_device_id())  # an offloaded shard
    return moved.full_tensor()


def _lora_delta(layer: Any) -> Tensor:
    """scaling · B A of every active adapter (Hu et al. 2021, eq. 3), shaped like the layer's weight."""
    parts = [
        layer.scaling[name] * (full(layer.lora_B[name].weight) @ full(layer.lora_A[name].weight))
        for name in layer.active_adapters
    ]
    delta = sum(parts[1:], parts[0])
    return delta.T if layer.fan_in_fan_out else delta


def _merge(outputs: list[dict[str, Any]]) -> dict[str, Any]:
    """Join micro-batch outputs in the form verl's TrainingWorker expects."""
    model_output: dict[str, Tensor] = {}
    if outputs and "model_output" in outputs[0]:
        for key in outputs[0]["model_output"]:
            model_output[key] = torch.cat([o["model_output"][key] for o in outputs])
    metrics: dict[str, list] = {}
    for output in outputs:
        for key, value in output["metrics"].items():
            metrics.setdefault(key, []).append(value)
    return {"model_output": model_output, "loss": [o["loss"] for o in outputs], "metrics": metrics}
