"""What stands between an environment's units and a policy's numbers, as one JSON-serialisable record.

It fixes which cameras feed the policy and in which order, the image size, how states and actions are normalised, the
gripper's convention and the prompt. It travels with every checkpoint (``processing.json``), because a policy run with
another normalisation than the one it was trained with does not fail: it acts, wrongly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vla3_plugin.contract import EnvSpec, Observation
from vla3_plugin.policies.prompts import FILE as TOKENIZER_FILE
from vla3_plugin.policies.prompts import PromptTokenizer, load_tokenizer
from vla3_plugin.rows import stack_rows

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "processing.json"
EPS = 1e-8  # added to the standard deviation, as the published pi0 checkpoints were trained with
STD_FLOOR = 1e-2  # in ``from_demos``: a dimension that hardly moves must not turn its noise into large numbers

NORMALISATIONS: dict[str, tuple[str, ...]] = {
    "identity": (),
    "mean_std": ("mean", "std"),  # (x - mean) / (std + EPS); inverse x * std + mean
    "quantiles": ("q01", "q99"),  # q01 -> -1, q99 -> 1
    "bounds": ("low", "high"),  # low -> -1, high -> 1
}
# How the policy's gripper number g becomes the environment's: g * scale + offset.
GRIPPERS: dict[str, tuple[float, float]] = {
    "none": (1.0, 0.0),
    "flip": (-1.0, 0.0),
    "unit": (2.0, -1.0),  # the policy says 0..1, the environment wants -1..1
    "unit_flip": (-2.0, 1.0),  # the same with open and closed exchanged
}


class ProcessingError(ValueError):
    """The processing record is incomplete or contradicts itself or the data it is used on."""


@dataclass
class Normalisation:
    """An invertible per-dimension map between environment units and the policy's numbers.

    ``kind`` is one of ``NORMALISATIONS``; ``stats`` holds that kind's vectors, all of one length (the number of
    dimensions). ``identity`` needs none.
    """

    kind: str
    stats: dict[str, list[float]] = field(default_factory=dict)

    def check(self, name: str, dim: int) -> None:
        """Refuse a record that would act wrongly. ``name``: "state" or "action"; ``dim``: how many values it has."""
        if self.kind not in NORMALISATIONS:
            raise ProcessingError(f"{name}.kind is {self.kind!r}, expected one of {', '.join(NORMALISATIONS)}")
        needed = NORMALISATIONS[self.kind]
        missing = [key for key in needed if key not in self.stats]
        if missing:
            wrong = (
                "the simulator would receive actions in normalised units"
                if name == "action"
                else "the policy would see states on a scale it was not trained with"
            )
            raise ProcessingError(
                f"{name} normalisation {self.kind!r} lacks {', '.join(missing)} (found: {sorted(self.stats) or 'none'})"
                f"; without them {wrong}. Take them from the data set the checkpoint was trained on"
            )
        for key in needed:
            values = self.stats[key]
            if len(values) != dim:
                raise ProcessingError(f"{name}.stats.{key} has {len(values)} values, expected {dim}")
            if not all(math.isfinite(value) for value in values):
                raise ProcessingError(f"{name}.stats.{key} is not finite: {values}")
        for i in range(dim):
            if self.kind == "mean_std" and self.stats["std"][i] < 0:
                raise ProcessingError(f"{name}.stats.std[{i}] is {self.stats['std'][i]}, expected at least 0")
            if self.kind in ("quantiles", "bounds") and not self.stats[needed[0]][i] < self.stats[needed[1]][i]:
                low, high = self.stats[needed[0]][i], self.stats[needed[1]][i]
                raise ProcessingError(f"{name}.stats: {needed[0]}[{i}] is {low}, not below {needed[1]}[{i}] = {high}")

    def _vectors(self, like: Tensor) -> tuple[Tensor, Tensor]:
        first, second = (
            torch.tensor(self.stats[key], dtype=torch.float32, device=like.device) for key in NORMALISATIONS[self.kind]
        )
        return first, second

    def forward(self, x: Tensor) -> Tensor:
        """Environment units to the policy's numbers, over the last dimension."""
        if self.kind == "identity":
            return x
        first, second = self._vectors(x)
        if self.kind == "mean_std":
            return (x - first) / (second + EPS)
        return 2.0 * (x - first) / (second - first) - 1.0

    def inverse(self, x: Tensor) -> Tensor:
        """The policy's numbers to environment units, over the last dimension."""
        if self.kind == "identity":
            return x
        first, second = self._vectors(x)
        if self.kind == "mean_std":
            return x * second + first
        return (x + 1.0) * 0.5 * (second - first) + first

    @classmethod
    def from_data(cls, kind: str, data: np.ndarray) -> Normalisation:
        """Statistics of ``data`` [N, D]. ``bounds`` takes the data's own extremes."""
        x = np.asarray(data, dtype=np.float64)
        if x.ndim != 2 or len(x) < 2 or not np.isfinite(x).all():
            raise ProcessingError(f"statistics need finite data [N >= 2, D], got shape {list(x.shape)}")
        if kind == "identity":
            return cls(kind)
        if kind == "mean_std":
            std = np.maximum(x.std(0), STD_FLOOR)
            return cls(kind, {"mean": x.mean(0).tolist(), "std": std.tolist()})
        if kind in ("quantiles", "bounds"):
            low, high = (
                (np.quantile(x, 0.01, axis=0), np.quantile(x, 0.99, axis=0))
                if kind == "quantiles"
                else (x.min(0), x.max(0))
            )
            middle, half = (low + high) / 2, np.maximum((high - low) / 2, STD_FLOOR)
            keys = NORMALISATIONS[kind]
            return cls(kind, {keys[0]: (middle - half).tolist(), keys[1]: (middle + half).tolist()})
        raise ProcessingError(f"normalisation is {kind!r}, expected one of {', '.join(NORMALISATIONS)}")


@dataclass
class Processing:
    """Everything between observations and model inputs, and between model outputs and environment actions.

    ``cameras``: names in the order the policy was trained with; cameras of the environment that are not named are not
    looked at. ``image_size``: (height, width) of the model's input. ``state_dim`` and ``action_dim`` are the
    environment's; the model pads both with zeros. ``gripper`` is one of ``GRIPPERS`` and applies to action dimension
    ``gripper_index``; ``gripper_binary`` rounds it to -1 or 1 in environment units, which suits grippers that take a
    command and not a width. ``prompt`` must contain ``{task}`` and may contain ``{state}`` (``prompts.state_words``).
    ``state_names`` and ``action_names``, where given, are held against the environment's. The tokenizer lies beside the
    record, in its own file.
    """

    cameras: list[str]
    image_size: tuple[int, int]
    state_dim: int
    action_dim: int
    state: Normalisation
    action: Normalisation
    gripper: str = "none"
    gripper_index: int = -1
    gripper_binary: bool = False
    prompt: str = "{task}\n"
    max_tokens: int = 48
    state_names: list[str] = field(default_factory=list)
    action_names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.image_size = (int(self.image_size[0]), int(self.image_size[1]))
        if not self.cameras or len(set(self.cameras)) != len(self.cameras):
            raise ProcessingError(f"cameras is {self.cameras}, expected at least one name and none twice")
        self.state.check("state", self.state_dim)
        self.action.check("action", self.action_dim)
        if self.gripper not in GRIPPERS:
            raise ProcessingError(f"gripper is {self.gripper!r}, expected one of {', '.join(GRIPPERS)}")
        if not -self.action_dim <= self.gripper_index < self.action_dim:
            raise ProcessingError(f"gripper_index is {self.gripper_index}, the action has {self.action_dim} dimensions")
        if "{task}" not in self.prompt:
            raise ProcessingError(f"prompt is {self.prompt!r}, expected it to contain {{task}}")
        self.prompts: PromptTokenizer | None = None

    def with_tokenizer(self, tokenizer: Tokenizer) -> Processing:
        """The same record, able to read instructions."""
        ready = replace(self)
        ready.prompts = PromptTokenizer(tokenizer, self.prompt, self.max_tokens)
        return ready

    def check_env(self, spec: EnvSpec) -> None:
        """Refuse an environment whose numbers are not those the policy was trained on."""
        absent = [camera for camera in self.cameras if camera not in spec.cameras]
        if absent:
            raise ProcessingError(
                f"the policy looks through cameras {self.cameras}, environment {spec.name!r} has "
                f"{sorted(spec.cameras)}: missing {absent}; change the environment's cameras or the policy's `cameras`"
            )
        if len({tuple(spec.cameras[camera]) for camera in self.cameras}) != 1:
            raise ProcessingError(f"the policy's cameras must share one resolution, {spec.name!r} has {spec.cameras}")
        for what, dim, names, theirs in (
            ("state", self.state_dim, self.state_names, spec.state_names),
            ("action", self.action_dim, self.action_names, spec.action_names),
        ):
            if dim != len(theirs) or (names and names != list(theirs)):
                raise ProcessingError(
                    f"the policy was made for {dim} {what} dimensions {names or ''}, environment {spec.name!r} has "
                    f"{len(theirs)}: {list(theirs)}; choose a checkpoint of this environment and its control mode"
                )

    @classmethod
    def from_demos(
        cls,
        states: np.ndarray,
        actions: np.ndarray,
        *,
        cameras: Sequence[str],
        image_size: tuple[int, int],
        normalisation: str = "mean_std",
        **settings: Any,
    ) -> Processing:
        """Statistics from demonstrations: ``states`` [N, S] and ``actions`` [N, A], both in environment units.

        ``settings`` are further fields of this class. The gripper convention is applied before the action statistics
        are taken, since they describe the policy's numbers.
        """
        scale, offset = _gripper(settings.get("gripper", "none"))
        policy_actions = np.array(actions, dtype=np.float64)
        index = settings.get("gripper_index", -1)
        policy_actions[:, index] = (policy_actions[:, index] - offset) / scale
        return cls(
            cameras=list(cameras),
            image_size=image_size,
            state_dim=states.shape[1],
            action_dim=actions.shape[1],
            state=Normalisation.from_data(normalisation, states),
            action=Normalisation.from_data(normalisation, policy_actions),
            **settings,
        )

    # observations -> stored inputs

    def prepare(self, observations: Sequence[Observation]) -> dict[str, Tensor]:
        """What is sent, stored and trained on: ``stack`` and the prompts' ``input_ids`` and ``attention_mask``, int64
        [B, max_tokens]."""
        if self.prompts is None:
            raise ProcessingError(f"no tokenizer: instructions cannot be read ({TOKENIZER_FILE} lies beside {FILE})")
        inputs = self.stack(observations)
        state = self.state.forward(inputs["state"]) if self.prompts.wants_state else None
        inputs["input_ids"], inputs["attention_mask"] = self.prompts([o.instruction for o in observations], state)
        return inputs

    def stack(self, observations: Sequence[Observation]) -> dict[str, Tensor]:
        """``pixels`` uint8 [B, cameras, H, W, 3] as the simulator gave them and ``state`` float32 [B, S], raw."""
        pixels, states = [], []
        for observation in observations:
            absent = [camera for camera in self.cameras if camera not in observation.images]
            if absent:
                raise ProcessingError(
                    f"the policy looks through cameras {self.cameras}, the environment gave "
                    f"{sorted(observation.images)}; missing {absent}"
                )
            images = [observation.images[camera] for camera in self.cameras]
            if len({image.shape for image in images}) != 1:
                sizes = {c: image.shape[:2] for c, image in zip(self.cameras, images, strict=True)}
                raise ProcessingError(f"the policy's cameras must share one resolution, got {sizes}")
            if observation.state.shape != (self.state_dim,):
                raise ProcessingError(
                    f"state has shape {list(observation.state.shape)}, the policy was made for [{self.state_dim}]"
                )
            pixels.append(stack_rows(images))
            states.append(observation.state)
        return {
            "pixels": torch.from_numpy(stack_rows(pixels)),
            "state": torch.from_numpy(np.stack(states).astype(np.float32, copy=False)),
        }

    # stored inputs -> model inputs

    def model_images(self, pixels: Tensor) -> Tensor:
        """uint8 [..., H, W, 3] to float32 [..., 3, h, w] in [-1, 1]: bilinear, aspect kept, centred black padding."""
        lead, (height, width) = pixels.shape[:-3], pixels.shape[-3:-1]
        x = pixels.reshape(-1, height, width, 3).permute(0, 3, 1, 2).float() / 255.0
        target_h, target_w = self.image_size
        if (height, width) != (target_h, target_w):
            ratio = max(width / target_w, height / target_h)
            h, w = int(height / ratio), int(width / ratio)
            x = F.interpolate(x, size=(h, w), mode="bilinear", align_corners=False).clamp(0.0, 1.0)
            top, left = (target_h - h) // 2, (target_w - w) // 2
            x = F.pad(x, (left, target_w - w - left, top, target_h - h - top))
        return (x * 2.0 - 1.0).reshape(*lead, 3, target_h, target_w)

    def model_state(self, state: Tensor, model_dim: int) -> Tensor:
        """float32 [B, S] in environment units to [B, model_dim], normalised and zero-padded."""
        return F.pad(self.state.forward(state), (0, model_dim - self.state_dim))

    def model_actions(self, actions: Tensor, model_dim: int) -> Tensor:
        """float32 [..., A] in environment units to [..., model_dim], normalised and zero-padded."""
        scale, offset = _gripper(self.gripper)
        if (scale, offset) != (1.0, 0.0):
            actions = actions.clone()
            actions[..., self.gripper_index] = (actions[..., self.gripper_index] - offset) / scale
        return F.pad(self.action.forward(actions), (0, model_dim - self.action_dim))

    # model outputs -> environment

    def env_actions(self, x: Tensor) -> Tensor:
        """float32 [..., model_dim] to [..., A] in environment units and gripper convention."""
        actions = self.action.inverse(x[..., : self.action_dim])
        scale, offset = _gripper(self.gripper)
        if (scale, offset) != (1.0, 0.0) or self.gripper_binary:
            actions = actions.clone()
            gripper = actions[..., self.gripper_index] * scale + offset
            if self.gripper_binary:
                gripper = torch.where(gripper > 0, 1.0, -1.0).to(gripper.dtype)
            actions[..., self.gripper_index] = gripper
        return actions

    # files

    def save(self, directory: Path) -> None:
        (directory / FILE).write_text(json.dumps(asdict(self), indent=1) + "\n")
        if self.prompts is not None:
            self.prompts.save(directory)

    @classmethod
    def load(cls, path: Path) -> Processing:
        """Read ``processing.json``, given as the file or as its directory, and the tokenizer if one lies beside it."""
        file = path / FILE if path.is_dir() else path
        if not file.is_file():
            from vla3_plugin.policies import lerobot_statistics
            from vla3_plugin.policies.env_records import env_record_names

            if not (file.parent / lerobot_statistics.FILE).is_file():
                raise ProcessingError(
                    f"{file} does not exist: it holds the normalisation statistics, without which the simulator would "
                    "receive actions in normalised units. Copy the one the checkpoint was trained with"
                )
            raise ProcessingError(
                f"{file.parent} ships lerobot's statistics, which say nothing of the environment's cameras and "
                f"dimensions: give `processing`, one of {', '.join(env_record_names())}; the statistics are then the "
                "checkpoint's"
            )
        try:
            data = json.loads(file.read_text())
            data["state"] = Normalisation(**data["state"])
            data["action"] = Normalisation(**data["action"])
            record = cls(**data)
        except ProcessingError as error:
            raise ProcessingError(f"{file}: {error}") from None
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            raise ProcessingError(f"{file} is not a processing record: {type(error).__name__}: {error}") from None
        return (
            record.with_tokenizer(load_tokenizer(file.parent)) if (file.parent / TOKENIZER_FILE).is_file() else record
        )


def _gripper(name: str) -> tuple[float, float]:
    if name not in GRIPPERS:
        raise ProcessingError(f"gripper is {name!r}, expected one of {', '.join(GRIPPERS)}")
    return GRIPPERS[name]
