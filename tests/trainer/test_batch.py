"""From stored samples to loss weights: what trains, what does not, and that micro-batches change nothing."""

import pytest
import torch
from tensordict import TensorDict

from vla3_plugin.config import AlgorithmConfig
from vla3_plugin.learner import fields
from vla3_plugin.learner.objective import Objective
from vla3_plugin.trainer.batch import AdvantageScale, advantages, combine, padding_rows

CHUNK, DIM = 4, 3


def samples(successes, lengths, group_size=1, seed=0):
    """Flat samples of episodes: a successful one ends by itself at its last step, a failed one is cut."""
    generator = torch.Generator().manual_seed(seed)
    names = ("rewards", "terminated", "truncated", "valid", "episode_id", "group_id", "chunk_index")
    rows = {name: [] for name in names}
    for episode, (success, length) in enumerate(zip(successes, lengths, strict=True)):
        for chunk in range(-(-length // CHUNK)):
            steps = min(CHUNK, length - chunk * CHUNK)
            valid = torch.arange(CHUNK) < steps
            last = torch.zeros(CHUNK, dtype=torch.bool)
            last[steps - 1] = (chunk + 1) * CHUNK >= length
            rows["valid"].append(valid)
            rows["terminated"].append(last & success)
            rows["truncated"].append(last & (not success))
            rows["rewards"].append((last & success).float())
            rows["episode_id"].append(torch.tensor([episode]))
            rows["group_id"].append(torch.tensor([episode // group_size]))
            rows["chunk_index"].append(torch.tensor([chunk]))
    data = {name: torch.stack(value) for name, value in rows.items()}
    count = len(data["valid"])
    data["logprob"] = torch.randn(count, CHUNK, DIM, generator=generator)
    data["value"] = torch.rand(count, 1, generator=generator)
    data["bootstrap"] = data["value"] * data["truncated"].any(1, keepdim=True)
    order = torch.randperm(count, generator=generator)  # the store promises no order
    return {name: value[order] for name, value in data.items()}


def test_groups_without_spread_weigh_nothing_in_grpo():
    data = samples([True, True, False, True], [4, 8, 10, 6], group_size=2)
    result, metrics = advantages(data, AlgorithmConfig(adv_type="grpo", loss_type="actor", group_size=2), 10)
    weighs = result[fields.POLICY_MASK].flatten(1).any(1)
    assert torch.equal(weighs, data["group_id"].flatten() == 1)
    assert metrics["actor/groups_without_spread"] == 1


def test_success_filter_drops_whole_groups_and_counts_them():
    data = samples([False, False, False, True], [10, 10, 8, 8], group_size=2)
    config = AlgorithmConfig(
        adv_type="grpo", loss_type="actor", group_size=2, filter_rewards=True, rewards_lower_bound=0.6,
        rewards_upper_bound=0.9,
    )  # fmt: skip
    result, metrics = advantages(data, config, 10)
    assert not result[fields.POLICY_MASK].any()
    assert metrics["actor/filtered_below"] == 4


def test_bootstrap_changes_truncated_episodes_only():
    data = samples([True, False], [6, 8])
    config = AlgorithmConfig(normalize_advantages=False)
    with_value, _ = advantages(data, config, 8)
    without, _ = advantages({**data, "bootstrap": torch.zeros_like(data["bootstrap"])}, config, 8)
    changed = (with_value[fields.RETURNS] != without[fields.RETURNS]).flatten()
    assert torch.equal(changed, data["episode_id"].flatten() == 1)


@pytest.mark.parametrize("logprob_type", ["token", "action", "chunk"])
def test_invalid_steps_weigh_nothing_at_any_level(logprob_type):
    data = samples([True, False], [6, 10])
    result, _ = advantages(data, AlgorithmConfig(logprob_type=logprob_type), 10)
    weight = result[fields.POLICY_MASK]
    steps = int(data["valid"].sum())
    expected = {"token": steps * DIM, "action": steps, "chunk": len(data["valid"])}
    assert weight.sum() == expected[logprob_type]


def test_length_normalisation_gives_every_episode_the_same_say():
    data = samples([True, False, True], [3, 12, 7])
    config = AlgorithmConfig(logprob_type="action", length_normalization=True)
    weight = advantages(data, config, 12)[0][fields.POLICY_MASK].flatten(1).sum(1)
    shares = [float(weight[data["episode_id"].flatten() == e].sum()) for e in range(3)]
    assert shares == pytest.approx([shares[0]] * 3)


@pytest.mark.parametrize("divisor", [1, 2, 7, 16])
def test_padding_fills_up_with_names_of_its_own(divisor):
    keys = [f"{i}_0" for i in range(5)]
    rows = padding_rows(keys, divisor, "batch")
    assert (len(keys) + len(rows)) % divisor == 0 and len(rows) < divisor
    assert len({*keys, *rows}) == len(keys) + len(rows)


def batch(config, seed=0):
    data = samples([True, False, True, False], [6, 10, 3, 9], group_size=2, seed=seed)
    result, _ = advantages(data, config, 10)
    return TensorDict({**data, **result, fields.REF_LOGPROB: data["logprob"] + 0.1}, batch_size=len(data["valid"]))


CONFIGS = [
    AlgorithmConfig(),
    AlgorithmConfig(logprob_type="token", entropy_type="action", entropy_bonus=0.01, kl_beta=0.2),
    AlgorithmConfig(adv_type="grpo", loss_type="actor", group_size=2, length_normalization=True, logprob_type="action"),
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("pieces", [[3, 1, 4], [1] * 8, [2, 6]])
def test_micro_batches_of_any_size_give_the_full_batchs_gradient(config, pieces):
    """DESIGN guarantee 4 for this objective: sums over parts, divided by the counts of the whole."""
    objective, data = Objective(config), batch(config).double()
    for name in ("valid", "terminated", "truncated"):
        data[name] = data[name].bool()
    pieces = [*pieces, len(data) - sum(pieces)] if sum(pieces) < len(data) else pieces
    torch.manual_seed(1)
    parameters = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def gradient(parts):
        counts = objective.counts(data)
        for name, count in counts.items():
            data[f"{name}_count"] = torch.full((len(data),), count)
        parameters.grad = None
        total = 0.0
        for part in parts:
            model = {
                "logprob": part["logprob"] * (1 + 0.1 * parameters[0]) + 0.05 * parameters[1],
                "entropy": part["logprob"] * parameters[1],
                "value": part["value"] * parameters[2],
            }
            rows = {k: v for k, v in part.items() if not k.endswith("_count")}
            loss, _ = objective(model, {**rows, **{f"{n}_count": c for n, c in counts.items()}})
            loss.backward()
            total += loss.item()
        return parameters.grad.clone(), total

    whole, loss = gradient([data])
    split, summed = gradient(list(data.split(pieces)))
    torch.testing.assert_close(split, whole, rtol=1e-10, atol=1e-12)
    assert summed == pytest.approx(loss, rel=1e-9)


def test_padding_rows_change_neither_loss_nor_gradient():
    config = AlgorithmConfig(entropy_bonus=0.01)
    objective, data = Objective(config), batch(config)
    zeros = data[:2].clone()
    for name in (fields.ADVANTAGES, fields.RETURNS, fields.POLICY_MASK, fields.VALUE_MASK):
        zeros[name] = torch.zeros_like(zeros[name])
    padded = torch.cat([data, zeros])
    assert objective.counts(padded) == objective.counts(data)


def test_a_loss_that_is_not_finite_stops_the_run_with_its_parts():
    config = AlgorithmConfig()
    data = batch(config)
    counts = {f"{n}_count": c for n, c in Objective(config).counts(data).items()}
    model = {"logprob": data["logprob"], "entropy": data["logprob"], "value": data["value"] * float("nan")}
    with pytest.raises(FloatingPointError, match="value_loss"):
        Objective(config)(model, {**dict(data.items()), **counts})


def test_padding_of_batch_pieces_and_micro_batches_never_meets():
    """All three may begin with the same sample; a store refuses a key twice."""
    keys = ["4_0", "4_1", "4_2"]
    rows = [row for origin in ("batch", "piece", "micro") for row in padding_rows(keys, 8, origin)]
    assert len(rows) == len(set(rows)) == 15 and not set(rows) & set(keys)


def test_a_batch_without_spread_does_not_become_the_next_ones_scale():
    scale = AdvantageScale("previous")
    live = torch.ones(4, 1, dtype=torch.bool)
    scale(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), live)
    scale.end_of_batch()
    known = list(scale.previous)
    scale(torch.zeros(4, 1), live)
    scale.end_of_batch()
    assert scale.previous == known
    assert scale(torch.tensor([[1000.0], [0.0], [0.0], [0.0]]), live).max() == 10.0


def test_metrics_of_pieces_add_counts_and_weigh_the_rest_by_samples():
    pieces = [
        ({"actor/groups_without_spread": 1.0, "actor/advantage_abs_mean": 1.0}, 10),
        ({"actor/groups_without_spread": 2.0, "actor/advantage_abs_mean": 4.0}, 20),
        ({"actor/groups_without_spread": 1.0}, 5),
    ]
    assert combine(pieces) == {
        "actor/groups_without_spread": 4.0,
        "actor/advantage_abs_mean": pytest.approx(3.0),
    }


def test_previous_statistics_normalise_pieces_as_they_normalise_the_whole():
    """The first batch uses its own, the second the first's, in one piece or in several."""
    first, second = samples([True, False, True], [8, 10, 5], seed=1), samples([False, True, True], [10, 4, 9], seed=2)
    config = AlgorithmConfig(advantage_statistics="previous")
    whole, pieces = AdvantageScale("previous"), AdvantageScale("previous")
    for scale in (whole, pieces):
        assert scale.needs_whole_batch
        advantages(first, config, 10, scale)
        scale.end_of_batch()
        assert not scale.needs_whole_batch
    expected = advantages(second, config, 10, whole)[0][fields.ADVANTAGES]
    for episode in range(3):
        rows = (second["episode_id"] == episode).flatten()
        piece = {name: value[rows] for name, value in second.items()}
        found = advantages(piece, config, 10, pieces)[0][fields.ADVANTAGES]
        torch.testing.assert_close(found, expected[rows])
    whole.end_of_batch()
    pieces.end_of_batch()
    assert pieces.previous == pytest.approx(whole.previous)


def test_mini_batches_are_normalised_each_by_itself_and_then_together():
    """The former batch's mean is of a critic that knew less: what it leaves pushes all probabilities one way."""
    scale, live = AdvantageScale("mini_batch"), torch.ones(8, 1, dtype=torch.bool)
    assert not scale.needs_whole_batch
    advantage = torch.arange(8.0)[:, None] ** 2
    for part in (slice(0, 4), slice(4, 8)):
        found = scale(advantage[part], live[part])
        assert found.mean().item() == pytest.approx(0, abs=1e-5) and found.std().item() == pytest.approx(1, abs=1e-5)
    scale.end_of_batch()
    for statistics in ("mini_batch", "previous", "batch"):
        again = AdvantageScale(statistics, previous=[100.0, 1.0]).again(advantage, live)
        assert again.mean().item() == pytest.approx(0, abs=1e-5), "what is computed anew is complete"
