"""The loss of one micro-batch: policy, value, KL and entropy terms as sums over the global batch's counts.

Pickled once to the learner's ranks; every term is divided by a count over the whole mini-batch and all ranks, so
neither micro-batches of unequal size nor ranks with unequal numbers of valid steps change the gradient.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from vla3_plugin.algorithms import granularity, losses
from vla3_plugin.config import AlgorithmConfig, TrainingStage
from vla3_plugin.learner import fields


@dataclass
class Objective:
    """What ``vla3.algorithm`` and ``vla3.stages.training`` ask for, as a loss function of verl's engines."""

    algorithm: AlgorithmConfig
    training: TrainingStage = field(default_factory=TrainingStage)

    def counts(self, data: TensorDict) -> dict[str, float]:
        """This rank's share of what the sums are divided by, for the terms that the loss has."""
        a = self.algorithm
        counts = {"policy": data[fields.POLICY_MASK].sum()}
        if a.loss_type == "actor_critic":
            counts["value"] = data[fields.VALUE_MASK].sum()
        if a.entropy_bonus != 0:
            counts["entropy"] = self._entropy_mask(data).sum()
        return {name: float(count) for name, count in counts.items()}

    def _entropy_mask(self, data: TensorDict, token_dim: int | None = None) -> Tensor:
        level = granularity.parse_level(self.algorithm.entropy_type, key="entropy_type")
        dim = data[fields.LOGPROB].shape[-1] if token_dim is None else token_dim
        return granularity.level_mask(_trained(data), level=level, token_dim=dim)

    def __call__(
        self, model_output: dict[str, Tensor], data: TensorDict, dp_group: Any = None
    ) -> tuple[Tensor, dict[str, float]]:
        a = self.algorithm
        valid = data[fields.STEP_MASK].bool()
        logprob = granularity.aggregate_logprob(model_output["logprob"], valid, logprob_type=a.logprob_type)
        old = granularity.aggregate_logprob(data[fields.LOGPROB], valid, logprob_type=a.logprob_type)
        weights = data[fields.POLICY_MASK]
        mask = weights > 0
        advantages = granularity.broadcast_advantages(
            data[fields.ADVANTAGES],
            reward_type=a.reward_type,
            logprob_type=a.logprob_type,
            chunk_size=valid.shape[1],
            token_dim=data[fields.LOGPROB].shape[-1],
        )
        policy = self._policy_term(data, logprob, old, advantages)
        loss = policy.total / data["policy_count"]
        metrics = policy.metrics() | {"policy_loss": policy.mean().item()}
        if a.loss_type == "actor_critic":
            values = _wide(model_output["value"])
            value = losses.value_loss(
                values=values,
                returns=data[fields.RETURNS],
                mask=data[fields.VALUE_MASK] > 0,
                old_values=self._old_values(data, values.detach()),
                value_clip=a.value_clip,
                huber_delta=a.huber_delta,
            )
            loss = loss + a.value_coef * value.total / data["value_count"]
            metrics |= value.metrics() | {"value_loss": value.mean().item()}
        else:
            # the value head must stay in the graph: FSDP waits for a gradient of every parameter it gathered
            loss = loss + 0.0 * model_output["value"].sum()
        if a.kl_beta > 0:
            ref = granularity.aggregate_logprob(data[fields.REF_LOGPROB], valid, logprob_type=a.logprob_type)
            kl = losses.kl_loss(logprob=logprob, ref_logprob=ref, mask=mask, kind=a.kl_penalty, weights=weights)
            loss = loss + a.kl_beta * kl.total / data["policy_count"]
            metrics |= kl.metrics()
        entropy = granularity.aggregate_entropy(model_output["entropy"], valid, entropy_type=a.entropy_type)
        bonus = losses.entropy_bonus(entropy=entropy, mask=self._entropy_mask(data))
        metrics |= bonus.metrics()
        if a.entropy_bonus != 0:
            loss = loss - a.entropy_bonus * bonus.total / data["entropy_count"]
        if not torch.isfinite(loss):
            raise FloatingPointError(
                "the loss is not finite: "
                + ", ".join(f"{k}={v:.3g}" for k, v in metrics.items())
                + "; lower actor_rollout_ref.actor.optim.lr or raise the policy's noise_level"
            )
        return loss, {name: float(value) for name, value in metrics.items()}

    def _policy_term(self, data: TensorDict, logprob: Tensor, behaviour: Tensor, advantages: Tensor) -> losses.LossSum:
        """The clipped surrogate, around the behaviour policy or, for samples of an older version, a proximal one."""
        a, t = self.algorithm, self.training
        weights = data[fields.POLICY_MASK]
        shared = dict(
            logprob=logprob,
            advantages=advantages,
            mask=weights > 0,
            clip_ratio_low=a.clip_ratio_low,
            clip_ratio_high=a.clip_ratio_high,
            clip_ratio_c=a.clip_ratio_c,
            clip_log_ratio_min=a.clip_log_ratio_min,
            clip_log_ratio_max=a.clip_log_ratio_max,
        )
        if not t.enabled or t.correction == "none":
            return losses.policy_loss(**shared, old_logprob=behaviour, weights=weights)
        proximal = self._proximal(data, logprob.detach(), behaviour)
        threshold = t.behave_weight_threshold
        if t.correction == "decoupled":
            return losses.decoupled_policy_loss(
                **shared,
                proximal_logprob=proximal,
                behaviour_logprob=behaviour,
                behave_weight_threshold=threshold,
                weights=weights,
            )
        behave = losses.truncated_weights(proximal, behaviour, weights > 0, threshold)
        return losses.policy_loss(**shared, old_logprob=proximal, weights=weights * behave)

    def _old_values(self, data: TensorDict, values: Tensor) -> Tensor:
        """What values are held near: the critic's that an epoch begins with.

        A streamed sample of an older version, seen for the first time, has its own version's; the learner's are these.
        """
        old, t = data[fields.VALUE], self.training
        if not t.recomputes or not tu.get_non_tensor_data(data, "first_pass", False):
            return old
        stale = (data[fields.VERSION] < int(data["learner_version"])).view(-1, *[1] * (old.dim() - 1))
        return torch.where(stale, values.to(old), old)

    def _proximal(self, data: TensorDict, logprob: Tensor, behaviour: Tensor) -> Tensor:
        """Log-probs of the policy around which the ratio is clipped: the learner's before this step's updates.

        A sample of the learner's own version carries them already. For the others they were recomputed before the
        updates; a streamed micro-batch that is seen for the first time has them in hand, or, in a later mini-batch,
        between those of its own policy and of the learner that has moved. (Around the latter every ratio would be 1:
        nothing would hold the rest of the first epoch near the policy that the step began with. Counted in updates that
        one is closer to the learner of the moment; centred there, PickCube fell at two versions behind.)
        """
        now, version = int(data["learner_version"]), data[fields.VERSION].flatten()
        between = partial(losses.interpolate_proximal, behaviour_logprob=behaviour, version=version, version_now=now)
        if self.training.proximal == "interpolate":
            return between(logprob=logprob)
        recomputed = logprob
        if fields.PROXIMAL in data.keys():
            recomputed = granularity.aggregate_logprob(
                data[fields.PROXIMAL], data[fields.STEP_MASK].bool(), logprob_type=self.algorithm.logprob_type
            )
        elif tu.get_non_tensor_data(data, "first_pass", False):
            recomputed = between(logprob=logprob) if tu.get_non_tensor_data(data, "moved", False) else logprob
        elif not bool((version >= now).all()):
            raise RuntimeError(
                "samples of older versions have no proximal log-probs although this is not their first pass"
            )
        fresh = (version >= now).view(-1, *[1] * (logprob.dim() - 1))
        return torch.where(fresh, behaviour, recomputed)


def kept_logprobs(data: TensorDict, logprob: Tensor) -> Tensor:
    """What later epochs take for the proximal log-probs of a streamed micro-batch: those it was computed with at first,
    [N, C, D], or as ``Objective._proximal`` has it where the learner had moved."""
    if not tu.get_non_tensor_data(data, "moved", False):
        return logprob
    return losses.interpolate_proximal(
        logprob=logprob,
        behaviour_logprob=data[fields.LOGPROB].to(logprob),
        version=data[fields.VERSION].flatten().to(logprob.device),
        version_now=int(data["learner_version"]),
    )


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _trained(data: TensorDict) -> Tensor:
    """Valid steps of samples that carry a gradient: padding rows and filtered groups carry none."""
    rows = (data[fields.POLICY_MASK] > 0).flatten(1).any(-1)
    return data[fields.STEP_MASK].bool() & rows[:, None]
