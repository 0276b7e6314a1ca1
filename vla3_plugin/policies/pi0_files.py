"""pi0 and pi0.5 from presets and from published checkpoints: transformers', lerobot's and openpi's PyTorch layouts."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from vla3_plugin.policies import checkpoints
from vla3_plugin.policies.checkpoints import CONFIG, HEADS, CheckpointError, read_config, weight_shapes
from vla3_plugin.policies.flow_settings import FlowSettings
from vla3_plugin.policies.hub import download
from vla3_plugin.policies.pi05_prompt import STATE_BINS, STATE_NUMBERS
from vla3_plugin.policies.presets import PRESETS
from vla3_plugin.policies.processing import Processing
from vla3_plugin.policies.prompts import word_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from vla3_plugin.policies.pi0_paligemma import PaliGemmaPolicy

P = TypeVar("P", bound="PaliGemmaPolicy")

# Published names (openpi's PyTorch port, lerobot with or without its leading "model.") to transformers' names.
_RENAMES: list[tuple[str, str]] = [
    (r"^model\.(?=paligemma_with_expert\.|state_proj|action_|time_mlp)", ""),
    (r"^(state_proj|action_in_proj|action_time_mlp_in|action_time_mlp_out)\.", r"embed_action_time.\1."),
    (r"^paligemma_with_expert\.paligemma\.lm_head\.", "model.vlm.language_model.embed_tokens."),
    (r"^paligemma_with_expert\.paligemma\.model\.", "model.vlm."),
    (r"^paligemma_with_expert\.gemma_expert\.model\.", "model.dit."),
    (r"^paligemma_with_expert\.gemma_expert\.lm_head\.", "model.dit.embed_tokens."),
    (r"\.vision_tower\.vision_model\.", ".vision_tower."),
    (r"^model\.vlm\.language_model\.model\.", "model.vlm.language_model."),  # as transformers 5.10 saves it
]
# What lerobot's config.json says of the network; the rest are the published sizes.
_STATED = [
    "chunk_size", "max_state_dim", "max_action_dim", "min_period", "max_period", "time_sampling_beta_alpha",
    "time_sampling_beta_beta", "time_sampling_scale", "time_sampling_offset",
]  # fmt: skip
_OPENPI = {"action_dim", "action_horizon"}  # in the config.json of openpi's conversion to PyTorch
_MARKS = {".state_proj.": "pi0", ".action_time_mlp_in.": "pi0", ".time_mlp_in.": "pi05", "layernorm.dense.": "pi05"}
UNUSED = "model.dit.embed_tokens.weight"  # the expert reads no tokens; checkpoints carry the table all the same


def transformers_key(name: str) -> str:
    """The name in ``PI0ForConditionalGeneration`` of a published checkpoint's tensor."""
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def build(
    cls: type[P],
    preset: str,
    processing: Processing,
    *,
    tokenizer: Tokenizer | str | Path | None = None,
    model: dict[str, Any] | None = None,
    seed: int = 0,
    **settings: Any,
) -> P:
    """Fresh weights, the same for the same ``seed``. ``model`` and ``settings`` override the preset's."""
    chosen = PRESETS[preset]
    config = cls.config_from({**chosen.model, **(model or {})})
    if tokenizer is not None:
        processing = checkpoints.with_tokenizer(processing, tokenizer)
    elif processing.prompts is None:
        if not chosen.words:
            raise ValueError(f"preset {preset!r} brings no tokenizer: give the one of google/paligemma-3b-pt-224")
        processing = processing.with_tokenizer(word_tokenizer(chosen.words))
    parsed = checkpoints.parse_settings(FlowSettings, {**chosen.policy, **settings}, cls.family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built = cls(config, parsed, processing)
        if chosen.sincos_positions:
            positions = built.vlm.vision_tower.embeddings.position_embedding.weight
            positions.data.copy_(sincos_positions(*positions.shape))
        if chosen.words and "{state}" in processing.prompt:
            _order_numbers(built.vlm.get_input_embeddings().weight.data, processing, config.initializer_range)
    built.preset = preset
    return built


def sincos_positions(patches: int, width: int) -> Tensor:
    """Sines and cosines of row and column, [patches, width]: where a patch is can be read before anything is learned.

    A small network trained from nothing learns to locate objects in fewer steps with these than with small noise, and
    in fewer with these wavelengths (four patches to eight times the side) than with shorter ones.
    """
    side, quarter = math.isqrt(patches), width // 4
    place = (torch.arange(side) + 0.5) / side
    frequency = torch.pi * torch.logspace(math.log10(0.25), math.log10(side / 2), quarter)
    angle = place[:, None] * frequency
    axis = torch.cat([angle.sin(), angle.cos()], dim=1)
    rows, columns = axis[:, None].expand(side, side, -1), axis[None].expand(side, side, -1)
    return 0.7 * torch.cat([rows, columns], dim=2).reshape(patches, width)


def _order_numbers(table: Tensor, processing: Processing, std: float) -> None:
    """Fresh embeddings of the numbers a state is written in, in place: sines and cosines, so that 100 is near 101."""
    tokenizer: Any = processing.prompts and processing.prompts.tokenizer
    ids = {int(number): tokenizer.token_to_id(number) for number in STATE_NUMBERS}
    place = torch.tensor([number / STATE_BINS for number in ids])
    angle = place[:, None] * torch.pi * torch.logspace(math.log10(0.5), math.log10(32.0), table.shape[1] // 2)
    table[torch.tensor(list(ids.values()))] = math.sqrt(2.0) * std * torch.cat([angle.sin(), angle.cos()], dim=1)


def from_checkpoint(
    cls: type[P],
    source: str | Path,
    *,
    processing: Processing | str | Path | None = None,
    tokenizer: Tokenizer | str | Path | None = None,
    model: dict[str, Any] | None = None,
    dtype: str | torch.dtype = torch.float32,
    **settings: Any,
) -> P:
    """Weights in transformers', lerobot's or openpi's PyTorch layout, from a directory or a hub id.

    ``processing`` (record or file) is needed where the directory has no ``processing.json``: published weights do not
    know the environment's cameras and statistics. ``tokenizer``: PaliGemma's, where the directory has none. ``model``
    overrides sizes. The heads start anew.
    """
    path = Path(source) if Path(source).is_dir() else download(str(source))
    sizes = _published_sizes(cls, path)
    files, shapes = weight_shapes(path)
    told = weights_family(files)
    if told not in (None, cls.family):
        raise CheckpointError(f"{path} is labelled {cls.family!r} and holds the tensors of {told!r}: mend {CONFIG}")
    config = cls.config_from({**sizes, **(model or {})})
    record = checkpoints.read_processing(processing, tokenizer, path)
    merged = {**PRESETS[cls.published_preset].policy, **settings}
    parsed = checkpoints.parse_settings(FlowSettings, merged, cls.family)
    loaded = checkpoints.empty(lambda: cls(config, parsed, record), checkpoints.parse_dtype(dtype))
    targets = published_targets(cls, files)
    fresh = {key for key in loaded.state_dict() if key.startswith(HEADS)}
    checkpoints.fill(loaded, targets, files, shapes, fresh, path, f"{cls.family} model")
    return loaded


def published_targets(cls: type[PaliGemmaPolicy], names: Iterable[str]) -> dict[str, str]:
    """A published checkpoint's names to the policy's keys, without the tables that nothing reads.

    Where both ``embed_tokens`` and ``lm_head`` are there they hold the same token embedding, and ``embed_tokens`` is
    read: fine-tuning trains it.
    """
    found = {name: key for name in names if (key := cls.published_key(name)) is not None}
    for key in [key for key in set(found.values()) if list(found.values()).count(key) > 1]:
        for name in [name for name, target in found.items() if target == key and "lm_head" in name]:
            del found[name]
    return {name: f"{cls.network_name}.{key}" for name, key in found.items()}


def _published_sizes(cls: type[PaliGemmaPolicy], path: Path) -> dict[str, Any]:
    """Sizes for the config class from transformers', lerobot's or openpi's ``config.json``."""
    data = read_config(path)
    kind = data.get("model_type") or data.get("type")
    if kind != cls.family and not (kind is None and _OPENPI <= data.keys()):
        raise CheckpointError(f"{path / CONFIG} describes a {kind!r} model, expected {cls.family!r}")
    if "vlm_config" in data:
        return data
    sizes = copy.deepcopy(PRESETS[cls.published_preset].model)
    if kind is None:  # openpi's conversion names no architecture
        return sizes | dict(
            chunk_size=data["action_horizon"], max_action_dim=data["action_dim"], max_state_dim=data["action_dim"]
        )
    return sizes | {key: data[key] for key in _STATED if key in data}


def weights_family(names: Iterable[str]) -> str | None:
    """``pi0`` or ``pi05`` by the tensors that only one of them has; none: neither, or both."""
    told = {family for name in names for mark, family in _MARKS.items() if mark in f".{name}"}
    return told.pop() if len(told) == 1 else None


def unnamed_family(path: Path) -> str | None:
    """The family of a directory whose ``config.json`` names none, if it is openpi's conversion of pi0 or pi0.5."""
    return weights_family(weight_shapes(path)[0]) if _OPENPI <= read_config(path).keys() else None
