"""OpenVLA and OpenVLA-OFT on disk: presets, our own directories, and published checkpoints."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from vla3_plugin.policies import checkpoints
from vla3_plugin.policies.checkpoints import CheckpointError, parse_dtype, parse_settings, read_config, weight_shapes
from vla3_plugin.policies.hub import download
from vla3_plugin.policies.openvla_processing import OpenVLAProcessing
from vla3_plugin.policies.openvla_statistics import OPTIONS, Source, readable, record_of, stored_record
from vla3_plugin.policies.presets import PRESETS
from vla3_plugin.policies.prismatic import PrismaticSizes, is_unused, published_sizes
from vla3_plugin.policies.processing import Processing
from vla3_plugin.policies.prompts import word_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from vla3_plugin.policies.openvla_base import TokenPolicy

P = TypeVar("P", bound="TokenPolicy")


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
    """Fresh weights, the same for the same ``seed``. ``model`` (merged part by part) and ``settings`` override the
    preset's."""
    chosen = PRESETS[preset]
    sizes = PrismaticSizes(**_merged(chosen.model, model or {}))
    record = OpenVLAProcessing.of(processing)
    if tokenizer is not None:
        record = readable(record, tokenizer)
    elif record.prompts is None:
        if not chosen.words:
            raise ValueError(f"preset {preset!r} brings no tokenizer: give the one of openvla/openvla-7b")
        record = record.with_tokenizer(word_tokenizer(chosen.words))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built = _construct(cls, sizes, {**chosen.policy, **settings}, record)
        built.network.draw()
    built.preset = preset
    return built


def save(policy: TokenPolicy, path: Path, state: dict[str, Tensor] | None, dtype: torch.dtype | None) -> None:
    checkpoints.save(
        path,
        policy.state_dict() if state is None else state,
        family=policy.family,
        preset=policy.preset,
        settings=replace(policy.policy, rollout_backend="in_process", rollout_options={}),  # where it runs is a run's
        model=policy.network.sizes.to_dict(),
        processing=policy.processing,
        dtype=dtype,
    )


def load(
    cls: type[P],
    path: Path,
    *,
    processing: Source | None = None,
    tokenizer: Tokenizer | str | Path | None = None,
    dtype: str | torch.dtype = torch.float32,
    **settings: Any,
) -> P:
    """``settings`` override the stored ones. One that changes the value head's shape starts a new head, and says so."""
    data = checkpoints.read_saved(path, cls.family)
    merged = {**data["policy"], **settings}
    record = stored_record(processing or path, tokenizer, path)
    sizes = PrismaticSizes(**data["model"])
    loaded = checkpoints.empty(lambda: _construct(cls, sizes, merged, record), parse_dtype(dtype))
    loaded.preset = data.get("preset")
    checkpoints.fill_saved(loaded, path, f"{cls.family} model", overridden=merged != data["policy"])
    return loaded


def from_checkpoint(
    cls: type[P],
    source: str | Path,
    *,
    processing: Source | None = None,
    tokenizer: Tokenizer | str | Path | None = None,
    model: dict[str, Any] | None = None,
    dtype: str | torch.dtype = torch.float32,
    **settings: Any,
) -> P:
    """Public weights (openvla-7b, its fine-tunes and discrete OpenVLA-OFT ones), from a directory or a hub id.

    ``processing`` replaces the record made of the checkpoint's own statistics; without it ``settings`` may hold the
    options of ``openvla_statistics.published_processing`` (``unnorm_key``, ``cameras``, ``convention`` and so on).
    ``tokenizer``: where the directory has none. ``model`` overrides sizes. The value head starts anew.
    """
    path = Path(source) if Path(source).is_dir() else download(str(source))
    config = read_config(path)
    if (kind := config.get("model_type")) not in ("openvla", "prismatic"):
        raise CheckpointError(f"{path / checkpoints.CONFIG} describes a {kind!r} model, expected 'openvla'")
    if heads := sorted(file.name for name in ("action_head", "proprio_projector") for file in path.glob(f"{name}*")):
        raise CheckpointError(
            f"{path} holds {', '.join(heads)}: continuous action heads have no token likelihood and proprioception is "
            "not part of this network; use a fine-tune with discrete tokens"
        )
    options = {key: settings.pop(key) for key in OPTIONS if key in settings}
    record = record_of(cls.family, path, processing, tokenizer, **options)
    files, shapes = weight_shapes(path)
    sizes = published_sizes(config, shapes, model)
    loaded = checkpoints.empty(lambda: _construct(cls, sizes, settings, record), parse_dtype(dtype))
    targets = {name: f"network.{name}" for name in files if not is_unused(name, sizes)}
    fresh = {key for key in loaded.state_dict() if key.startswith("value_head.")}
    checkpoints.fill(loaded, targets, files, shapes, fresh, path, f"{cls.family} model")
    return loaded


def _construct(cls: type[P], sizes: PrismaticSizes, settings: dict[str, Any], record: OpenVLAProcessing) -> P:
    chosen = parse_settings(cls.settings_class, settings, cls.family)
    words = 0 if record.prompts is None else record.prompts.tokenizer.get_vocab_size()
    if words > sizes.text["vocab_size"]:
        raise ValueError(
            f"the tokenizer has {words} tokens, the model's embedding {sizes.text['vocab_size']}: not made for each "
            "other"
        )
    return cls(sizes, chosen, record)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(base)
    for key, value in over.items():
        merged[key] = (
            {**merged[key], **value} if isinstance(value, dict) and isinstance(merged.get(key), dict) else value
        )
    return merged
