"""Every family learns by reinforcement, in a loop of a page: roll out, advantages, a clipped loss, an optimizer.

It is made of the parts that a run is made of (the interaction loop, ``algorithms``, ``VLAPolicy.forward``) without a
process, a queue or a config file, and it is the oracle for what the trainer adds to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from policies.test_families import SMALL, small
from tensordict import TensorDict
from torch import Tensor
from toy_env import SPEED, ToyEnv
from verl.utils import tensordict_utils as tu

from vla3_plugin.algorithms import advantages as adv
from vla3_plugin.algorithms import granularity, losses
from vla3_plugin.config import AlgorithmConfig
from vla3_plugin.contract import ChunkResult, Episode, Observation
from vla3_plugin.learner import fields
from vla3_plugin.learner.objective import Objective
from vla3_plugin.policies.base import VLAPolicy
from vla3_plugin.policies.serve import ServedPolicy
from vla3_plugin.rollout.episodes import Assignment, EpisodeQueue
from vla3_plugin.rollout.interaction import Interaction
from vla3_plugin.trainer import batch as trainer_batch

EPISODES, START = 64, np.array([0.6, 0.4])


class BetweenTheDots(ToyEnv):
    """The hand begins halfway between the dots; a step's reward is the share of the way to the right dot that it
    closes, so that an episode that arrives earns 1.

    Which of two opposite dots is right is said by the instruction alone or, ``told`` being false, by the image alone:
    then the task is always the red one, and the dots change places. Whoever does not read, or look, earns 0 at best on
    average: together the ways to the two dots cannot become shorter than they are at the start.
    """

    def __init__(self, told: bool = True, **options: Any) -> None:
        super().__init__(**options, ignore_terminations=True)
        self._told = told

    def reset(self, slot: int, episode: Episode) -> Observation:
        super().reset(slot, episode)
        now: Any = self._slots[slot]
        now.hand, now.dots = np.zeros(2), np.stack([START, -START])
        if not self._told:
            now.dots, now.task = now.dots * (1 - 2 * now.task), 0
        now.goal = now.dots[now.task]
        return self._observe(slot)

    def _run(self, slot: int, actions: np.ndarray, record: bool) -> ChunkResult:
        now: Any = self._slots[slot]
        path = [now.hand]
        for action in actions:
            path.append(np.clip(path[-1] + SPEED * np.clip(action[:2], -1, 1), -1, 1))
        way = np.linalg.norm(np.stack(path) - now.goal, axis=1) / np.linalg.norm(START)
        result = super()._run(slot, actions, record)
        result.rewards[:] = np.where(result.valid, way[:-1] - way[1:], 0.0)
        return result


@dataclass
class Case:
    """``steps``: control steps of an episode. ``iterations`` of ``epochs`` times two updates each."""

    settings: dict[str, Any] = field(default_factory=dict)
    algorithm: dict[str, Any] = field(default_factory=dict)
    steps: int = 8
    reach: float = 1.0
    lr: float = 2e-3
    iterations: int = 15
    epochs: int = 3


PPO: dict[str, Any] = dict(adv_type="gae", loss_type="actor_critic", gamma=0.9, gae_lambda=0.9, clip_ratio_c=None)
GRPO: dict[str, Any] = dict(adv_type="grpo", loss_type="actor", group_size=16, clip_ratio_c=None)
ACTION: dict[str, Any] = dict(reward_type="action", logprob_type="action")
TOKEN: dict[str, Any] = dict(reward_type="action", logprob_type="token")
CASES = {
    "pi0-nano": Case(dict(sde_mode="mixed", noise_level=0.8, value_level="action"), {**PPO, **ACTION},
                     iterations=20),
    "pi05-nano": Case(dict(method="flow_noise", sde_mode="joint", noise_std_min=0.2, noise_std_max=0.6),
                      {**GRPO, **TOKEN}, steps=4, lr=3e-3, iterations=20),
    "gr00t-n1.5-nano": Case(dict(sde_mode="joint", noise_level=0.8, value_level="action"), {**PPO, **ACTION}),
    "openvla-nano": Case({}, {**PPO, "reward_type": "chunk", "logprob_type": "token"}, steps=4, reach=3.0),
    "openvla-oft-nano": Case({}, {**GRPO, **TOKEN}, steps=4, reach=3.0, lr=3e-3, iterations=20),
}  # fmt: skip


def build(preset: str, seed: int = 0) -> VLAPolicy:
    """A small policy with fresh weights. Bins of a token policy begin like their neighbours, as they are after any
    cloning: otherwise 256 numbers a dimension would each have to be tried by itself."""
    case = CASES[preset]
    policy = small(preset, seed=seed, reach=case.reach, **case.settings)
    if hasattr(policy, "evaluate_tokens"):
        table, where = policy.network.language_model.lm_head.weight.data, policy.network.action_rows
        waves = torch.linspace(0, torch.pi, 256)[:, None].mul(torch.arange(1, 4)).cos()
        table[where] = 0.1 * waves @ torch.randn(3, table.shape[1], generator=torch.Generator().manual_seed(seed))
    return policy


# the loop


def roll_out(policy: VLAPolicy, env: ToyEnv, start: int, group_size: int, seed: int) -> tuple[dict[str, Tensor], float]:
    """Samples [N, ...] of ``EPISODES`` episodes, the first of them number ``start``, and the mean return."""
    plan = [Episode(e, e // group_size % 2, 0, 0, e // group_size) for e in range(start, start + EPISODES)]

    def prepare(observations):
        return {name: tensor.numpy() for name, tensor in policy.prepare(observations).items()}

    loop = Interaction([env], prepare, ServedPolicy(policy).act, seed)
    played = [found.trajectory for found in loop.run(EpisodeQueue(map(Assignment, plan), closed=True))]  # type: ignore[union-attr]
    data = {k: torch.from_numpy(np.concatenate([t.samples[k] for t in played])) for k in played[0].samples}
    data["episode_id"] = torch.tensor([t.episode.episode_id for t in played for _ in range(len(t))])
    data["group_id"] = torch.tensor([t.episode.group_id for t in played for _ in range(len(t))])
    data["chunk_index"] = torch.tensor([i for t in played for i in range(len(t))])
    return data, float(np.mean([t.episode_return for t in played]))


def with_advantages(data: dict[str, Tensor], a: AlgorithmConfig) -> dict[str, Tensor]:
    """``data`` with ``advantages`` and, of a critic, ``returns``, [N, 1 or C]."""
    layout = adv.trajectory_layout(data["episode_id"], data["chunk_index"])
    padded = {k: adv.pad(data[k], layout) for k in ("rewards", "value", "valid", "terminated", "truncated")}
    if a.adv_type == "grpo":
        returns = adv.trajectory_returns(padded["rewards"], padded["valid"])
        group, _ = adv.grpo(returns=returns.float(), group_ids=adv.per_trajectory(data["group_id"], layout))
        advantages = adv.broadcast_trajectory(group, padded["valid"], reward_type=a.reward_type)
        return {**data, "advantages": adv.unpad(advantages, layout)}
    found = adv.gae(
        rewards=padded["rewards"], values=padded["value"], valid=padded["valid"], terminated=padded["terminated"],
        truncated=padded["truncated"], final_values=adv.pad(data["bootstrap"][:, :1], layout), gamma=a.gamma,
        gae_lambda=a.gae_lambda, reward_type=a.reward_type,
    )  # fmt: skip
    advantages, returns = (adv.unpad(part, layout) for part in found)
    live = granularity.aggregate_flags(data["valid"], data["valid"], reward_type=a.reward_type)
    return {**data, "advantages": adv.whiten(advantages, live), "returns": returns}


def loss_of(policy: VLAPolicy, data: dict[str, Tensor], a: AlgorithmConfig) -> Tensor:
    valid, (chunk_size, dim) = data["valid"], data["logprob"].shape[1:]
    inputs = {name.removeprefix("in."): x for name, x in data.items() if name.startswith(("in.", "trace."))}
    output = policy(inputs, task="evaluate")
    new, old = (
        granularity.aggregate_logprob(x, valid, logprob_type=a.logprob_type)
        for x in (output["logprob"], data["logprob"])
    )
    advantages = granularity.broadcast_advantages(
        data["advantages"], reward_type=a.reward_type, logprob_type=a.logprob_type, chunk_size=chunk_size, token_dim=dim
    )
    level = granularity.parse_level(a.logprob_type, key="logprob_type")
    mask = granularity.level_mask(valid, level=level, token_dim=dim)
    loss = losses.policy_loss(logprob=new, old_logprob=old, advantages=advantages, mask=mask).mean()
    if a.loss_type == "actor_critic":
        live = granularity.aggregate_flags(valid, valid, reward_type=a.reward_type)
        loss = loss + a.value_coef * losses.value_loss(
            values=output["value"], returns=data["returns"], mask=live, old_values=data["value"],
            value_clip=a.value_clip, huber_delta=a.huber_delta,
        ).mean()  # fmt: skip
    return loss


def train(preset: str, seed: int = 0, told: bool = True) -> list[float]:
    """The mean return of each iteration's episodes, before its updates."""
    case = CASES[preset]
    a, policy, shuffle = AlgorithmConfig(**case.algorithm), build(preset, seed), torch.Generator().manual_seed(seed)
    env = BetweenTheDots(told, num_slots=EPISODES, max_steps=case.steps, size=32)
    optimizer = torch.optim.Adam(policy.parameters(), lr=case.lr)
    returns = []
    for iteration in range(case.iterations):
        data, mean = roll_out(policy, env, iteration * EPISODES, a.group_size, seed)
        data = with_advantages(data, a)
        returns.append(mean)
        policy.train()
        for _ in range(case.epochs):
            for part in torch.randperm(len(data["valid"]), generator=shuffle).chunk(2):
                loss = loss_of(policy, {name: x[part] for name, x in data.items()}, a)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                optimizer.step()
    return returns


@pytest.mark.slow
@pytest.mark.parametrize("preset", CASES)
def test_every_family_learns_to_follow_the_instruction(preset):
    returns = train(preset)
    assert np.mean(returns[:2]) < 0.15
    assert np.mean(returns[-3:]) > 0.35  # who does not read stays below 0; the mean of 192 episodes is good to 0.03


@pytest.mark.slow
def test_what_is_in_the_image_is_learned_too():
    returns = train("pi0-nano", told=False)
    assert np.mean(returns[:2]) < 0.15 and np.mean(returns[-3:]) > 0.3


def test_every_family_is_made_to_learn():
    assert CASES.keys() == SMALL.keys()


@pytest.mark.parametrize("preset", CASES)
def test_the_trainer_takes_the_loops_gradient(preset):
    """From the same samples, its advantages and its objective in two micro-batches: what the loop computes at once."""
    case, policy = CASES[preset], build(preset)
    a = AlgorithmConfig(**case.algorithm)
    env = BetweenTheDots(num_slots=EPISODES, max_steps=case.steps, size=32)
    data, _ = roll_out(policy, env, 0, a.group_size, seed=0)
    with torch.no_grad():  # ratios of 1 would hide the old log-probs
        for parameter in policy.parameters():
            parameter += 0.003 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    expected = loss_of(policy, with_advantages(data, a), a)
    expected.backward()
    plain = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    found, _ = trainer_batch.advantages(data, a, case.steps)
    whole = TensorDict({**data, **found}, batch_size=len(data["valid"]))
    objective, total = Objective(a), 0.0
    counts = {f"{name}_count": count for name, count in objective.counts(whole).items()}
    for part in (whole[:50], whole[50:]):
        tu.assign_non_tensor(part, **counts)
        loss, _ = objective(policy(fields.policy_batch(part), task="evaluate"), part)
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    assert sum(g.abs().sum() for g in plain.values()) > 0
    for name, gradient in plain.items():
        torch.testing.assert_close(policy.get_parameter(name).grad, gradient, atol=1e-5, rtol=1e-3, msg=name)
