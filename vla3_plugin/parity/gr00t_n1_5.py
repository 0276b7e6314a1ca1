"""GR00T N1.5: backbone, action head, ODE chains, normalisation and Eagle's pre-processing against golden vectors.

The reference lets padding into its attention, where ours masks it: padded batches (``pad.*``) are compared in the rows
that have no padding, and the backbone's features wherever a token is real.
"""

from __future__ import annotations

import ast
import json
import re
import string
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla3_plugin.contract import Observation
from vla3_plugin.parity.golden import Golden, GoldenError
from vla3_plugin.policies.checkpoints import CONFIG, WEIGHTS
from vla3_plugin.policies.gr00t import GR00TPolicy
from vla3_plugin.policies.gr00t_network import Prefix, expand_images
from vla3_plugin.policies.gr00t_processing import GR00TProcessing, MinMax
from vla3_plugin.policies.gr00t_prompts import IMAGE, SPECIAL, eagle_tokenizer
from vla3_plugin.policies.gr00t_sizes import EMBODIMENTS

NOT_COMPUTED: dict[str, str] = {
    "eagle_pre.mixed.input_ids": "the directory does not say which instructions these are",
    "eagle_pre.mixed.attention_mask": "the directory does not say which instructions these are",
}

_SECTIONS = ("action_head_cfg", "backbone_cfg", "eagle_config")
_RAW_IMAGE = re.compile(r"pre\.raw_image_(\w+)_u8")


def outputs(golden: Golden) -> dict[str, Tensor]:
    policy = _load(golden)
    given = golden.inputs
    computed = {"vit_embeds": policy.gr00t.backbone.image_features(given["pixel_values"])}
    computed |= _whole(golden, policy, "", given["input_ids"], given["attention_mask"])
    for kernel in ("eager", "sdpa"):
        if f"pad.{kernel}.backbone_features" in golden.outputs:
            computed |= _whole(golden, policy, f"pad.{kernel}.", given["pad.input_ids"], given["pad.attention_mask"])
    if "head_only.backbone_features" in given:
        features = given["head_only.backbone_features"]
        mask = torch.ones(features.shape[:2], dtype=torch.long)
        computed |= _head(golden, policy, "head_only.", features, mask)
    if "pre.raw_state" in given:
        computed |= _processed(golden, policy)
        computed["loss"] = _loss(golden, policy, computed)
    if "eagle_pre.raw_u8_BVCHW" in given:
        computed |= _eagle(golden)
    return computed


def masks(golden: Golden) -> dict[str, Tensor]:
    """Where a golden tensor has a meaning: see the module's text. Of the raw images, the cameras that are given."""
    found: dict[str, Tensor] = {}
    if "pad.attention_mask" in golden.inputs:
        real = golden.inputs["pad.attention_mask"].bool()
        whole = real.all(1)
        for name, tensor in golden.outputs.items():
            if not name.startswith("pad.") or name.endswith(("t_bucket", "state_features")):
                continue
            if name.endswith("backbone_features"):
                found[name] = real
            elif re.search(r"\.K\d+\.(x|v)$", name):
                found[name] = whole.expand(tensor.shape[0], -1)
            else:
                found[name] = whole
    if "pre.video_u8" in golden.outputs:
        batch, _, views = golden.outputs["pre.video_u8"].shape[:3]
        known = torch.tensor([f"pre.raw_image_{camera}_u8" in golden.inputs for camera in _cameras(golden, views)])
        found["pre.video_u8"] = known.expand(batch, 1, -1)
    return found


def _load(golden: Golden) -> GR00TPolicy:
    """The directory's weights through the loader for published checkpoints."""
    config = golden.config
    given = golden.inputs
    views = len(given["pixel_values"]) // len(given["input_ids"])
    size = config["eagle_config"]["vision_config"]["image_size"]
    state, action = (_statistics(config, name) for name in ("observation.state", "action"))
    tag = config.get("embodiment_tag_for_pre", "new_embodiment")
    record = GR00TProcessing(
        cameras=_cameras(golden, views), image_size=(size, size), state_dim=len(state.stats["min"]),
        action_dim=len(action.stats["min"]), state=state, action=action,
        embodiment=tag if tag in EMBODIMENTS else config["embodiment_mapping"][tag],
    )  # fmt: skip
    weights = golden.path / "weights.safetensors"
    if not weights.is_file():
        raise GoldenError(f"{weights}: no such file; {golden.family} needs the weights that the outputs were made with")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch)
        (path / CONFIG).write_text(
            json.dumps({"model_type": "gr00t_n1_5", **{key: config[key] for key in _SECTIONS if key in config}})
        )
        (path / WEIGHTS).symlink_to(weights.resolve())
        tokenizer = _placeholder_tokenizer(config["eagle_config"]["image_token_index"])
        return GR00TPolicy.from_checkpoint(path, processing=record, tokenizer=tokenizer).eval()


def _statistics(config: dict[str, Any], name: str) -> MinMax:
    return MinMax(stats={kind: config["dataset_stats"][name][kind] for kind in ("min", "max")})


def _cameras(golden: Golden, views: int) -> list[str]:
    """Names of the views in the order of the pipeline, which sorts them; those not given go by the first letters."""
    given = {match[1] for name in golden.inputs if (match := _RAW_IMAGE.fullmatch(name))}
    others = [letter for letter in string.ascii_lowercase if letter not in given]
    return sorted([*given, *others[: views - len(given)]])


def _placeholder_tokenizer(image_token: int) -> Any:
    """Token ids are inputs of these vectors, so any tokenizer does that puts images where the network has them."""
    from tokenizers import Tokenizer, models

    free = (i for i in range(len(SPECIAL)) if i != image_token)
    vocabulary = {token: image_token if token == IMAGE else next(free) for token in SPECIAL}
    return Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))


# the network


def _whole(golden: Golden, policy: GR00TPolicy, name: str, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    features = policy.gr00t.backbone(golden.inputs["pixel_values"], ids, mask)
    return {f"{name}backbone_features": features, **_head(golden, policy, name, features, mask)}


def _head(golden: Golden, policy: GR00TPolicy, name: str, features: Tensor, mask: Tensor) -> dict[str, Tensor]:
    given = golden.inputs
    prefix = policy.gr00t.prefix(features, mask, given["state"][:, 0], given["embodiment_id"])
    computed = {f"{name}vl_embs": prefix.hidden, f"{name}state_features": prefix.state_token}
    for key in given:
        if match := re.fullmatch(r"v\.(\w+)\.x_t", key):
            computed |= _velocity(policy, prefix, f"{name}v.{match[1]}.", given[key], given[f"v.{match[1]}.t_bucket"])
    for key in golden.outputs:
        if match := re.fullmatch(re.escape(name) + r"ode\.K(\d+)\.x", key):
            computed |= _chain(golden, policy, prefix, f"{name}ode.K{match[1]}.", int(match[1]))
    return computed


def _velocity(policy: GR00TPolicy, prefix: Prefix, name: str, x: Tensor, bucket: Tensor) -> dict[str, Tensor]:
    head = policy.gr00t.action_head
    tokens = head.tokens(prefix.state_token, x, bucket, prefix.category)
    everything = head.model(tokens, bucket, prefix.kept, prefix.mask.bool()[:, None, None])
    time = (bucket.double() + 0.5) / head.buckets  # the middle of the bucket
    return {
        f"{name}action_features": tokens[:, -x.shape[1] :],
        f"{name}dit_out": everything,
        f"{name}v": policy.velocity(prefix, x, time),
    }


def _chain(golden: Golden, policy: GR00TPolicy, prefix: Prefix, name: str, steps: int) -> dict[str, Tensor]:
    policy.policy.num_steps = steps
    x = golden.inputs["noise"]
    states, velocities, buckets = [x], [], []
    for k in range(steps):
        time = policy._time(k, len(x), x.device)
        buckets.append((time[0] * policy.gr00t.action_head.buckets).long())
        velocities.append(policy.velocity(prefix, x, time))
        x, _ = policy._transition(x, velocities[-1], k, False)
        states.append(x)
    return {
        f"{name}x": torch.stack(states),
        f"{name}v": torch.stack(velocities),
        f"{name}t_bucket": torch.stack(buckets),
        f"{name}actions_final_padded": x,
        f"{name}actions_unnormalized": policy.processing.env_actions(x),
    }


# processing


def _processed(golden: Golden, policy: GR00TPolicy) -> dict[str, Tensor]:
    given, record = golden.inputs, policy.processing
    raw = given["pre.raw_state"]
    images = {m[1]: tensor for name, tensor in given.items() if (m := _RAW_IMAGE.fullmatch(name))}
    blank = torch.zeros_like(next(iter(images.values())))
    seen = [
        Observation(
            {camera: images.get(camera, blank)[i].permute(1, 2, 0).numpy() for camera in record.cameras},
            raw[i].numpy(),
            "",
        )
        for i in range(len(raw))
    ]
    stacked = record.stack(seen)
    width = policy.config.action_head_cfg["max_state_dim"]
    state = record.model_state(stacked["state"], width)[:, None]
    action, action_mask = record.padded_actions(given["pre.raw_action"], policy.horizon, policy.width)
    return {
        "pre.state": state,
        "pre.state_mask": (torch.arange(width) < record.state_dim).expand(len(raw), 1, -1),
        "pre.action": action,
        "pre.action_mask": action_mask,
        "pre.embodiment_id": torch.full((len(raw),), record.embodiment_id),
        "pre.video_u8": stacked["pixels"].permute(0, 1, 4, 2, 3)[:, None],
    }


def _loss(golden: Golden, policy: GR00TPolicy, computed: dict[str, Tensor]) -> Tensor:
    given, action, mask = golden.inputs, computed["pre.action"], computed["pre.action_mask"]
    noise, time = given["noise"], given["loss.t"]
    prefix = policy.gr00t.prefix(
        computed["backbone_features"], given["attention_mask"], given["state"][:, 0], given["embodiment_id"]
    )
    share = time[:, None, None]
    v = policy.velocity(prefix, (1 - share) * noise + share * action, time)
    return ((v - (action - noise)).square() * mask).sum() / mask.sum()


def _eagle(golden: Golden) -> dict[str, Tensor]:
    """Prompts and pixels from raw images [B, V, 3, H, W] and the instructions that the directory's texts contain."""
    raw, about = golden.inputs["eagle_pre.raw_u8_BVCHW"], golden.json("eagle_pre.json")
    batch, views, _, height, width = raw.shape
    size = about["image_size"]
    pixels = raw.permute(0, 1, 3, 4, 2)
    found: dict[str, Tensor] = {}
    for key, text in about.items():
        if not (match := re.fullmatch(r"text_before_expansion\.(\w+)", key)):
            continue
        quoted = text.rsplit(">[", 1)[1].split("]<|im_end|>", 1)[0]
        task = ast.literal_eval(f"[{quoted}]")[0]
        state = MinMax(stats={"min": [0.0], "max": [1.0]})
        record = GR00TProcessing(
            cameras=_cameras(golden, views), image_size=(size, size), state_dim=1, action_dim=1, state=state,
            action=state, max_tokens=len(text),
        ).with_tokenizer(eagle_tokenizer(golden.path / "fake_tokenizer_eagle"))  # fmt: skip
        images = [{c: pixels[i, v].numpy() for v, c in enumerate(record.cameras)} for i in range(batch)]
        inputs = record.prepare([Observation(shown, torch.zeros(1).numpy(), task) for shown in images])
        token, each = about["special_tokens"][IMAGE], about["tokens_per_tile"]
        ids, mask = expand_images(inputs["input_ids"], inputs["attention_mask"], token, views, each)
        length = int(mask.sum(1).max())  # ours are padded further, on the right
        name = f"eagle_pre.{match[1]}.eagle_"
        found |= {
            f"{name}input_ids": ids[:, :length],
            f"{name}attention_mask": mask[:, :length],
            f"{name}pixel_values": record.model_images(inputs["pixels"]).flatten(0, 1),
            f"{name}image_sizes": torch.tensor([[height, width]] * batch * views),
        }
        found["eagle_pre.mixed.pixel_values"] = record.model_images(inputs["pixels"])[:, 0]
    return found
