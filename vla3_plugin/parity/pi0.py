"""pi0 against golden vectors of lerobot's, from the published tensor names to environment actions.

The directory becomes a checkpoint as lerobot publishes it, read by ``from_checkpoint``. What the network's parts
receive (embeddings, masks, positions) is taken from the calls it makes, by hooks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vla3_plugin.contract import Observation
from vla3_plugin.parity.golden import Golden, GoldenError
from vla3_plugin.policies.pi0 import PI0Policy
from vla3_plugin.policies.pi0_paligemma import PaliGemmaPolicy
from vla3_plugin.policies.processing import Normalisation, Processing

NOT_COMPUTED = {
    "pre.image.*": "a missing camera gets no image and no tokens here, where the reference masks them",
    "pre.image_mask.*": "a missing camera gets no image and no tokens here, where the reference masks them",
}

P = TypeVar("P", bound=PaliGemmaPolicy)

_KINDS = {"IDENTITY": "identity", "MEAN_STD": "mean_std", "QUANTILES": "quantiles", "MIN_MAX": "bounds"}


def outputs(golden: Golden) -> dict[str, Tensor]:
    policy = load(golden, PI0Policy)
    return {**preprocessing(golden, policy), **network(golden, policy), **sampling(golden, policy)}


def masks(golden: Golden) -> dict[str, Tensor]:
    """Padded tokens and masked cameras have keys, values and hidden states of no meaning."""
    real = golden.outputs["prefix.pad_mask"]
    found = {}
    for name, tensor in golden.outputs.items():
        if name in ("prefix.last_hidden", "prefix.att_2d"):
            found[name] = real
        elif name.startswith("prefix.kv."):
            found[name] = real[:, None].expand(tensor.shape[:3])
        elif name.endswith("att_2d_full"):
            suffix = real.new_ones(len(real), tensor.shape[1] - real.shape[1])
            found[name] = torch.cat([real, suffix], dim=1)
    return found


# the policy


def load(golden: Golden, family: type[P], **record: Any) -> P:
    """The directory's weights behind ``family.from_checkpoint``, with lerobot's ``config.json`` beside them.

    ``record``: fields of the processing record. The sizes that lerobot keeps in its table of variants are those of the
    directory's network configs.
    """
    published = golden.config["policy_config"]
    vlm, expert = golden.config["paligemma_config_tiny"], golden.config["expert_config_tiny"]
    text, vision = vlm["text_config"], vlm["vision_config"]
    sizes = dict(
        vlm_config=dict(
            model_type="paligemma",
            text_config=text,
            vision_config=vision,
            projection_dim=text["hidden_size"],
            image_token_id=text["vocab_size"],
        ),
        dit_config=expert,
    )
    weights = golden.path / "weights.safetensors"
    if not weights.is_file():
        raise GoldenError(f"{weights}: no such file; {golden.family} needs the weights that the outputs were made with")
    with TemporaryDirectory() as folder:
        (Path(folder) / "model.safetensors").symlink_to(weights.resolve())
        (Path(folder) / "config.json").write_text(json.dumps({**published, "type": golden.family}))
        return family.from_checkpoint(
            folder,
            processing=processing(golden, **record),
            tokenizer=golden.path / "fake_tokenizer",
            model=sizes,
            executed=published["chunk_size"],
        ).eval()


def cameras(golden: Golden) -> dict[str, Tensor]:
    """The cameras that are there, in order, and their raw images uint8 [B, H, W, 3]; without images: missing."""
    raw = {int(name.rpartition(".")[2]): name for name in golden.inputs if name.startswith("pre.raw_image_u8.")}
    return {golden.config["cameras"][i]: golden.inputs[raw[i]] for i in sorted(raw)}


def processing(golden: Golden, **settings: Any) -> Processing:
    published, stats = golden.config["policy_config"], golden.config["dataset_stats"]

    def normalisation(what: str, feature: str) -> Normalisation:
        name = published["normalization_mapping"].get(what, "IDENTITY")
        kind = _KINDS.get(name)
        if kind is None:
            raise GoldenError(f"{golden.path}: normalization_mapping.{what} is {name!r}, known: {', '.join(_KINDS)}")
        keys = {"low": "min", "high": "max"}  # ours: lerobot's
        needed = {"identity": (), "mean_std": ("mean", "std"), "quantiles": ("q01", "q99"), "bounds": ("low", "high")}
        return Normalisation(kind, {key: stats[feature][keys.get(key, key)] for key in needed[kind]})

    return Processing(
        cameras=list(cameras(golden)),
        image_size=tuple(published["image_resolution"]),
        state_dim=golden.inputs["pre.raw_state"].shape[-1],
        action_dim=golden.inputs["pre.raw_action"].shape[-1],
        state=normalisation("STATE", "observation.state"),
        action=normalisation("ACTION", "action"),
        max_tokens=published["tokenizer_max_length"],
        **settings,
    )


def observations(golden: Golden) -> list[Observation]:
    images, state, tasks = cameras(golden), golden.inputs["pre.raw_state"], golden.config["tasks"]
    return [
        Observation({camera: image[i].numpy() for camera, image in images.items()}, state[i].numpy(), tasks[i])
        for i in range(len(state))
    ]


# what is computed


def preprocessing(golden: Golden, policy: PaliGemmaPolicy) -> dict[str, Tensor]:
    record = policy.processing
    prepared = policy.prepare(observations(golden))
    images, action = record.model_images(prepared["pixels"]), golden.inputs["pre.raw_action"]
    found = {
        "pre.tokens": prepared["input_ids"],
        "pre.token_mask": prepared["attention_mask"].bool(),
        "pre.normalized_state": record.state.forward(prepared["state"]),
        "pre.padded_state": record.model_state(prepared["state"], policy.config.max_state_dim),
        "pre.normalized_action": record.model_actions(action, record.action_dim),
        "pre.padded_action": record.model_actions(action, policy.config.max_action_dim),
    }
    for i in range(images.shape[1]):
        found[f"pre.image.{i}"] = images[:, i]
        found[f"pre.image_mask.{i}"] = torch.ones(len(images), dtype=torch.bool)  # what is in the stack is there
    return found


def network(golden: Golden, policy: PaliGemmaPolicy) -> dict[str, Tensor]:
    """Prefix, velocities, loss and noise-free chains from the model-level inputs, each camera masked by sample."""
    given = golden.inputs
    count = sum(name.startswith("image.") for name in given)
    images = torch.stack([given[f"image.{i}"] for i in range(count)], 1)
    camera_mask = torch.stack([given[f"image_mask.{i}"] for i in range(count)], 1)
    vlm, expert = policy.vlm.language_model, policy.expert
    with recorded(vlm, vlm.layers[0]) as calls:
        prefix = policy.encode_normalised(
            images, camera_mask, given["tokens"], given["token_mask"].long(), given["state"]
        )
    (whole,), (layer,) = calls
    length = prefix.mask.shape[1]
    attends = attention(layer, len(images), length, length)
    found = {
        "prefix.embs": whole["inputs_embeds"],
        "prefix.pad_mask": prefix.mask.bool(),
        "prefix.position_ids": whole["position_ids"],
        "prefix.last_hidden": prefix.hidden,
        "prefix.att_2d": attends,
    }
    for i, written in enumerate(prefix.cache.layers):
        found |= {f"prefix.kv.{i}.k": written.keys, f"prefix.kv.{i}.v": written.values}

    for case in cases(golden):
        x, time = given[f"v.{case}.x_t"], given[f"v.{case}.t"]
        with recorded(expert, expert.layers[0]) as calls:
            v = policy.velocity(prefix, x, time)
        (whole,), (layer,) = calls
        suffix = whole["inputs_embeds"].shape[1]
        seen = torch.zeros(len(x), length + suffix, length + suffix, dtype=torch.bool)
        seen[:, :length, :length] = attends  # the prefix never sees what is denoised
        seen[:, length:] = attention(layer, len(x), suffix, length + suffix)
        positions = [found["prefix.position_ids"], whole["position_ids"].expand(len(x), -1)]
        found |= {
            f"v.{case}.v": v,
            f"v.{case}.v_joint": v,  # sampling and training share one path
            f"v.{case}.suffix_embs": whole["inputs_embeds"],
            f"v.{case}.att_2d_full": seen,
            f"v.{case}.position_ids_full": torch.cat(positions, dim=1),
        }

    if "loss.time" in given:
        noise, target, time = given["noise"], given["actions_norm_padded"], given["loss.time"]
        t = time[:, None, None]
        v = policy.velocity(prefix, t * noise + (1 - t) * target, time)
        found["loss.per_element"] = (noise - target - v).square()

    for steps in step_counts(golden, r"ode\.K(\d+)\."):
        found |= chain(golden, policy, prefix, steps)
    return found


def chain(golden: Golden, policy: PaliGemmaPolicy, prefix: Any, steps: int) -> dict[str, Tensor]:
    """The noise-free chain of ``steps`` steps."""
    policy.policy.num_steps = steps
    states, velocities, times = [golden.inputs["noise"]], [], []
    for k in range(steps):
        x = states[-1]
        time = policy._time(k, len(x), x.device)
        velocities.append(policy.velocity(prefix, x, time))
        times.append(time[0])
        states.append(policy._transition(x, velocities[-1], k, False)[0])
    parts = {
        "x": torch.stack(states),
        "v": torch.stack(velocities),
        "t": torch.stack(times),
        "actions_final_padded": states[-1],
        "actions_unnormalized": policy.processing.env_actions(states[-1]),
    }
    return {f"ode.K{steps}.{name}": tensor for name, tensor in parts.items()}


def sampling(golden: Golden, policy: PaliGemmaPolicy) -> dict[str, Tensor]:
    """``act`` in evaluation from raw observations and the given noise; missing cameras are simply not there."""
    found = {}
    noise = golden.inputs["noise"]
    start = noise, torch.zeros(len(noise), 1, *noise.shape[1:]), torch.full((len(noise),), -1)
    for steps in step_counts(golden, r"policy\.predict_action_chunk_K(\d+)"):
        policy.policy.num_steps = steps
        policy._draw = lambda keys, mode: start  # type: ignore[method-assign]
        keys = [(0, i, 0) for i in range(len(noise))]
        actions = policy.act(policy.prepare(observations(golden)), keys, "eval").actions
        # The reference's are still normalised: the way back costs a rounding and hides nothing.
        found[f"policy.predict_action_chunk_K{steps}"] = policy.processing.action.forward(actions)
    return found


def cases(golden: Golden) -> list[str]:
    """Names of the sets of times and noisy chunks at which there are velocities."""
    return sorted({match[1] for name in golden.inputs if (match := re.fullmatch(r"v\.(\w+)\.x_t", name))})


def step_counts(golden: Golden, pattern: str) -> list[int]:
    """The K's in names of golden outputs."""
    return sorted({int(match[1]) for name in golden.outputs if (match := re.match(pattern, name))})


# what modules are called with


@contextmanager
def recorded(*modules: nn.Module) -> Iterator[list[list[dict[str, Any]]]]:
    """The keyword arguments of every call of each module meanwhile."""
    calls: list[list[dict[str, Any]]] = [[] for _ in modules]

    def keep(into: list[dict[str, Any]]) -> Callable[..., None]:
        return lambda module, args, kwargs: into.append(dict(kwargs))

    handles = [
        module.register_forward_pre_hook(keep(into), with_kwargs=True)
        for module, into in zip(modules, calls, strict=True)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def attention(call: dict[str, Any], batch: int, queries: int, keys: int) -> Tensor:
    """bool [B, queries, keys]: who sees whom, from the 4-D mask a layer was called with (none: everybody all)."""
    mask = call["attention_mask"]
    if mask is None:
        return torch.ones(batch, queries, keys, dtype=torch.bool)
    seen = mask if mask.dtype == torch.bool else mask == 0
    return seen[:, 0].expand(batch, queries, keys)
