"""Observations and actions of OpenVLA and OpenVLA-OFT: images, prompt, and what a token means in the environment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vla3_plugin.contract import EnvSpec, Observation
from vla3_plugin.policies import tokens
from vla3_plugin.policies.openvla_images import centre_crop, resize_bicubic
from vla3_plugin.policies.openvla_prompts import TEMPLATE, OpenVLAPrompts
from vla3_plugin.policies.processing import (
    FILE,
    NORMALISATIONS,
    Normalisation,
    Processing,
    ProcessingError,
    _gripper,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
HALF = ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
_SIGMAS = 3.0  # what a record of means and deviations becomes: tokens end where the range ends


@dataclass
class OpenVLAProcessing(Processing):
    """``Processing`` with what OpenVLA needs besides. The proprioceptive state is not looked at.

    Actions are bounded, since tokens are: ``action`` is of kind ``quantiles``, ``bounds`` or ``identity`` (the range
    [-1, 1] as it is); a ``mean_std`` record becomes bounds three deviations from the mean. Dimensions listed in
    ``raw_dims`` are not un-normalised (published statistics mask the gripper). ``range_epsilon`` is added to each range
    (openvla-oft: 1e-8, openvla: 0). ``crop_side``: the part of each side that the centre crop keeps, 1 for none. Images
    augmented in training want it: openvla and openvla-oft keep 0.9 of the *area*, sqrt(0.9) of a side; verl's port
    keeps 0.9 of a side. ``means`` and ``stds``: of DINOv2's and SigLIP's input. Images are resized by Pillow's bicubic
    filter without keeping the aspect ("resize-naive").
    """

    prompt: str = TEMPLATE
    max_tokens: int = 64
    raw_dims: list[int] = field(default_factory=list)
    range_epsilon: float = 0.0
    crop_side: float = 1.0
    means: list[list[float]] = field(default_factory=lambda: [list(IMAGENET[0]), list(HALF[0])])
    stds: list[list[float]] = field(default_factory=lambda: [list(IMAGENET[1]), list(HALF[1])])

    def __post_init__(self) -> None:
        if self.action.kind == "mean_std":
            self.action.check("action", self.action_dim)
            mean, std = (np.array(self.action.stats[key]) for key in ("mean", "std"))
            reach = _SIGMAS * np.maximum(std, 1e-6)
            self.action = Normalisation("bounds", {"low": (mean - reach).tolist(), "high": (mean + reach).tolist()})
        super().__post_init__()
        if not 0.0 < self.crop_side <= 1.0:
            raise ProcessingError(f"crop_side is {self.crop_side}, expected above 0 and at most 1")
        if not self.range_epsilon >= 0.0:
            raise ProcessingError(f"range_epsilon is {self.range_epsilon}, expected at least 0")
        if any(not 0 <= i < self.action_dim for i in self.raw_dims):
            raise ProcessingError(f"raw_dims is {self.raw_dims}, the action has {self.action_dim} dimensions")
        for name in ("means", "stds"):
            values = getattr(self, name)
            if len(values) != 2 or any(len(row) != 3 for row in values):
                raise ProcessingError(f"{name} is {values}, expected three numbers for each of the two vision towers")

    @classmethod
    def of(cls, record: Processing) -> OpenVLAProcessing:
        """``record`` as one of this class. Another family's prompt is left behind, its tokenizer too."""
        if isinstance(record, cls):
            return record
        values = {field.name: getattr(record, field.name) for field in fields(Processing)}
        return cls(**{**values, "prompt": TEMPLATE})

    @classmethod
    def load(cls, path: Path) -> OpenVLAProcessing:
        """See ``Processing.load``; a file written for another family is taken ``of``."""
        record = super().load(path)
        assert isinstance(record, cls)
        file = path / FILE if path.is_dir() else path
        if "raw_dims" in json.loads(file.read_text()):
            return record
        ready = replace(record, prompt=TEMPLATE)
        return ready if record.prompts is None else ready.with_tokenizer(record.prompts.tokenizer)

    def with_tokenizer(self, tokenizer: Tokenizer) -> OpenVLAProcessing:
        ready = replace(self)
        ready.prompts = OpenVLAPrompts(tokenizer, self.prompt, self.max_tokens)  # type: ignore[assignment]
        return ready

    def check_env(self, spec: EnvSpec) -> None:
        """Refuse an environment with other cameras or actions; its state does not matter."""
        blind = replace(self, state_dim=spec.state_dim, state_names=[], state=Normalisation("identity"))
        Processing.check_env(blind, spec)

    def stack(self, observations: Sequence[Observation]) -> dict[str, Tensor]:
        """``pixels`` uint8 [B, cameras, H, W, 3] as the simulator gave them."""
        blind = [replace(o, state=np.zeros(self.state_dim, np.float32)) for o in observations]
        inputs = super().stack(blind)
        del inputs["state"]
        return inputs

    def model_images(self, pixels: Tensor) -> Tensor:
        """uint8 [..., H, W, 3] to float32 [..., 6, h, w]: DINOv2's three channels, then SigLIP's."""
        lead = pixels.shape[:-3]
        x = self.resized(pixels.reshape(-1, *pixels.shape[-3:]))
        return self.normalised(x.permute(0, 3, 1, 2)).reshape(*lead, 6, *self.image_size)

    def resized(self, pixels: Tensor) -> Tensor:
        """uint8 [N, H, W, 3] to uint8 [N, h, w, 3], cropped where the record says so."""
        x = resize_bicubic(pixels, self.image_size)
        return centre_crop(x, self.crop_side) if self.crop_side < 1.0 else x

    def normalised(self, images: Tensor) -> Tensor:
        """uint8 [N, 3, h, w] to float32 [N, 6, h, w]."""
        x = images.float() / 255.0
        parts = []
        for mean, std in zip(self.means, self.stds, strict=True):
            shift, scale = (torch.tensor(v, dtype=torch.float32, device=x.device)[:, None, None] for v in (mean, std))
            parts.append((x - shift) / scale)
        return torch.cat(parts, dim=1)

    # tokens <-> actions

    def _range(self) -> tuple[Tensor, Tensor]:
        """Lower end and width of each dimension's range, float64 [A]; raw ones are [-1, 1] exactly."""
        low = torch.full((self.action_dim,), -1.0, dtype=torch.float64)
        high = -low
        if self.action.kind != "identity":
            low, high = (
                torch.tensor(self.action.stats[k], dtype=torch.float64) for k in NORMALISATIONS[self.action.kind]
            )
        width = high - low + self.range_epsilon
        low[self.raw_dims], width[self.raw_dims] = -1.0, 2.0
        return low, width

    def offset_actions(self, offsets: Tensor) -> Tensor:
        """int64 [..., A] offsets of action tokens to float64 [..., A] of the policy's units, before the gripper's
        convention."""
        low, width = (part.to(offsets.device) for part in self._range())
        x = tokens.offset_values().to(offsets.device)[offsets]
        actions = 0.5 * (x + 1.0) * width + low
        actions[..., self.raw_dims] = x[..., self.raw_dims]
        return actions

    def token_actions(self, offsets: Tensor) -> Tensor:
        """int64 [..., A] offsets to float32 [..., A] in environment units and gripper convention."""
        return self._to_env(self.offset_actions(offsets)).float()

    def action_offsets(self, actions: Tensor) -> Tensor:
        """float32 [..., A] in environment units to the offsets int64 [..., A] of the tokens that say them."""
        scale, shift = _gripper(self.gripper)
        x = actions.double().clone()
        x[..., self.gripper_index] = (x[..., self.gripper_index] - shift) / scale
        low, width = (part.to(actions.device) for part in self._range())
        return tokens.value_offsets(2.0 * (x - low) / width - 1.0)

    def _to_env(self, actions: Tensor) -> Tensor:
        scale, shift = _gripper(self.gripper)
        gripper = actions[..., self.gripper_index] * scale + shift
        if self.gripper_binary:
            gripper = torch.where(gripper > 0, 1.0, -1.0).to(gripper.dtype)
        actions[..., self.gripper_index] = gripper
        return actions
