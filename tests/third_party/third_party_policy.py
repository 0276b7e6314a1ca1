"""Somebody else's policy family: a Gaussian over chunks of two actions, its mean a small network of the state.

The file that VLA3_TEST_BAD_GRADIENT names says how many of its next gradients are not finite.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vla3_plugin.policies.base import ActionChunk, VLAPolicy

CHUNK, STD = 2, 0.5


class GaussianPolicy(VLAPolicy):
    family = "gaussian"
    _no_split_modules = ["Sequential"]

    def __init__(self, ballast: int = 0) -> None:
        """``ballast``: so many more parameters, which train and change nothing: for who measures bytes."""
        super().__init__()
        from vla3_plugin.learner.model_config import ModelCard

        self.config = ModelCard("gaussian")
        self.mean = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, CHUNK))
        self.value_head = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        self.ballast = nn.Parameter(torch.zeros(ballast)) if ballast else None

    def can_generate(self) -> bool:
        return False

    def prepare(self, observations):
        return {
            "state": torch.stack([torch.from_numpy(o.state) for o in observations]),
            "pixels": torch.stack([torch.from_numpy(o.images["front"]) for o in observations]),
        }

    def act(self, inputs, noise_keys, mode):
        mean = self.mean(inputs["state"])[..., None]
        action = mean
        if mode == "train":
            noise = [
                torch.randn(CHUNK, 1, generator=torch.Generator().manual_seed(hash(tuple(key)) % 2**63))
                for key in noise_keys
            ]
            action = mean + STD * torch.stack(noise)
        logprob = torch.distributions.Normal(mean, STD).log_prob(action)
        return ActionChunk(action, logprob, self.value_head(inputs["state"]), {"action": action})

    def forward(self, batch: dict[str, Any], task: str):
        mean = self.mean(batch["state"])[..., None]
        bad = Path(os.environ.get("VLA3_TEST_BAD_GRADIENT", "nowhere"))
        if mean.requires_grad and bad.exists() and (left := int(bad.read_text())) > 0:
            bad.write_text(str(left - 1))
            mean.register_hook(lambda gradient: gradient * torch.nan)
        if self.ballast is not None:
            mean = mean + 0 * self.ballast.sum()
        distribution = torch.distributions.Normal(mean, STD)
        action = batch["trace.action"]
        return {
            "logprob": distribution.log_prob(action),
            "entropy": distribution.entropy().expand_as(action),
            "value": self.value_head(batch["state"]),
        }

    def save(self, path: Path, state=None) -> None:
        path.mkdir(parents=True, exist_ok=True)
        save_file(dict(state or self.state_dict()), path / "model.safetensors")
        (path / "config.json").write_text(json.dumps({"family": "gaussian"}))

    @classmethod
    def load(cls, path: Path, **_: Any) -> GaussianPolicy:
        state = load_file(path / "model.safetensors")
        policy = cls(len(state.get("ballast", ())))
        policy.load_state_dict(state)
        return policy
