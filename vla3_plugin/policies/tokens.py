"""Mathematics of policies that say an action as tokens: one of 256 bins for each dimension of each action.

Logits here are those of the action vocabulary alone, [..., bins], at offset j for token ``first + j``: a token policy
never samples a word, so its likelihood is normalised over the actions it can take. All of it is computed in float32, or
in float64 where the logits are, whatever the network's dtype.

Tokens count backwards from the end of the vocabulary: of 256 tokens the last one, offset 255, is the lowest value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vla3_plugin.policies.base import NoiseKey
from vla3_plugin.policies.noise import keyed_generator


def log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) over the last dimension.

    Raises:
        ValueError: ``temperature`` is not above 0: greedy decoding has no density.
    """
    if not temperature > 0:
        raise ValueError(f"policy.temperature is {temperature}, expected above 0: greedy decoding has no likelihood")
    return torch.log_softmax(_wide(logits) / temperature, dim=-1)


def token_logprob(logprobs: Tensor, offsets: Tensor) -> Tensor:
    """Entries of ``logprobs`` [..., bins] at ``offsets`` int64 [...]."""
    return logprobs.gather(-1, offsets[..., None]).sum(-1)  # of one: a view would be a risk as FSDP's output


def token_entropy(logprobs: Tensor) -> Tensor:
    """-sum p log p of ``logprobs`` [..., bins], [...]. A bin of probability 0 (-inf) adds nothing."""
    safe = logprobs.clamp(min=torch.finfo(logprobs.dtype).min)
    return -(logprobs.exp() * safe).sum(-1)


def keyed_gumbel(keys: Sequence[NoiseKey], tokens: int, bins: int) -> Tensor:
    """Standard Gumbel noise float64 [B, tokens, bins] on the CPU: row b from ``keys[b]`` alone.

    The noise of a token depends on the key and its index, not on how many tokens follow.
    """
    uniform = torch.stack(
        [torch.rand(tokens, bins, generator=keyed_generator(key), dtype=torch.float64) for key in keys]
    )
    tiny = torch.finfo(torch.float64).tiny
    return -torch.log(-torch.log(uniform.clamp(tiny, 1 - torch.finfo(torch.float64).eps / 2)))


def choose(logprobs: Tensor, gumbel: Tensor | None) -> Tensor:
    """Offsets int64 [...]: a sample of ``logprobs`` [..., bins] by the Gumbel-max rule, the likeliest without noise.

    The largest of log p + Gumbel noise is distributed as p (Maddison et al. 2014), and a rounding error of the
    logits changes the choice only where two bins are that close.
    """
    return (logprobs if gumbel is None else logprobs + gumbel.to(logprobs)).argmax(-1)


# bins and values


def bin_edges(bins: int = 256) -> Tensor:
    """float64 [bins]: the published grid over [-1, 1]; between two neighbours lies one of bins - 1 intervals."""
    return torch.linspace(-1.0, 1.0, bins, dtype=torch.float64)


def offset_values(bins: int = 256) -> Tensor:
    """float64 [bins]: the value in [-1, 1] that offset j stands for, the centre of its interval.

    There is one interval fewer than there are tokens: the two highest, offsets 0 and 1, both are the last one.
    """
    edges = bin_edges(bins)
    centres = (edges[:-1] + edges[1:]) / 2
    return centres[(bins - 1 - torch.arange(bins)).clamp(max=bins - 2)]


def value_offsets(values: Tensor, bins: int = 256) -> Tensor:
    """int64 [...]: the offset that the published encoding gives a value, clipped to [-1, 1]."""
    edges = bin_edges(bins).to(values.device)
    return bins - torch.bucketize(values.double().clamp(-1.0, 1.0), edges, right=True)


def token_offsets(ids: Tensor, first: int, bins: int = 256) -> Tensor:
    """int64 [...]: offsets of token ids; what is no action token counts as the nearest, as in the published decoder."""
    return (ids - first).clamp(0, bins - 1)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
