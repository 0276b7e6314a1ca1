"""Comparing what our code computes with a golden directory, tensor by tensor."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vla3_plugin.parity.golden import Golden, GoldenError, read_golden

# Absolute and relative: |ours - golden| <= absolute + relative * |golden|, as torch.testing.assert_close has it.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-10, 1e-10),  # elementary arithmetic only: sums of many terms belong to the networks, in float32
    torch.float32: (2e-5, 1e-4),
    torch.bfloat16: (1e-2, 1.6e-2),
    torch.float16: (1e-3, 1e-3),
}
_NOT_FAMILIES = ("golden", "report")


@dataclass
class Comparison:
    """One tensor. Differences are over the positions that have a meaning; None where shapes or kinds differ.

    ``max_relative``: largest |ours - golden| / |golden| where golden is not 0; it is large where golden is nearly 0,
    which the absolute tolerance allows for. ``note``: what is wrong, or empty.
    """

    name: str
    shape: list[int]
    dtype: str
    max_absolute: float | None
    max_relative: float | None
    absolute_tolerance: float
    relative_tolerance: float
    ok: bool
    note: str = ""


@dataclass
class Report:
    """A golden directory's comparisons, by name.

    ``not_computed``: golden outputs left out and why. ``missing``: those nobody computed or excused; each is a failure.
    """

    path: str
    family: str
    tensors: list[Comparison]
    not_computed: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        return [row.name for row in self.tensors if not row.ok] + self.missing

    @property
    def ok(self) -> bool:
        """Nothing compared is no agreement."""
        return bool(self.tensors) and not self.failed

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "failed": self.failed, **asdict(self)}


def families() -> list[str]:
    """The families whose golden directories can be checked."""
    import vla3_plugin.parity as package

    return sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.name not in _NOT_FAMILIES)


def check(path: str | Path) -> Report:
    """Run a golden directory through our code and compare.

    Raises:
        GoldenError: the directory is missing, damaged or of an unknown family.
        ValueError: our loader refuses its weights or its processing.
    """
    golden = read_golden(Path(path))
    module = _family(golden)
    with torch.no_grad():
        computed = module.outputs(golden.without_values())
    masks = module.masks(golden) if hasattr(module, "masks") else {}
    return compare(golden, computed, module.NOT_COMPUTED, masks)


def compare(
    golden: Golden, computed: dict[str, Tensor], excused: dict[str, str], masks: dict[str, Tensor] | None = None
) -> Report:
    """``excused``: ``fnmatch`` pattern of golden outputs that need not be computed, to the reason."""
    report = Report(str(golden.path), golden.family, [])
    for name, expected in sorted(golden.outputs.items()):
        if name in computed:
            report.tensors.append(_compare(name, computed[name], expected, (masks or {}).get(name)))
            continue
        reason = next((why for pattern, why in excused.items() if fnmatchcase(name, pattern)), None)
        if reason is None:
            report.missing.append(name)
        else:
            report.not_computed[name] = reason
    return report


def _family(golden: Golden) -> ModuleType:
    known = families()
    if golden.family not in known:
        near = difflib.get_close_matches(golden.family, known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        file = golden.path / "config.json"
        raise GoldenError(f"{file}: unknown family {golden.family!r}{hint}; known: {', '.join(known)}")
    return import_module(f"vla3_plugin.parity.{golden.family}")


def _compare(name: str, got: Tensor, expected: Tensor, mask: Tensor | None) -> Comparison:
    got = got.detach().cpu()
    exact = not (expected.is_floating_point() or got.is_floating_point())
    absolute, relative = (0.0, 0.0) if exact else _tolerance(got, expected)
    dtype = str(expected.dtype).removeprefix("torch.")
    row = Comparison(name, list(expected.shape), dtype, None, None, absolute, relative, ok=False)
    if got.is_floating_point() != expected.is_floating_point():
        row.note = f"ours is {got.dtype}, the golden tensor {expected.dtype}"
    elif got.shape != expected.shape:
        row.note = f"ours has shape {list(got.shape)}"
    elif mask is not None and mask.shape != expected.shape[: mask.dim()]:
        row.note = f"the mask has shape {list(mask.shape)}, not the tensor's leading dimensions"
    if row.note:
        return row
    if mask is not None:
        got, expected = got[mask], expected[mask]
    if not expected.numel():
        row.note = "no position left to compare"
        return row
    ours, theirs = got.to(torch.float64), expected.to(torch.float64)
    close = got == expected if exact else torch.isclose(ours, theirs, atol=absolute, rtol=relative)
    difference = torch.where(ours == theirs, 0.0, (ours - theirs).abs())  # equal infinities differ by nothing
    size = theirs.abs()
    row.max_absolute = float(difference.max())
    row.max_relative = float(torch.where(size > 0, difference / size, 0.0).max())
    row.ok = bool(close.all())
    if not row.ok:
        row.note = f"{int((~close).sum())} of {close.numel()} elements beyond it"
    return row


def _tolerance(got: Tensor, expected: Tensor) -> tuple[float, float]:
    """That of the coarser of the two dtypes."""
    return max(
        (TOLERANCES[tensor.dtype] for tensor in (got, expected) if tensor.dtype in TOLERANCES),
        default=TOLERANCES[torch.float32],
    )


def format_report(report: Report) -> str:
    """A table with a line a tensor, then one line that says how it stands."""
    rows = [("tensor", "shape", "max abs", "max rel", "tolerance", "")]
    for row in report.tensors:
        tolerance = f"{row.absolute_tolerance:.0e} + {row.relative_tolerance:.0e} rel" if not _exact(row) else "exact"
        verdict = "ok" if row.ok else f"FAILS: {row.note}"
        rows.append(
            (row.name, _size(row.shape), _figure(row.max_absolute), _figure(row.max_relative), tolerance, verdict)
        )
    rows += [(name, "", "", "", "", "FAILS: nothing computes it") for name in report.missing]
    rows += [(name, "", "", "", "", f"not computed: {why}") for name, why in report.not_computed.items()]
    return "\n".join([*_table(rows), summary(report)])


def summary(report: Report) -> str:
    """One line: how many tensors agree, which do not."""
    good = sum(row.ok for row in report.tensors)
    total = len(report.tensors) + len(report.missing)
    text = f"{report.path}: {report.family}: {good} of {total} tensors within tolerance"
    if report.not_computed:
        text += f", {len(report.not_computed)} not computed"
    failed = report.failed
    if not report.tensors:
        return f"{text}; FAILS: nothing was compared"
    if failed:
        more = f" and {len(failed) - 5} more" if len(failed) > 5 else ""
        return f"{text}; FAILS: {', '.join(failed[:5])}{more}"
    return text


def _exact(row: Comparison) -> bool:
    return row.absolute_tolerance == row.relative_tolerance == 0.0


def _size(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "0"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]).rstrip() for row in rows
    ]
