"""A GR00T small enough for tests, in which everything that could be mixed up differs."""

from __future__ import annotations

import numpy as np
import policy_inputs
import torch

from vla3_plugin.policies.gr00t import GR00TPolicy
from vla3_plugin.policies.gr00t_sizes import model_sizes
from vla3_plugin.policies.processing import Processing

RNG = np.random.default_rng(7)
SMALL = model_sizes(
    vision=dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, patch_size=16, image_size=32,
    ),
    text=dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=256, max_position_embeddings=256,
    ),
    layers=2, image_token=14, vl=(1, 2, 16), dit=(4, 2, 12), hidden=20, horizon=6, max_state_dim=12, max_action_dim=9,
    embodiments=3, future_tokens=3, max_positions=16, dropout=0.3, initializer_range=0.2,
)  # fmt: skip


def processing() -> Processing:
    states, actions = RNG.normal(size=(50, 9)), RNG.normal(size=(50, 7)) * 0.3
    return Processing.from_demos(states, actions, cameras=["a", "b"], image_size=(32, 32), max_tokens=32)


def small(**settings) -> GR00TPolicy:
    """H = 6, C = 4, A = 7 of 9 padded, dropout in the network: everything that could be mixed up differs."""
    policy = GR00TPolicy.build(
        "gr00t-n1.5-nano", processing(), model=SMALL, **{"executed": 4, "value_hidden": 16, **settings}
    )
    with torch.no_grad():  # far from its tame initial state, so that agreement means something
        generator = torch.Generator().manual_seed(3)
        for parameter in policy.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return policy.eval()


def observations(count: int):
    return policy_inputs.observations(count, rng=RNG)
