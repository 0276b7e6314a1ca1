"""What a checkpoint or preset is and what a run with it would take, from headers alone (``vla3 policy inspect``).

The policy is built on the meta device by the loader that a run uses, so what is said here is what a run would do. Of
the weights nothing but the files' headers is read; of a hub repository nothing but JSON files and headers is fetched.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from vla3_plugin.placement import memory
from vla3_plugin.policies import checkpoints
from vla3_plugin.policies.presets import PRESETS, Preset
from vla3_plugin.policies.processing import Normalisation, Processing
from vla3_plugin.policies.registry import checkpoint_path, load_policy

_ELSEWHERE = ("family", "parameters", "trainable", "cameras", "image_size")  # of ``describe``: told in another place


def inspect_policy(
    source: str | Path,
    *,
    gpus: int = 1,
    lora_rank: int = 0,
    dtype: str = "bfloat16",
    **options: Any,
) -> dict[str, Any]:
    """Everything that ``inspect_text.format_inspection`` prints, JSON-serialisable.

    ``source`` and ``options``: as for ``load_policy``. ``gpus``: learner ranks that share the training state.
    ``dtype``: of forward and backward. The estimate of memory leaves activations out (see ``_memory``).

    Raises:
        ValueError: there is no such checkpoint or preset, it is damaged, or it is not a policy.
    """
    if gpus < 1:
        raise ValueError(f"gpus is {gpus}, expected at least 1")
    with _directory(source) as path:
        policy, audits, lacking = _build(str(source) if path is None else path, path, options)
        found = {
            "source": str(source),
            "kind": _kind(path),
            "family": policy.family,
            "preset": getattr(policy, "preset", None),
            "settings": {key: value for key, value in policy.describe().items() if key not in _ELSEWHERE},
            "towers": towers(policy),
            "file": _file(path),
            "keys": _keys(path, audits),
            "processing": _processing(policy, path, lacking.get("processing")),
            "tokenizer": _tokenizer(policy, lacking.get("tokenizer")),
        }
    found["parameters"] = _parameters(policy, lora_rank)
    counts = found["parameters"]
    found["memory"] = _memory(counts["total"], counts["trainable"], gpus, dtype)
    found["problems"] = _problems(found, lacking)
    return found


# building


@contextmanager
def _directory(source: str | Path) -> Iterator[Path | None]:
    """The checkpoint's directory; a temporary one with headers alone for a hub repository; None for a preset."""
    name = str(source)
    if name in PRESETS and not Path(name).is_dir():
        yield None
    elif name.count("/") == 1 and not Path(name).exists() and not name.startswith((".", "/")):
        with TemporaryDirectory() as folder:
            fetch_headers(name, Path(folder))
            yield Path(folder)
    else:
        yield checkpoint_path(source)


def fetch_headers(name: str, folder: Path) -> None:
    """The JSON files of hub repository ``name``, and its safetensors as sparse files: headers, holes for weights."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        snapshot_download(name, allow_patterns=["*.json"], local_dir=folder)
        headers = HfApi().get_safetensors_metadata(name).files_metadata
    except Exception as error:  # the client has a dozen kinds of error, the user one question
        raise ValueError(
            f"{name!r} is not a directory here and its headers could not be fetched from the hub: "
            f"{type(error).__name__}: {error}"
        ) from error
    for file, metadata in headers.items():
        entries = {
            key: {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": list(info.data_offsets)}
            for key, info in metadata.tensors.items()
        }
        header = json.dumps({"__metadata__": metadata.metadata, **entries}).encode()
        end = max((info.data_offsets[1] for info in metadata.tensors.values()), default=0)
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        with open(folder / file, "wb") as out:
            out.write(struct.pack("<Q", len(header)) + header)
            out.truncate(8 + len(header) + end)


def _build(source: str | Path, path: Path | None, options: dict[str, Any]) -> tuple[Any, list[Any], dict[str, str]]:
    """The policy on the meta device, what was compared of its keys, and what is lacking that a run needs, and why.

    Sizes and keys can be told without normalisation statistics and tokenizer: a stand-in takes the place of what
    neither the checkpoint nor ``options`` give. What is given is used, and its fault is told.
    """
    preset = PRESETS.get(str(source)) if path is None else None
    attempts: list[tuple[str, ...]] = [(), ("tokenizer",), ("processing",), ("processing", "tokenizer")]
    if preset is not None and preset.needs_processing and "processing" not in options:
        attempts = [("processing",), ("processing", "tokenizer")]
    failures: dict[tuple[str, ...], Exception] = {}
    for without in attempts:
        if any(key in options for key in without):
            continue
        try:
            stand_ins = {key: _STAND_INS[key](path, preset) for key in without}
            with torch.device("meta"), checkpoints.audited() as audits:
                policy: Any = load_policy(source, **options, **stand_ins)
        except (ValueError, OSError) as error:
            failures[without] = error
            continue
        why = {key: str(failures.get(() if key == "processing" else without[:-1], "")) for key in without}
        if preset is not None:
            why["processing"] = "a preset has none: the environment and its demonstrations bring it"
        return policy, audits, {key: why[key] for key in without}
    first, last = next(iter(failures.values())), list(failures.values())[-1]
    raise ValueError(str(first if preset is None else last)) from first


def _stand_in_processing(path: Path | None, preset: Preset | None) -> Processing:
    config = preset.model if path is None and preset is not None else checkpoints.read_config(path or Path())
    kind = config.get("family") or config.get("model_type") or config.get("type")
    like = preset or next((known for known in PRESETS.values() if known.family == kind), None)
    sizes = [_nested(config, key) for key in ("image_resolution", "image_size", "image_sizes")]
    size: Any = next((size for size in sizes if size is not None), like.image_size if like else 224)
    return Processing(
        cameras=["camera"],
        image_size=(size, size) if isinstance(size, int) else (size[0], size[-1]),
        state_dim=1,
        action_dim=1,
        state=Normalisation("identity"),
        action=Normalisation("identity"),
        prompt=like.prompt if like else "{task}",
    )


def _stand_in_tokenizer(path: Path | None, preset: Preset | None) -> Any:
    """Special tokens of every family and nothing else; the image's at the id that the model expects."""
    from tokenizers import Tokenizer, models

    config = preset.model if path is None and preset is not None else checkpoints.read_config(path or Path())
    image = _nested(config, "image_token_index") or _nested(PRESETS["gr00t-n1.5"].model, "image_token_index")
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "\n", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<img>", "</img>"]
    vocabulary = {word: i for i, word in enumerate(words)}
    return Tokenizer(models.WordLevel({**vocabulary, "<IMG_CONTEXT>": image}, unk_token="<unk>"))


_STAND_INS = {"processing": _stand_in_processing, "tokenizer": _stand_in_tokenizer}


def _nested(data: Any, key: str) -> Any:
    """The first value of ``key`` in an object or in the objects inside it; outer ones first."""
    if not isinstance(data, dict):
        return None
    if data.get(key) is not None:
        return data[key]
    return next((found for value in data.values() if (found := _nested(value, key)) is not None), None)


# what is found


def _kind(path: Path | None) -> str:
    if path is None:
        return "preset: fresh weights"
    return "saved by vla3" if checkpoints.read_config(path).get("family") else "published checkpoint"


def _file(path: Path | None) -> dict[str, Any] | None:
    """Tensors, bytes and parameters by dtype, as the headers have them."""
    if path is None:
        return None
    from safetensors import safe_open

    by_dtype: Counter[str] = Counter()
    files, shapes = checkpoints.weight_shapes(path)
    for file in sorted(set(files.values())):
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():
                by_dtype[reader.get_slice(name).get_dtype()] += torch.Size(shapes[name]).numel()
    size = sum(file.stat().st_size for file in set(files.values()))
    return {"tensors": len(files), "bytes": size, "parameters_by_dtype": dict(by_dtype)}


def _keys(path: Path | None, audits: list[Any]) -> dict[str, Any] | None:
    """Names as in the file, except for ``missing`` and ``fresh`` (heads that start anew), which are the policy's."""
    if path is None or not audits:
        return None
    (audit,) = audits
    shapes = {key: tuple(tensor.shape) for key, tensor in audit.wanted.items()}
    known = {name: key for name, key in audit.targets.items() if key in shapes}
    other = sorted(name for name, key in known.items() if audit.shapes[name] != shapes[key])
    absent = set(shapes) - set(audit.targets.values())
    return {
        "matched": len(known) - len(other),
        "missing": sorted(absent - audit.may_miss),
        "unexpected": sorted(set(audit.targets) - set(known)),
        "other_shape": [f"{name} {list(audit.shapes[name])} instead of {list(shapes[known[name]])}" for name in other],
        "fresh": sorted(absent & audit.may_miss),
        "unread": sorted(set(audit.shapes) - set(audit.targets)),
    }


def _processing(policy: Any, path: Path | None, lacking: str | None) -> dict[str, Any] | None:
    record = getattr(policy, "processing", None)
    if record is None:
        return None
    if lacking is not None:
        return {"found": False, "unnorm_keys": _unnorm_keys(path)}
    return {
        "found": True,
        "state": {"kind": record.state.kind, "dim": record.state_dim},
        "action": {"kind": record.action.kind, "dim": record.action_dim},
        "cameras": record.cameras,
        "image_size": list(record.image_size),
        "gripper": record.gripper + (", binary" if record.gripper_binary else ""),
        "prompt": record.prompt,
        "unnorm_keys": _unnorm_keys(path),
    }


def _unnorm_keys(path: Path | None) -> list[str]:
    """Data sets whose action statistics an OpenVLA checkpoint ships."""
    if path is None:
        return []
    stats: Any = checkpoints.read_config(path).get("norm_stats")
    shipped = path / "dataset_statistics.json"
    if not stats and shipped.is_file():
        stats = json.loads(shipped.read_text())
    return sorted(stats) if isinstance(stats, dict) else []


def _tokenizer(policy: Any, lacking: str | None) -> dict[str, Any] | None:
    prompts = getattr(getattr(policy, "processing", None), "prompts", None)
    if prompts is None or lacking is not None:
        return None if prompts is None else {"found": False}
    return {"found": True, "tokens": prompts.tokenizer.get_vocab_size(), "max_tokens": prompts.max_tokens}


def towers(policy: nn.Module) -> list[dict[str, Any]]:
    """Stacks of alike layers: where they are, how many, how wide (the first linear map's inputs), parameters."""
    found = []
    for name, stack in policy.named_modules():
        if not isinstance(stack, nn.ModuleList) or len({type(layer) for layer in stack}) != 1:
            continue
        linear = next((part for part in stack[0].modules() if isinstance(part, nn.Linear)), None)
        if linear is None:
            continue
        found.append(
            {
                "name": name,
                "layer": type(stack[0]).__name__,
                "layers": len(stack),
                "width": linear.in_features,
                "parameters": sum(parameter.numel() for parameter in stack.parameters()),
            }
        )
    return found


def _parameters(policy: Any, lora_rank: int) -> dict[str, Any]:
    """Counts, and what is trained in each part of the network."""
    names = _parts(policy)
    total = sum(parameter.numel() for parameter in policy.parameters())
    trained = policy
    if lora_rank:
        trained = _with_lora(policy, lora_rank)
    parts: dict[str, dict[str, int]] = {}
    lora = trainable = 0
    for name, parameter in trained.named_parameters():
        plain = name.removeprefix("base_model.model.")
        part = parts.setdefault(max((n for n in names if plain.startswith(f"{n}.")), key=len, default="other"),
                                {"total": 0, "trainable": 0})  # fmt: skip
        size = parameter.numel()
        lora += size * ("lora_" in name)
        trainable += size * parameter.requires_grad
        part["trainable"] += size * parameter.requires_grad
        copied = ".modules_to_save." in name  # peft trains a copy of what it was told to save
        part["total"] += size * (not copied)
    return {"total": total, "trainable": trainable, "lora": lora, "parts": parts}


def _parts(module: nn.Module, prefix: str = "", whole: int | None = None) -> list[str]:
    """Names of the network's parts: each child, and in place of a large one without layers of its own, its children."""
    found = []
    for name, child in module.named_children():
        path, size = f"{prefix}{name}", sum(parameter.numel() for parameter in child.parameters())
        whole = whole or sum(parameter.numel() for parameter in module.parameters())
        stacked = any(isinstance(part, nn.ModuleList) for part in child.children())
        leaf = not list(child.children())
        if size:
            found += [path] if stacked or leaf or size < whole / 10 else _parts(child, f"{path}.", whole)
    return found


def _with_lora(policy: Any, rank: int) -> nn.Module:
    """As the learner wraps it."""
    from peft import LoraConfig, get_peft_model

    targets = getattr(policy, "lora_targets", None)
    if targets is None:
        raise ValueError(f"lora_rank is {rank}: {policy.family} has no layers to adapt")
    whole = getattr(policy, "lora_whole", ["value_head"])
    with torch.device("meta"):
        return get_peft_model(policy, LoraConfig(r=rank, target_modules=targets, modules_to_save=whole))


def _memory(total: int, trainable: int, gpus: int, dtype: str) -> dict[str, Any]:
    """Bytes a GPU for the learner (state sharded over ``gpus``) and for one policy replica.

    Activations are not in it: they follow from sequence lengths, which the environment's cameras and prompts decide.
    """
    estimate = memory.estimate(
        parameters=max(total, trainable), trainable=trainable, dtype=dtype, actor_workers=gpus, device="cuda"
    )
    parts = {name: part for name, part in estimate["parts"].items() if part["where"] == "device" and part["bytes"]}
    rollout = {name: part["bytes"] for name, part in parts.items() if name.startswith("policy ")}
    training = {name: part["bytes"] // gpus for name, part in parts.items() if name not in rollout}
    return {
        "gpus": gpus,
        "dtype": dtype,
        "training": {"bytes": sum(training.values()), "parts": training},
        "rollout": {"bytes": sum(rollout.values()), "parts": rollout},
    }


def _problems(found: dict[str, Any], lacking: dict[str, str]) -> list[str]:
    """Why a run could not start from this as it is; a preset needs what it lacks from elsewhere anyway."""
    keys = found["keys"] or {}
    kinds = {"missing": "missing", "unexpected": "unexpected", "other_shape": "of another shape"}
    wrong = [f"{len(keys[key])} keys {words}" for key, words in kinds.items() if keys.get(key)]
    return wrong + ([] if found["file"] is None else [f"no {key}: {why}" for key, why in lacking.items()])
