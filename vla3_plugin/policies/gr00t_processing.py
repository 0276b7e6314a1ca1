"""Observations and actions of GR00T N1.5: min/max normalisation, embodiment, Eagle's image resizing and prompts."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vla3_plugin.policies.gr00t_prompts import PROMPT, WORD_PROMPT, EaglePrompts, eagle_tokenizer, eagle_word_tokenizer
from vla3_plugin.policies.gr00t_sizes import EMBODIMENTS
from vla3_plugin.policies.processing import FILE, Normalisation, Processing, ProcessingError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)


@dataclass
class MinMax(Normalisation):
    """min -> -1, max -> 1, as the published pipelines have it: a dimension whose min is its max becomes 0, and back
    becomes min. Unlike ``bounds`` it takes constant dimensions, which a robot's unused joints are.
    """

    kind: str = "min_max"

    def check(self, name: str, dim: int) -> None:
        missing = [key for key in ("min", "max") if key not in self.stats]
        if missing:
            raise ProcessingError(
                f"{name} normalisation 'min_max' lacks {', '.join(missing)} (found: {sorted(self.stats) or 'none'}); "
                "without them the numbers of policy and simulator are on different scales. Take them from the data "
                "set the checkpoint was trained on"
            )
        for key in ("min", "max"):
            values = self.stats[key]
            if len(values) != dim:
                raise ProcessingError(f"{name}.stats.{key} has {len(values)} values, expected {dim}")
            if not all(math.isfinite(value) for value in values):
                raise ProcessingError(f"{name}.stats.{key} is not finite: {values}")
        turned = [i for i in range(dim) if self.stats["min"][i] > self.stats["max"][i]]
        if turned:  # the published code computes with them all the same, so weights may have been trained on them
            logger.warning("%s.stats: min is above max in dimensions %s, which mirrors them", name, turned)

    def _vectors(self, like: Tensor) -> tuple[Tensor, Tensor]:
        low, high = (torch.tensor(self.stats[key], dtype=torch.float32, device=like.device) for key in ("min", "max"))
        return low, high

    def forward(self, x: Tensor) -> Tensor:
        low, high = self._vectors(x)
        moves = high != low
        scaled = 2.0 * (x - low) / torch.where(moves, high - low, 1.0) - 1.0
        return torch.where(moves, scaled, 0.0)

    def inverse(self, x: Tensor) -> Tensor:
        low, high = self._vectors(x)
        return (x + 1.0) * 0.5 * (high - low) + low


@dataclass
class GR00TProcessing(Processing):
    """``Processing`` with what GR00T needs besides.

    ``embodiment``: a published tag or a number: which of the network's projections are used. ``prompt`` must contain
    ``{images}`` and ``{task}``. ``max_tokens`` counts an image as one token. ``task_style``: the task in the prompt as
    a one-element ``list``'s repr (how the published pipelines train) or as ``text``. ``formalize``: lower case and no
    punctuation, which NVIDIA's pipeline does and lerobot's does not. Normalisations may also be of kind ``min_max``.
    """

    prompt: str = PROMPT
    max_tokens: int = 96
    embodiment: str | int = "new_embodiment"
    task_style: Literal["list", "text"] = "list"
    formalize: bool = False

    def __post_init__(self) -> None:
        self.state, self.action = _min_max(self.state), _min_max(self.action)
        super().__post_init__()
        if "{images}" not in self.prompt:
            raise ProcessingError(f"prompt is {self.prompt!r}, expected it to contain {{images}}")
        if self.task_style not in ("list", "text"):
            raise ProcessingError(f"task_style is {self.task_style!r}, expected list or text")
        self.embodiment_id  # noqa: B018  refuses an unknown tag

    @property
    def embodiment_id(self) -> int:
        if isinstance(self.embodiment, int) and self.embodiment >= 0:
            return self.embodiment
        if self.embodiment not in EMBODIMENTS:
            raise ProcessingError(
                f"embodiment is {self.embodiment!r}, expected a number or one of {', '.join(EMBODIMENTS)}"
            )
        return EMBODIMENTS[str(self.embodiment)]

    @classmethod
    def of(cls, record: Processing) -> GR00TProcessing:
        """``record`` as one of this class. Another family's prompt is left behind, its tokenizer too."""
        if isinstance(record, cls):
            return record
        values = {field.name: getattr(record, field.name) for field in fields(Processing)}
        if "{images}" not in values["prompt"]:
            del values["prompt"]
        return cls(**values)

    @classmethod
    def load(cls, path: Path) -> GR00TProcessing:
        """See ``Processing.load``; a file written for another family is taken ``of``."""
        file = path / FILE if path.is_dir() else path
        if file.is_file() and '"embodiment"' not in file.read_text():
            return cls.of(Processing.load(path))
        record = super().load(path)
        assert isinstance(record, cls)
        return record

    read_tokenizer = staticmethod(eagle_tokenizer)

    def with_tokenizer(self, tokenizer: Tokenizer) -> GR00TProcessing:
        ready = replace(self)
        ready.prompts = EaglePrompts(
            tokenizer, self.prompt, self.max_tokens, len(self.cameras), self.task_style == "list", self.formalize
        )
        return ready

    def with_words(self, words: Sequence[str]) -> GR00TProcessing:
        """The same record for a network that starts from nothing: instructions by whole words, in a prompt without the
        words that carry nothing, and embodiment 0, its only one."""
        return replace(self, prompt=WORD_PROMPT, task_style="text", embodiment=0).with_tokenizer(
            eagle_word_tokenizer(words)
        )

    def model_images(self, pixels: Tensor) -> Tensor:
        """uint8 [..., H, W, 3] to float32 [..., 3, h, w] in [-1, 1]: one tile, bicubic, the aspect is not kept."""
        lead, (height, width) = pixels.shape[:-3], pixels.shape[-3:-1]
        x = pixels.reshape(-1, height, width, 3).permute(0, 3, 1, 2)
        if (height, width) != self.image_size:
            x = resize_bicubic(x, self.image_size)
        return ((x.float() / 255.0 - 0.5) / 0.5).reshape(*lead, 3, *self.image_size)

    def padded_actions(self, actions: Tensor, horizon: int, model_dim: int) -> tuple[Tensor, Tensor]:
        """float32 [B, L, A] in environment units to what the published pipeline trains on, [B, horizon, model_dim],
        and its mask: longer chunks are cut, shorter ones repeat their last action."""
        x = self.model_actions(actions[:, :horizon], model_dim)
        x = torch.cat([x, x[:, -1:].expand(-1, horizon - x.shape[1], -1)], dim=1)
        mask = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
        mask[..., : self.action_dim] = True
        return x, mask


def resize_bicubic(x: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 [N, 3, H, W] to uint8 [N, 3, *size], antialiased."""
    if x.device.type == "cpu":
        return F.interpolate(x.contiguous(), size, mode="bicubic", antialias=True)
    # No uint8 kernel elsewhere. The CPU's rounds between its two passes, so this does.
    x = x.float()
    for shape in ((x.shape[2], size[1]), size):
        x = F.interpolate(x, shape, mode="bicubic", antialias=True).round().clamp(0.0, 255.0)
    return x.to(torch.uint8)


def _min_max(found: Normalisation) -> Normalisation:
    return MinMax(**asdict(found)) if found.kind == "min_max" and not isinstance(found, MinMax) else found
