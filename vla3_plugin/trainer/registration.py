"""Our advantage estimators and policy loss under verl's registries, as ``vla3_gae``, ``vla3_grpo`` and ``vla3_ppo``.

verl's signatures speak of one row a response and one element a token. Here a row is one trajectory and an element one
step of it (an action or a chunk), so that a verl trainer of another kind can use the same mathematics.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss

from vla3_plugin.algorithms import advantages, losses


@register_adv_est("vla3_gae")
def gae(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    values: Tensor,
    gamma: float,
    lam: float,
    truncated: Tensor | None = None,
    final_values: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """GAE over [B, T] steps; ``truncated`` bool [B] rows bootstrap from ``final_values`` [B], the others terminated."""
    valid = response_mask.bool()[..., None]
    last = valid & (valid.flip(1).cumsum(1).flip(1) == 1)
    cut = torch.zeros(len(valid), dtype=torch.bool) if truncated is None else truncated.bool()
    advantage, target = advantages.gae(
        rewards=token_level_rewards[..., None],
        values=values[..., None],
        valid=valid,
        terminated=last & ~cut[:, None, None],
        truncated=last & cut[:, None, None],
        final_values=final_values,
        gamma=gamma,
        gae_lambda=lam,
        reward_type="chunk",
    )
    white = advantages.whiten(advantage, valid) if int(valid.sum()) > 1 else advantage
    return white[..., 0], target[..., 0]


@register_adv_est("vla3_grpo")
def grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Any],
    norm_adv_by_std_in_grpo: bool = True,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """GRPO over [B, T] steps; ``index`` [B] names each trajectory's group. Groups of equal return get zeros."""
    names: dict[Any, int] = defaultdict(lambda: len(names))
    groups = torch.tensor([names[i] for i in np.asarray(index).tolist()])
    valid = response_mask.bool()[..., None]
    returns = advantages.trajectory_returns(token_level_rewards[..., None], valid)
    found, _usable = advantages.grpo(returns=returns, group_ids=groups, normalize_by_std=norm_adv_by_std_in_grpo)
    spread = advantages.broadcast_trajectory(found.float(), valid, reward_type="chunk")[..., 0]
    return spread, spread


@register_policy_loss("vla3_ppo")
def ppo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """The clipped surrogate as a mean over valid elements; ``config`` is verl's ActorConfig."""
    loss = losses.policy_loss(
        logprob=log_prob.float(),
        old_logprob=old_log_prob.float(),
        advantages=advantages.float(),
        mask=response_mask.bool(),
        weights=rollout_is_weights,
        clip_ratio_low=getattr(config, "clip_ratio_low", 0.2),
        clip_ratio_high=getattr(config, "clip_ratio_high", 0.2),
        clip_ratio_c=getattr(config, "clip_ratio_c", None),
    )
    return loss.mean(), {f"actor/{name}": value for name, value in loss.metrics().items()}
