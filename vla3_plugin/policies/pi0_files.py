"""pi0 on disk: building a preset, our own checkpoint directories, and published checkpoints.

A directory of ours holds ``config.json`` (family, preset, network and policy settings), ``model.safetensors``,
``processing.json`` and ``tokenizer.json``. Weights are safetensors only: a pickle can run code when it is opened.
"""

from __future__ import annotations

import copy
import difflib
import json
import logging
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vla3_plugin.policies.hub import download
from vla3_plugin.policies.presets import PRESETS
from vla3_plugin.policies.processing import Processing
from vla3_plugin.policies.prompts import load_tokenizer, word_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from vla3_plugin.policies.pi0 import PI0Policy

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FORMAT = 1
VALUE_HEAD = "value_head."

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
_UNUSED = ("model.dit.embed_tokens.weight",)  # the expert reads no tokens; checkpoints carry the table all the same


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete, of another architecture, or in a format that is not read."""


def transformers_key(name: str) -> str:
    """The name in ``PI0ForConditionalGeneration`` of a published checkpoint's tensor."""
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


# building


def build(
    cls: type[PI0Policy],
    preset: str,
    processing: Processing,
    *,
    tokenizer: Tokenizer | str | Path | None = None,
    model: dict[str, Any] | None = None,
    seed: int = 0,
    **settings: Any,
) -> PI0Policy:
    """Fresh weights, the same for the same ``seed``. ``model`` and ``settings`` override the preset's."""
    from transformers import PI0Config

    chosen = PRESETS[preset]
    config = PI0Config(**{**copy.deepcopy(chosen.model), **(model or {})})
    if tokenizer is not None:
        processing = _readable(processing, tokenizer)
    elif processing.prompts is None:
        if not chosen.words:
            raise ValueError(f"preset {preset!r} brings no tokenizer: give the one of google/paligemma-3b-pt-224")
        processing = processing.with_tokenizer(word_tokenizer(chosen.words))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built = _construct(cls, config, {**chosen.policy, **settings}, processing)
        if chosen.sincos_positions:
            positions = built.pi0.model.vlm.vision_tower.embeddings.position_embedding.weight
            positions.data.copy_(sincos_positions(*positions.shape))
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


def _readable(processing: Processing, tokenizer: Tokenizer | str | Path) -> Processing:
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(Path(tokenizer))
    return processing.with_tokenizer(tokenizer)


def _construct(cls: type[PI0Policy], config: Any, settings: dict[str, Any], processing: Processing) -> PI0Policy:
    from vla3_plugin.policies.pi0_config import PI0PolicyConfig

    known = {field.name for field in fields(PI0PolicyConfig)}
    unknown = sorted(set(settings) - known)
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"{unknown[0]!r} is not a setting of pi0{hint}; known: {', '.join(sorted(known))}")
    if processing.prompts is None:
        raise ValueError("no tokenizer.json beside the checkpoint; give `tokenizer`, the one it was trained with")
    tokens = processing.prompts.tokenizer.get_vocab_size()
    vocabulary = config.vlm_config.text_config.vocab_size
    if tokens > vocabulary:
        raise ValueError(
            f"the tokenizer has {tokens} tokens, the model's embedding {vocabulary}: not made for each other"
        )
    return cls(config, PI0PolicyConfig(**settings), processing)


def _processing(
    given: Processing | str | Path | None, tokenizer: Tokenizer | str | Path | None, path: Path
) -> Processing:
    record = given if isinstance(given, Processing) else Processing.load(Path(given or path))
    if tokenizer is not None:
        return _readable(record, tokenizer)
    return record if record.prompts is not None else _readable(record, path)


def _dtype(name: str | torch.dtype) -> torch.dtype:
    known = {"float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
             "float64": torch.float64}  # fmt: skip
    if isinstance(name, torch.dtype):
        return name
    if name not in known:
        raise ValueError(f"dtype is {name!r}, expected one of {', '.join(known)}")
    return known[name]


# our own directories


def save(policy: PI0Policy, path: Path, state: dict[str, Tensor] | None, dtype: torch.dtype | None) -> None:
    path.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, tensor in (policy.state_dict() if state is None else state).items():
        tensor = tensor.detach().cpu()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        tensors[name] = tensor.contiguous()
    config = {
        "format": FORMAT,
        "family": policy.family,
        "preset": policy.preset,
        "policy": asdict(policy.policy),
        "model": policy.config.to_dict(),
    }
    (path / CONFIG).write_text(json.dumps(config, indent=1, default=str) + "\n")
    policy.processing.save(path)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})


def load(
    cls: type[PI0Policy],
    path: Path,
    *,
    processing: Processing | str | Path | None = None,
    tokenizer: Tokenizer | str | Path | None = None,
    dtype: str | torch.dtype = torch.float32,
    **settings: Any,
) -> PI0Policy:
    """``settings`` override the stored ones. One that changes the value head's shape starts a new head, and says so."""
    from transformers import PI0Config

    data = read_config(path)
    if data.get("family") != cls.family or data.get("format") != FORMAT:
        found = f"family {data.get('family')!r}, format {data.get('format')!r}"
        raise CheckpointError(f"{path / CONFIG}: {found}; expected {cls.family!r}, {FORMAT}")
    merged = {**data["policy"], **settings}
    record = _processing(processing, tokenizer, path)
    loaded = _empty(cls, PI0Config(**data["model"]), merged, record, _dtype(dtype))
    loaded.preset = data.get("preset")
    files, shapes = weight_shapes(path)
    head = {key: tuple(value.shape) for key, value in loaded.state_dict().items() if key.startswith(VALUE_HEAD)}
    fresh = merged != data["policy"] and any(shapes.get(key) != shape for key, shape in head.items())
    if fresh:
        logger.warning("the value head of %s does not fit the overridden settings: it starts anew", path)
        files = {key: file for key, file in files.items() if not key.startswith(VALUE_HEAD)}
    _fill(loaded, {key: key for key in files}, files, shapes, set(head) if fresh else set(), path)
    return loaded


def _empty(
    cls: type[PI0Policy], config: Any, settings: dict[str, Any], processing: Processing, dtype: torch.dtype
) -> PI0Policy:
    """The module in ``dtype``, its backbone's weights allocated and not drawn; the value head is drawn."""
    from transformers.initialization import no_init_weights

    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]), no_init_weights():
            torch.manual_seed(0)
            return _construct(cls, config, settings, processing)
    finally:
        torch.set_default_dtype(default)


# published checkpoints


def from_checkpoint(
    cls: type[PI0Policy],
    source: str | Path,
    *,
    processing: Processing | str | Path | None = None,
    tokenizer: Tokenizer | str | Path | None = None,
    model: dict[str, Any] | None = None,
    dtype: str | torch.dtype = torch.float32,
    **settings: Any,
) -> PI0Policy:
    """Weights in transformers', lerobot's or openpi's PyTorch layout, from a directory or a hub id.

    ``processing`` (record or file) is needed where the directory has no ``processing.json``: published weights do not
    know the environment's cameras and statistics. ``tokenizer``: PaliGemma's, where the directory has none. ``model``
    overrides sizes. The value head starts anew.
    """
    from transformers import PI0Config

    path = Path(source) if Path(source).is_dir() else download(str(source))
    config = PI0Config(**{**_published_sizes(path), **(model or {})})
    record = _processing(processing, tokenizer, path)
    loaded = _empty(cls, config, {**PRESETS["pi0"].policy, **settings}, record, _dtype(dtype))
    files, shapes = weight_shapes(path)
    targets = {name: "pi0." + transformers_key(name) for name in files}
    tied = "pi0.model.vlm.language_model.embed_tokens.weight"
    if len(twice := [name for name, key in targets.items() if key == tied]) > 1:
        for name in twice:
            if "lm_head" in name:  # both hold the token embedding; fine-tuning trains the other one
                del targets[name]
    fresh_head = {key for key in loaded.state_dict() if key.startswith(VALUE_HEAD)}
    _fill(loaded, targets, files, shapes, fresh_head, path)
    return loaded


def _published_sizes(path: Path) -> dict[str, Any]:
    """Sizes for ``PI0Config`` from transformers' or lerobot's ``config.json``."""
    data = read_config(path)
    kind = data.get("model_type") or data.get("type")
    if kind != "pi0":
        raise CheckpointError(f"{path / CONFIG} describes a {kind!r} model, expected 'pi0'")
    if "vlm_config" in data:
        return data
    sizes = copy.deepcopy(PRESETS["pi0"].model)
    for key in ("chunk_size", "max_state_dim", "max_action_dim", "min_period", "max_period"):
        if key in data:
            sizes[key] = data[key]
    return sizes


# reading


def read_config(path: Path) -> dict[str, Any]:
    file = path / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist: {path} is not a checkpoint directory")
    try:
        data = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} is damaged: expected an object, got {type(data).__name__}")
    return data


def _weight_files(path: Path) -> list[Path]:
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    if (path / INDEX).is_file():
        files = sorted({path / name for name in json.loads((path / INDEX).read_text())["weight_map"].values()})
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise CheckpointError(f"{path / INDEX} names {', '.join(absent)}, which do not exist")
        return files
    pickles = [file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl") for file in path.glob(pattern)]
    if pickles:
        raise CheckpointError(
            f"{path} holds {', '.join(sorted(pickles))} and no {WEIGHTS}: pickles can run code when opened and are not "
            "read; convert them to safetensors"
        )
    raise CheckpointError(f"{path} holds no {WEIGHTS}")


def weight_shapes(path: Path) -> tuple[dict[str, Path], dict[str, tuple[int, ...]]]:
    """Name to file and name to shape, from the files' headers. A truncated file is found here."""
    names: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(path):
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():
                    names[name] = file
                    shapes[name] = tuple(reader.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged or cut short ({file.stat().st_size} bytes): {error}") from None
    return names, shapes


def _fill(
    policy: PI0Policy,
    targets: dict[str, str],
    files: dict[str, Path],
    shapes: dict[str, tuple[int, ...]],
    may_miss: set[str],
    path: Path,
) -> None:
    """Copy every tensor into ``policy``, or say which are missing, unexpected or of another shape."""
    wanted = policy.state_dict()
    targets = {name: key for name, key in targets.items() if key.removeprefix("pi0.") not in _UNUSED}
    problems = _mismatch(wanted, targets, shapes, may_miss)
    if problems:
        raise CheckpointError(f"{path} does not hold this {policy.family} model: {'; '.join(problems)}")
    if any(tensor.is_meta for tensor in wanted.values()):
        return  # asked for sizes and checks only
    for name, tensor in _tensors(files, set(targets)):
        wanted[targets[name]].copy_(tensor)


def _mismatch(
    wanted: dict[str, Tensor], targets: dict[str, str], shapes: dict[str, tuple[int, ...]], may_miss: set[str]
) -> list[str]:
    def some(keys: list[str]) -> str:
        return ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")

    missing = sorted(set(wanted) - set(targets.values()) - may_miss)
    unexpected = sorted(name for name, key in targets.items() if key not in wanted)
    other = sorted(
        f"{name} {list(shapes[name])} instead of {list(wanted[key].shape)}"
        for name, key in targets.items()
        if key in wanted and shapes[name] != tuple(wanted[key].shape)
    )
    lists = (("missing", missing), ("unexpected", unexpected), ("of another shape", other))
    return [f"{len(keys)} {kind}: {some(keys)}" for kind, keys in lists if keys]


def _tensors(files: dict[str, Path], names: set[str]) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(set(files.values())):
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():
                if name in names:
                    yield name, reader.get_tensor(name)
