"""The two pictures of a report as SVG text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from colorsys import hls_to_rgb
from dataclasses import dataclass
from html import escape

LEFT, TOP, BOTTOM = 60, 24, 70
HEIGHT = 240
STEP = 26
"""Width of one stage."""

SMALLEST = 1e-9
"""Errors below are drawn here: 0 has no place on a logarithmic axis."""

LARGEST = 10.0


@dataclass(frozen=True, slots=True)
class Series:
    """One line: a value for each stage; what is no number is left out."""

    name: str
    colour: str
    values: Sequence[float]
    dashed: bool = False


def log_plot(
    names: Sequence[str], series: Sequence[Series], marks: Sequence[bool], bound: float | None
) -> str:
    """Errors over stages on a logarithmic axis; ``marks`` puts a red band behind a stage."""
    width = LEFT + STEP * max(1, len(names)) + 130
    height = TOP + HEIGHT + BOTTOM
    parts = [_open(width, height, "relative error of hidden states by stage")]
    for i, marked in enumerate(marks):
        if marked:
            parts.append(
                f'<rect x="{LEFT + STEP * i}" y="{TOP}" width="{STEP}" height="{HEIGHT}" fill="#c62828" '
                'fill-opacity="0.18"/>'
            )
    for decade in range(round(math.log10(SMALLEST)), round(math.log10(LARGEST)) + 1):
        y = _y(10.0**decade)
        parts.append(
            f'<line x1="{LEFT}" x2="{width - 130}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{decade}</text>'
        )
    if bound is not None:
        y = _y(bound)
        parts.append(
            f'<line x1="{LEFT}" x2="{width - 130}" y1="{y:.1f}" y2="{y:.1f}" stroke="#c62828"/>'
            f'<text x="{width - 126}" y="{y + 4:.1f}">bound {bound:g}</text>'
        )
    for number, one in enumerate(series):
        parts += _line(one)
        y = TOP + 12 + 16 * number
        parts.append(
            f'<line x1="{width - 126}" x2="{width - 106}" y1="{y}" y2="{y}" stroke="{one.colour}" '
            f'stroke-width="2"{_dash(one)}/><text x="{width - 100}" y="{y + 4}">{escape(one.name)}</text>'
        )
    parts += _labels(names, STEP, TOP + HEIGHT + 12)
    return "".join(parts) + "</svg>"


def overlap_strip(title: str, names: Sequence[str], columns: Sequence[Sequence[float]]) -> str:
    """One column a stage, one cell a part of the sequence; green is the same, red is half or less."""
    cell = 6
    bins = max((len(column) for column in columns), default=0)
    width = LEFT + STEP * max(1, len(names)) + 130
    height = TOP + cell * bins + BOTTOM
    parts = [_open(width, height, f"top-k overlap: {title}")]
    parts.append(f'<text x="{LEFT}" y="14">{escape(title)}</text>')
    parts.append(f'<text x="{LEFT - 8}" y="{TOP + 10}" text-anchor="end">first</text>')
    parts.append(f'<text x="{LEFT - 8}" y="{TOP + cell * bins}" text-anchor="end">last</text>')
    for i, column in enumerate(columns):
        for j, value in enumerate(column):
            parts.append(
                f'<rect x="{LEFT + STEP * i}" y="{TOP + cell * j}" width="{STEP - 2}" height="{cell}" '
                f'fill="{_colour(value)}"><title>{escape(names[i])}: {value:.1%}</title></rect>'
            )
    parts += _labels(names, STEP, TOP + cell * bins + 12)
    return "".join(parts) + "</svg>"


def _open(width: int, height: int, label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{escape(label)}">'
    )


def _line(series: Series) -> list[str]:
    points = [
        (LEFT + STEP * (i + 0.5), _y(value)) for i, value in enumerate(series.values) if not math.isnan(value)
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    drawn = [
        f'<polyline points="{path}" fill="none" stroke="{series.colour}" stroke-width="2"{_dash(series)}/>'
    ]
    drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{series.colour}"/>' for x, y in points]
    return drawn


def _dash(series: Series) -> str:
    return ' stroke-dasharray="5 4"' if series.dashed else ""


def _labels(names: Sequence[str], step: int, y: int) -> list[str]:
    return [
        f'<text transform="translate({LEFT + step * (i + 0.5):.1f} {y}) rotate(60)">{escape(name)}</text>'
        for i, name in enumerate(names)
    ]


def _y(value: float) -> float:
    low, high = math.log10(SMALLEST), math.log10(LARGEST)
    place = math.log10(min(max(value, SMALLEST), LARGEST))
    return TOP + HEIGHT * (high - place) / (high - low)


def _colour(overlap: float) -> str:
    """From red (half or less) over yellow to green (all)."""
    hue = max(0.0, min(1.0, (overlap - 0.5) * 2)) / 3
    return "#" + "".join(f"{round(255 * part):02x}" for part in hls_to_rgb(hue, 0.42, 0.6))
