"""Pieces of HTML that the report is put together from, and the reading of numbers out of metric rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any


def section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>"


def missing(text: str) -> str:
    return f'<p class="missing">{escape(text)}</p>'


def figure(title: str, note: str, svg: str) -> str:
    small = f"<small>{escape(note)}</small>" if note else ""
    return f"<figure><figcaption>{escape(title)}{small}</figcaption>{svg}</figure>"


def percent(value: float) -> str:
    return f"{100 * value:.1f}%" if math.isfinite(value) else "no episode"


def points(interval: tuple[float, float], sign: str = "") -> str:
    low, high = (f"{100 * bound:{sign}.1f}" for bound in interval)
    return f"{low} to {high}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1, total: bool = False) -> str:
    """Cells are HTML already. The first ``text_columns`` are text, the others numbers."""
    rows = list(rows)

    def line(cells: Sequence[str], tag: str, extra: str = "") -> str:
        marked = [f"<{tag}{'' if i < text_columns else ' class=n'}>{c}</{tag}>" for i, c in enumerate(cells)]
        return f"<tr{extra}>{''.join(marked)}</tr>"

    body = [line(r, "td", ' class="total"' if total and i == len(rows) - 1 else "") for i, r in enumerate(rows)]
    return f'<div class="scroll"><table><thead>{line(head, "th")}</thead><tbody>{"".join(body)}</tbody></table></div>'


def pairs(items: Mapping[str, Any]) -> str:
    lines = (f"<tr><td>{escape(str(k).replace('_', ' '))}</td><td>{show(v)}</td></tr>" for k, v in items.items())
    return f'<table class="pairs"><tbody>{"".join(lines)}</tbody></table>'


def show(value: Any) -> str:
    if isinstance(value, Mapping):
        return "<br>".join(f"{escape(str(k))}: {show(v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(show(v) for v in value)
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "not given"}[value]
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else escape(str(value))


def number(label: str, number: str, interval: str, direction: str = "") -> str:
    return (
        f'<div class="figure"><div class="label">{label}</div><div class="number {direction}">{escape(number)}</div>'
        f'<div class="range">{escape(interval)}</div></div>'
    )


def facts(items: Mapping[str, str]) -> str:
    cells = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in items.items())
    return f'<dl class="facts">{cells}</dl>' if items else ""


def numbers(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Values of ``key``, NaN where a row lacks it or has something else than a number (null is a non-finite one)."""
    values = (row.get(key) for row in rows)
    return [float(v) if isinstance(v, (int, float)) else math.nan for v in values]


def last(values: Sequence[float]) -> float | None:
    return next((v for v in reversed(values) if math.isfinite(v)), None)
