"""One global batch on the driver: names and scalars of its trajectories, and the advantages computed from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vla3_plugin.algorithms import advantages as adv
from vla3_plugin.algorithms import filters, granularity
from vla3_plugin.algorithms.losses import explained_variance
from vla3_plugin.config import AlgorithmConfig
from vla3_plugin.learner import fields
from vla3_plugin.rollout import store
from vla3_plugin.telemetry.metrics import episode_metrics

PADDING = "padding_"


class Batch:
    """Trajectories of whole groups. ``keys`` name the real samples; ``all_keys`` also the padding rows that make the
    number divisible.
    """

    FIELDS = (
        "rewards",
        "terminated",
        "truncated",
        fields.STEP_MASK,
        fields.VALUE,
        "bootstrap",
        "episode_id",
        "group_id",
        "chunk_index",
        fields.LOGPROB,
    )

    def __init__(self, trajectories: list[dict[str, Any]], divisor: int, origin: str = "batch") -> None:
        self.trajectories, self.divisor, self.origin = trajectories, divisor, origin
        self.leftovers: list[str] = []  # padding rows of streamed micro-batches, to be cleared with the batch
        self.trained_keys: list[str] = []  # samples that weigh something
        self.values: list[tuple[Tensor, Tensor, Tensor]] = []  # behaviour values, returns, mask; of a critic
        self.sort()

    def sort(self) -> None:
        """In the order of the plan, whatever finished first: what is shuffled later must not depend on it."""
        self.trajectories.sort(key=lambda t: t["episode"]["episode_id"])
        self.keys = [key for t in self.trajectories for key in t["keys"]]
        self.padding = padding_rows(self.keys, self.divisor, self.origin)

    def join(self, piece: Batch) -> None:
        self.trajectories += piece.trajectories
        self.leftovers += piece.padding + piece.leftovers
        self.trained_keys += piece.trained_keys
        self.values += piece.values

    @property
    def all_keys(self) -> list[str]:
        return self.keys + self.padding

    @property
    def homes(self) -> dict[str, str]:
        """The node on which each sample was stored; of resumed groups it is not known."""
        return {key: t["node"] for t in self.trajectories if "node" in t for key in t["keys"]}

    @property
    def control_steps(self) -> int:
        return sum(t["control_steps"] for t in self.trajectories)

    @property
    def versions(self) -> list[int]:
        """The version that made each sample."""
        return [version for t in self.trajectories for version in t["versions"]]

    def metrics(self, seconds: float) -> dict[str, float]:
        episodes = episode_metrics(
            [t["success"] for t in self.trajectories],
            [t["return"] for t in self.trajectories],
            [t["control_steps"] for t in self.trajectories],
            seconds,
        )
        return (
            episodes
            | self._critic_metrics()
            | {
                "rollout/chunk_steps": float(len(self.keys)),
                "rollout/chunk_steps_per_s": len(self.keys) / max(seconds, 1e-9),
                "actor/padding_rows": float(len(self.padding)),
            }
        )

    def _critic_metrics(self) -> dict[str, float]:
        if not self.values:
            return {}
        value, target, mask = (torch.cat(parts) for parts in zip(*self.values, strict=True))
        return {
            "critic/explained_variance": explained_variance(value, target, mask.bool()),
            "critic/value_mean": float(value[mask.bool()].mean()),
        }


_COUNTS = ("actor/groups_without_spread", "actor/filtered_below", "actor/filtered_above")


def combine(pieces: list[tuple[dict[str, float], int]]) -> dict[str, float]:
    """Metrics of a batch from those of its pieces, each with its number of samples: counts add up, the rest is averaged
    over samples."""
    found: dict[str, float] = {}
    for name in {name for metrics, _ in pieces for name in metrics}:
        parts = [(metrics[name], size) for metrics, size in pieces if name in metrics]
        weights = [1.0 if name in _COUNTS else size / sum(size for _, size in parts) for _, size in parts]
        found[name] = sum(value * weight for (value, _), weight in zip(parts, weights, strict=True))
    return found


def padding_rows(keys: list[str], divisor: int, origin: str) -> list[str]:
    """Names of copies of the first samples that fill the batch up to a multiple of ``divisor``; they weigh nothing.

    ``origin`` keeps a batch's, its pieces' and its micro-batches' apart: they may begin with the same sample.
    """
    missing = -len(keys) % divisor
    return [f"{PADDING}{origin}{i}_{keys[i % len(keys)]}" for i in range(missing)]


def write_padding_rows(learner: Any, keys: list[str], padding: list[str]) -> None:
    """Store padding rows: copies of real samples, so that every field exists and is finite, that weigh nothing."""
    if padding:
        learner.copy_samples([keys[i % len(keys)] for i in range(len(padding))], padding)


def put(batch: Batch, data: dict[str, Tensor]) -> None:
    """Store learner fields of the real samples, and zeros for the padding rows: they weigh nothing."""
    rows = len(batch.padding)
    padded = {k: torch.cat([v, torch.zeros(rows, *v.shape[1:], dtype=v.dtype)]) for k, v in data.items()}
    store.put_fields(batch.all_keys, padded)


_LEAST_DEVIATION, _MOST_DEVIATIONS = 1e-6, 10.0


class AdvantageScale:
    """How advantages are normalised: by the moments of what is at hand, the whole batch (``batch``) or each mini-batch
    of the first epoch and then the whole (``mini_batch``), or by those of the global batch before it (``previous``),
    which are known before anything is complete. The first batch always uses its own.

    A batch without spread (no success, a constant critic) says nothing about the next one's scale: the moments before
    it stay. Should the scale jump all the same, ``previous`` cuts at ten deviations instead of letting one sample
    steer the step.
    """

    def __init__(self, statistics: str, previous: list[float] | None = None) -> None:
        self.statistics, self.previous = statistics, previous
        self._seen = adv.Moments()

    @property
    def needs_whole_batch(self) -> bool:
        return self.statistics == "batch" or (self.statistics == "previous" and self.previous is None)

    def __call__(self, advantage: Tensor, live: Tensor) -> Tensor:
        self._seen += adv.Moments.of(advantage, live)
        if self.statistics == "previous" and self.previous is not None:
            return adv.normalise(advantage, live, *self.previous).clamp(-_MOST_DEVIATIONS, _MOST_DEVIATIONS)
        return self.again(advantage, live)

    def again(self, advantage: Tensor, live: Tensor) -> Tensor:
        """Of advantages that are computed a second time, with other values and by then of the whole batch: by their own
        moments. (The former batch's, of values of another age, are off by as much as the critic learns in a step.)
        """
        return adv.whiten(advantage, live) if int(live.sum()) > 1 else advantage

    def end_of_batch(self) -> None:
        if self._seen.count > 1 and self._seen.std > _LEAST_DEVIATION:
            self.previous = [self._seen.mean, self._seen.std]
        self._seen = adv.Moments()


def advantages(
    data: dict[str, Tensor], a: AlgorithmConfig, max_steps: int, scale: Callable[..., Tensor] | None = None
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Advantages, returns and loss weights of flat samples [N, ...] of whole groups, with metrics.

    ``loss_mask`` holds weights at ``logprob_type``'s level: 0 where a step was not executed, where its group has no
    spread or was filtered; otherwise 1, or the trajectory-length weight.
    """
    layout = adv.trajectory_layout(data["episode_id"].flatten(), data["chunk_index"].flatten())
    flat_valid = data[fields.STEP_MASK].bool()
    valid = adv.pad(flat_valid, layout)
    rewards = adv.pad(data["rewards"], layout)
    groups = adv.per_trajectory(data["group_id"].flatten(), layout)
    returns_ = adv.trajectory_returns(rewards, valid)
    usable = torch.ones(len(groups), dtype=torch.bool)
    metrics: dict[str, float] = {}
    if a.adv_type == "gae":
        advantage, target = adv.gae(
            rewards=rewards,
            values=adv.pad(data[fields.VALUE], layout),
            valid=valid,
            terminated=adv.pad(data["terminated"].bool(), layout),
            truncated=adv.pad(data["truncated"].bool(), layout),
            final_values=adv.pad(data["bootstrap"][:, :1], layout),
            gamma=a.gamma,
            gae_lambda=a.gae_lambda,
            reward_type=a.reward_type,
            bootstrap_type=a.bootstrap_type,  # type: ignore[arg-type]
        )
    else:
        per_trajectory, usable = adv.grpo(
            returns=returns_,
            group_ids=groups,
            group_size=a.group_size,
            normalize_by_std=a.norm_adv_by_std_in_grpo,
        )
        advantage = adv.broadcast_trajectory(per_trajectory.float(), valid, reward_type=a.reward_type)
        target = torch.zeros_like(adv.pad(data[fields.VALUE], layout))
        metrics["actor/groups_without_spread"] = float((~usable).sum()) / a.group_size
    if a.filter_rewards:
        found = filters.filter_rewards(
            returns=returns_,
            group_ids=groups,
            rewards_lower_bound=a.rewards_lower_bound,
            rewards_upper_bound=a.rewards_upper_bound,
        )
        usable = usable & found.keep
        metrics["actor/filtered_below"] = float(found.below_lower_bound)
        metrics["actor/filtered_above"] = float(found.above_upper_bound)
    sample_usable = usable[layout.row]
    trained = flat_valid & sample_usable[:, None]
    live = granularity.aggregate_flags(trained, trained, reward_type=a.reward_type)
    flat_advantage = adv.unpad(advantage, layout)
    if a.adv_type == "gae" and a.normalize_advantages:
        flat_advantage = (scale or AdvantageScale("batch"))(flat_advantage, live)
    level = granularity.parse_level(a.logprob_type, key="logprob_type")
    weight = granularity.level_mask(trained, level=level, token_dim=data[fields.LOGPROB].shape[-1]).float()
    if a.length_normalization:
        weight = weight * granularity.length_weights(
            flat_valid, data["episode_id"].flatten(), level=level, max_episode_steps=max_steps
        )
    value_mask = granularity.aggregate_flags(flat_valid, flat_valid, reward_type=a.reward_type).float()
    flat_returns = adv.unpad(target, layout)
    if bool(live.any()):
        metrics["actor/advantage_abs_mean"] = float(flat_advantage[live].abs().mean())
    result = {
        fields.ADVANTAGES: flat_advantage.float(),
        fields.RETURNS: flat_returns.float(),
        fields.POLICY_MASK: weight,
        fields.VALUE_MASK: value_mask,
    }
    return result, metrics
