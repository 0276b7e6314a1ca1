"""Token mathematics: likelihoods against torch.distributions, keyed sampling, bins against the published encoding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vla3_plugin.policies import tokens

KEYS = st.tuples(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 500))


def logits(seed: int, *shape: int, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(0, 999), st.floats(0.1, 5.0))
@settings(max_examples=30, deadline=None)
def test_logprob_and_entropy_are_the_categorical_distributions(seed: int, temperature: float) -> None:
    raw = logits(seed, 2, 3, 256)
    chosen = torch.randint(256, (2, 3), generator=torch.Generator().manual_seed(seed))
    reference = torch.distributions.Categorical(logits=raw / temperature)
    logprobs = tokens.log_probabilities(raw, temperature)
    torch.testing.assert_close(tokens.token_logprob(logprobs, chosen), reference.log_prob(chosen))
    torch.testing.assert_close(tokens.token_entropy(logprobs), reference.entropy())


def test_half_precision_logits_are_normalised_in_float32() -> None:
    raw = logits(0, 4, 256).to(torch.bfloat16)
    logprobs = tokens.log_probabilities(raw, 1.0)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.exp().sum(-1), torch.ones(4))


def test_a_bin_of_no_probability_adds_no_entropy_and_no_nan() -> None:
    raw = torch.tensor([0.0, 0.0, -torch.inf])
    logprobs = tokens.log_probabilities(raw, 1.0)
    assert tokens.token_entropy(logprobs).item() == pytest.approx(np.log(2))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_no_temperature_no_likelihood(temperature: float) -> None:
    with pytest.raises(ValueError, match="policy.temperature"):
        tokens.log_probabilities(logits(0, 5), temperature)


@given(st.lists(KEYS, min_size=1, max_size=4, unique=True), st.integers(1, 20), st.integers(1, 20))
@settings(max_examples=30, deadline=None)
def test_noise_depends_on_key_and_token_index_alone(keys: list, few: int, more: int) -> None:
    together = tokens.keyed_gumbel(keys, few, 16)
    assert torch.isfinite(together).all()
    for row, key in enumerate(keys):
        alone = tokens.keyed_gumbel([key], few + more, 16)[0]
        assert torch.equal(together[row], alone[:few])
        assert not torch.equal(alone[0], alone[1])  # tokens of one request do not share their noise
    assert len({float(row[0, 0]) for row in together}) == len(keys)


def test_samples_follow_the_probabilities() -> None:
    raw = logits(3, 12, scale=1.0)
    logprobs = tokens.log_probabilities(raw, 0.7)
    keys = [(1, episode, 0) for episode in range(400)]
    chosen = tokens.choose(logprobs, tokens.keyed_gumbel(keys, 10, 12))
    frequency = torch.bincount(chosen.flatten(), minlength=12) / chosen.numel()
    p = logprobs.exp()
    assert ((frequency - p).abs() < 4.5 * (p * (1 - p) / chosen.numel()).sqrt()).all()


def test_without_noise_the_likeliest_is_chosen() -> None:
    raw = logits(4, 3, 7, 256)
    assert torch.equal(tokens.choose(tokens.log_probabilities(raw, 2.0), None), raw.argmax(-1))


# bins


def test_values_are_the_centres_of_255_intervals_highest_token_first() -> None:
    values = tokens.offset_values()
    edges = np.linspace(-1, 1, 256)
    np.testing.assert_allclose(values.flip(0)[:255], (edges[1:] + edges[:-1]) / 2, atol=1e-15)
    assert values[0] == values[1] == values.max() and values[255] == values.min()
    assert (values[1:-1] > values[2:]).all()


@given(st.lists(st.floats(-1.5, 1.5), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_encoding_is_the_published_one_and_decodes_to_the_nearest_centre(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    offsets = tokens.value_offsets(x)
    digits = np.digitize(np.clip(values, -1, 1), np.linspace(-1, 1, 256))
    assert (32000 - digits).tolist() == (offsets + 31744).tolist()
    inside = x.clamp(-1, 1)
    assert ((tokens.offset_values()[offsets] - inside).abs() <= 1 / 255 + 1e-12).all()


@pytest.mark.parametrize("bins", [16, 256])
def test_decoding_and_encoding_again_changes_nothing_but_the_doubled_token(bins: int) -> None:
    offsets = torch.arange(bins)
    again = tokens.value_offsets(tokens.offset_values(bins), bins)
    assert torch.equal(again[1:], offsets[1:]) and again[0] == 1


def test_other_tokens_count_as_the_nearest_action() -> None:
    ids = torch.tensor([5, 31743, 31744, 31999, 32000, 32063])
    assert tokens.token_offsets(ids, 31744).tolist() == [0, 0, 0, 255, 255, 255]
