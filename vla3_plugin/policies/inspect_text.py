"""``vla3 policy inspect``'s answer as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vla3_plugin.placement.memory import GB


def format_inspection(found: dict[str, Any]) -> str:
    """``inspect_policy``'s answer as lines of a heading and its text."""
    counts, memory = found["parameters"], found["memory"]
    settings = ", ".join(f"{key} {value}" for key, value in found["settings"].items())
    lines = [("policy", f"{found['source']}: {found['family']}, {found['kind']}"), ("settings", settings)]
    for tower in found["towers"]:
        text = f"{tower['layers']} x {tower['layer']}, width {tower['width']}, {_count(tower['parameters'])}"
        lines.append((tower["name"], text))
    trained = f"{_count(counts['trainable'])} trained ({counts['trainable'] / max(counts['total'], 1):.1%})"
    lora = f", {_count(counts['lora'])} of them LoRA" if counts["lora"] else ""
    lines.append(("parameters", f"{_count(counts['total'])}, {trained}{lora}"))
    for name, part in counts["parts"].items():
        lines.append((f"  {name}", f"{_count(part['total'])}, {_count(part['trainable'])} trained"))
    if (file := found["file"]) is not None:
        kinds = ", ".join(f"{dtype} {_count(count)}" for dtype, count in file["parameters_by_dtype"].items())
        lines.append(("file", f"{file['tensors']} tensors, {file['bytes'] / GB:.2f} GB: {kinds}"))
    lines += [("keys", _keys_text(found["keys"]))] if found["keys"] else []
    lines += [*_record_lines(found)]
    for what, text in (("training", f"a GPU, of {memory['gpus']}"), ("rollout", "a replica")):
        parts = ", ".join(f"{name} {size / GB:.2f}" for name, size in memory[what]["parts"].items())
        size = memory[what]["bytes"] / GB
        lines.append((f"memory, {what}", f"{size:.2f} GB {text}, in {memory['dtype']}, without activations: {parts}"))
    lines += [("PROBLEM", problem) for problem in found["problems"]]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def _record_lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if (record := found["processing"]) is not None:
        shipped = f"statistics of {', '.join(record['unnorm_keys'])}" if record["unnorm_keys"] else ""
        if record["found"]:
            state, action = (f"{what} {record[what]['kind']} [{record[what]['dim']}]" for what in ("state", "action"))
            seen = f"cameras {', '.join(record['cameras'])} at {'x'.join(map(str, record['image_size']))}"
            text = f"{state}, {action}, gripper {record['gripper']}, {seen}, prompt {record['prompt']!r}"
            yield "normalisation", f"{text}; {shipped}".removesuffix("; ")
        else:
            yield "normalisation", f"none found; {shipped}".removesuffix("; ")
    if (tokenizer := found["tokenizer"]) is not None:
        text = (
            f"{tokenizer['tokens']} tokens, prompts of {tokenizer['max_tokens']}"
            if tokenizer["found"]
            else "none found"
        )
        yield "tokenizer", text


def _keys_text(keys: dict[str, Any]) -> str:
    words = {
        "missing": "missing", "unexpected": "unexpected", "other_shape": "of another shape",
        "fresh": "start anew (new heads)", "unread": "in the file and read by nobody",
    }  # fmt: skip
    parts = [f"{keys['matched']} matched"]
    for key, text in words.items():
        if names := keys[key]:
            some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            parts.append(f"{len(names)} {text}: {some}")
        elif key in ("missing", "unexpected"):
            parts.append(f"0 {text}")
    return "; ".join(parts)


def _count(parameters: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if parameters >= size:
            return f"{parameters / size:.2f} {unit}"
    return str(parameters)
