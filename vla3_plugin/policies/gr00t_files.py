"""GR00T N1.5 from presets and from published checkpoints: NVIDIA's layout, and lerobot's fine-tunes of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vla3_plugin.policies import checkpoints
from vla3_plugin.policies.checkpoints import CONFIG, HEADS, CheckpointError, read_config, weight_shapes
from vla3_plugin.policies.flow_settings import FlowSettings
from vla3_plugin.policies.gr00t_config import GR00TConfig, sizes_from_shapes
from vla3_plugin.policies.gr00t_processing import GR00TProcessing
from vla3_plugin.policies.gr00t_prompts import EaglePrompts, eagle_tokenizer
from vla3_plugin.policies.gr00t_statistics import shipped_record
from vla3_plugin.policies.hub import download
from vla3_plugin.policies.presets import PRESETS
from vla3_plugin.policies.processing import FILE, Processing

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from vla3_plugin.policies.gr00t import GR00TPolicy

# Published names to ours; transformers 5 has no level between ``SiglipVisionModel`` and its parts.
_LANGUAGE = {"model": "backbone.language_model.", "lm_head": "backbone.language_model.embed_tokens."}
_RENAMES: list[tuple[str, Any]] = [
    (r"^_groot_model\.", ""),
    (r"^backbone\.eagle_model\.", "backbone."),
    (r"^backbone\.vision_model\.vision_model\.", "backbone.vision_model."),
    (r"^backbone\.language_model\.(model|lm_head)\.", lambda m: _LANGUAGE[m[1]]),
]
_UNREAD = "backbone.vision_model.head."  # SigLIP's attention pooling: some checkpoints carry it
_SECTIONS = ("action_head_cfg", "backbone_cfg", "eagle_config")
_KINDS = ("gr00t_n1_5", "groot")  # NVIDIA's model_type, lerobot's type


def network_key(name: str) -> str:
    """The name in ``gr00t_network.GR00T`` of a published checkpoint's tensor."""
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def published_targets(names: Iterable[str]) -> dict[str, str]:
    """A published checkpoint's names to the policy's keys, without what nothing reads.

    ``embed_tokens`` and ``lm_head`` are one table; where both are there, ``embed_tokens`` is read.
    """
    found = {name: key for name in names if not (key := network_key(name)).startswith(_UNREAD)}
    if len(twice := [name for name, key in found.items() if key == f"{_LANGUAGE['lm_head']}weight"]) > 1:
        for name in twice:
            if ".lm_head." in name:
                del found[name]
    return {name: f"gr00t.{key}" for name, key in found.items()}


def check_fit(config: GR00TConfig, record: GR00TProcessing) -> None:
    """Refuse a record that was not made for this network.

    Raises:
        ValueError: naming the key, its value and what is expected.
    """
    head, eagle = config.action_head_cfg, config.eagle_config
    for key, need, what in (("max_state_dim", record.state_dim, "state"), ("action_dim", record.action_dim, "action")):
        if head[key] < need:
            raise ValueError(f"action_head_cfg.{key} is {head[key]}, the environment has {need} {what} dimensions")
    if record.embodiment_id >= head["max_num_embodiments"]:
        raise ValueError(f"embodiment is {record.embodiment!r}, the model has {head['max_num_embodiments']} of them")
    size = eagle["vision_config"]["image_size"]
    if record.image_size != (size, size):
        raise ValueError(f"processing.image_size is {list(record.image_size)}, the model looks at squares of {size}")
    prompts = record.prompts
    if not isinstance(prompts, EaglePrompts):
        raise ValueError("no tokenizer.json beside the checkpoint; give `tokenizer`, the one of Eagle 2.5")
    tokens, vocabulary = prompts.tokenizer.get_vocab_size(), eagle["text_config"]["vocab_size"]
    if tokens > vocabulary or prompts.image_token != eagle["image_token_index"]:
        raise ValueError(
            f"the tokenizer has {tokens} tokens and <IMG_CONTEXT> at {prompts.image_token}, the model {vocabulary} and "
            f"{eagle['image_token_index']}: not made for each other"
        )


def build(
    cls: type[GR00TPolicy],
    preset: str,
    processing: Processing,
    *,
    tokenizer: Tokenizer | str | Path | None = None,
    model: dict[str, Any] | None = None,
    seed: int = 0,
    **settings: Any,
) -> GR00TPolicy:
    """Fresh weights, the same for the same ``seed``. ``model`` and ``settings`` override the preset's."""
    chosen, record = PRESETS[preset], GR00TProcessing.of(processing)
    if tokenizer is not None:
        record = record.with_tokenizer(_tokenizer(tokenizer))
    elif record.prompts is None:
        if not chosen.words:
            raise ValueError(f"preset {preset!r} brings no tokenizer: give `tokenizer`, the one of Eagle 2.5")
        record = record.with_words(chosen.words)
    config = GR00TConfig(**{**chosen.model, **(model or {})})
    parsed = checkpoints.parse_settings(FlowSettings, {**chosen.policy, **settings}, cls.family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built = cls(config, parsed, record)
        if chosen.sincos_positions:
            from vla3_plugin.policies.pi0_files import sincos_positions

            positions = built.gr00t.backbone.vision_model.embeddings.position_embedding.weight
            positions.data.copy_(sincos_positions(*positions.shape))
    built.preset = preset
    return built


def from_checkpoint(
    cls: type[GR00TPolicy],
    source: str | Path,
    *,
    processing: Processing | str | Path | None = None,
    tokenizer: Tokenizer | str | Path | None = None,
    model: dict[str, Any] | None = None,
    record: dict[str, Any] | None = None,
    dtype: str | torch.dtype = torch.float32,
    **settings: Any,
) -> GR00TPolicy:
    """Weights in NVIDIA's or lerobot's layout, from a directory or a hub id.

    ``processing`` (record or file) is needed where the directory ships no statistics that ``gr00t_statistics`` reads;
    ``record``: what its functions need besides (cameras, embodiment, ...). ``tokenizer``: Eagle's (a directory), where
    the directory has none. ``model``: sections of ``config.json`` that override the file's. The heads start anew.

    Raises:
        CheckpointError: the checkpoint is damaged, incomplete or of another architecture.
    """
    path = Path(source) if Path(source).is_dir() else download(str(source))
    config = published_config(path, model)
    known = record_of(cls.family, path, processing=processing, tokenizer=tokenizer, model=model, record=record)
    files, shapes = weight_shapes(path)
    parsed = checkpoints.parse_settings(
        FlowSettings, {**PRESETS["gr00t-n1.5"].policy, **_executed(config), **settings}, cls.family
    )
    loaded = checkpoints.empty(lambda: cls(config, parsed, known), checkpoints.parse_dtype(dtype))
    fresh = {key for key in loaded.state_dict() if key.startswith(HEADS)}
    checkpoints.fill(loaded, published_targets(files), files, shapes, fresh, path, f"{cls.family} model")
    return loaded


def _executed(config: GR00TConfig) -> dict[str, Any]:
    """The preset's default where it fits the model's horizon, else the horizon."""
    default = PRESETS["gr00t-n1.5"].policy["executed"]
    return {"executed": min(default, config.action_head_cfg["action_horizon"])}


def published_config(path: Path, model: dict[str, Any] | None = None) -> GR00TConfig:
    """Sizes of a published checkpoint: ``model``, then what its ``config.json`` states, then the weights' shapes.

    Raises:
        CheckpointError: it is damaged, or of another architecture.
    """
    data = read_config(path)
    kind = data.get("model_type") or data.get("type")
    if kind not in _KINDS:
        raise CheckpointError(f"{path / CONFIG} describes a {kind!r} model, expected {' or '.join(map(repr, _KINDS))}")
    _, shapes = weight_shapes(path)
    named = {key.removeprefix("gr00t."): shapes[name] for name, key in published_targets(shapes).items()}
    stated = {key: data[key] for key in _SECTIONS if isinstance(data.get(key), dict)}
    try:
        config = GR00TConfig(**sizes_from_shapes(named, {**stated, **(model or {})}))
        config.check()
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no GR00T N1.5 model: {error}") from None
    return config


def record_of(
    family: str,
    path: Path,
    *,
    processing: Processing | str | Path | None = None,
    tokenizer: Tokenizer | str | Path | None = None,
    model: dict[str, Any] | None = None,
    record: dict[str, Any] | None = None,
    **_: Any,
) -> GR00TProcessing:
    """The record that ``from_checkpoint`` with the same options uses, without the network."""
    size = published_config(path, model).eagle_config["vision_config"]["image_size"]
    return read_record(path, processing, tokenizer, image_size=(size, size), **(record or {}))


def config_dict(config: GR00TConfig) -> dict[str, Any]:
    return {**{key: getattr(config, key) for key in _SECTIONS}, "initializer_range": config.initializer_range}


def read_record(
    path: Path,
    given: Processing | str | Path | None,
    tokenizer: Tokenizer | str | Path | None,
    **shipped: Any,
) -> GR00TProcessing:
    """The record given, or the checkpoint's own; the tokenizer given, or the record's, or the checkpoint's."""
    if isinstance(given, Processing):
        record = GR00TProcessing.of(given)
    elif given is not None or (path / FILE).is_file() or not shipped:
        record = GR00TProcessing.load(Path(given or path))
    else:
        record = shipped_record(path, **shipped)
    if tokenizer is not None:
        return record.with_tokenizer(_tokenizer(tokenizer))
    return record if record.prompts is not None else record.with_tokenizer(_tokenizer(path))


def _tokenizer(given: Tokenizer | str | Path) -> Tokenizer:
    return eagle_tokenizer(Path(given)) if isinstance(given, str | Path) else given
