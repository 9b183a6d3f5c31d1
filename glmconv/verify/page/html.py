"""One self-contained page of a verification: no scripts, no external resources, pictures as inline SVG."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape

from glmconv.verify.measure.report import PlaceReport, Predictions, VerifyReport
from glmconv.verify.page.svg import Series, log_plot, overlap_strip

STYLE = """
:root { color-scheme: light dark; --line: #8884; --red: #c62828; --green: #2e7d32; --amber: #b26a00; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
.verdict { padding: .8rem 1rem; border-radius: .4rem; color: #fff; font-size: 1.1rem; }
.verified { background: var(--green); } .failed { background: var(--red); }
.unproven { background: var(--amber); } .bad { color: var(--red); font-weight: 600; }
.red { border-left: .3rem solid var(--red); padding-left: .7rem; }
.scroll { overflow-x: auto; } svg text { fill: currentColor; font: 11px sans-serif; }
code { font-size: .9em; } details { margin-top: 1rem; }
"""


def page(report: VerifyReport) -> str:
    """The whole document."""
    title = f"{report.verdict}: {report.model_type}, Hugging Face and Megatron"
    body = "\n".join(_sections(report))
    data = escape(json.dumps(report.to_json(), indent=1), quote=False)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>\n"
        f"<h1>{escape(report.model_type)}: Hugging Face and Megatron, both run</h1>\n{body}\n"
        f"<details><summary>All figures as JSON</summary><pre>{data}</pre></details>\n</body></html>\n"
    )


def _sections(report: VerifyReport) -> Iterable[str]:
    yield f'<p class="verdict {report.verdict}"><b>{report.verdict}</b>: {escape(report.reason)}</p>'
    for warning in report.warnings:
        yield f'<p class="red">{escape(warning)}</p>'
    runtime = runtime_line(report)
    if runtime:
        yield f'<p class="red bad">{escape(runtime)}</p>'
    yield _table(("", ""), facts(report).items())
    if report.predictions:
        yield "<h2>Predictions</h2>" + _predictions(report.predictions)
    yield "<h2>Error of hidden states, layer by layer</h2>"
    yield (
        "<p>Relative error of the worst token. <b>Same input</b>: both layers ran on the hidden states of "
        "the Hugging Face model, so the error is made there. <b>Running</b>: each model ran on its own.</p>"
    )
    yield f'<div class="scroll">{_errors(report)}</div>'
    indexed = [place for place in report.places if place.selection is not None]
    if indexed:
        yield "<h2>Top-k overlap of the indexers</h2>"
        yield "<p>Top to bottom: positions in the sequence. Green: both select the same tokens.</p>"
        yield f'<div class="scroll">{_strips(indexed)}</div>'
    yield "<h2>Stages</h2>" + _places(report.places)
    yield "<h2>Aligned between the runtimes</h2>" + _list(report.alignments or ["nothing had to be aligned"])
    yield "<h2>Versions</h2>" + _table(("", ""), report.versions.items())


def facts(report: VerifyReport) -> dict[str, str]:
    """What was run, in words: names and values."""
    relaid = f", laid out anew as {report.runtime_dialect}" if report.relaid else ""
    start, stop = report.layers
    told = {
        "Hugging Face": str(report.hf),
        "Megatron": f"{report.megatron} ({report.dialect}{relaid})",
        "tokens": f"{report.batch} × {report.seq_len}",
        "top-k": str(report.index_topk) if report.index_topk else "",
        "layers": f"{start} to {stop - 1} of {report.num_layers}",
        "precision": report.precision,
        "device": report.device,
        "bounds": _bounds(report),
        "time": f"{report.seconds:.1f} s",
        "memory beyond imports": f"{report.peak_memory / 1e6:,.0f} MB",
        "GPU memory": f"{report.peak_gpu_memory / 1e9:,.2f} GB" if report.peak_gpu_memory else "",
    }
    return {name: value for name, value in told.items() if value}


def _bounds(report: VerifyReport) -> str:
    bounds = report.bounds
    text = (
        f"p99 |Δ logprob| ≤ {bounds.logprob_p99:g}, argmax ≥ {bounds.argmax:.1%}, error of a layer ≤ "
        f"{bounds.hidden:g}, indexer correlation ≥ {bounds.pearson:g}, same choices up to ties"
    )
    return f"{text}; plus {bounds.times_floor:g} × the noise floor" if bounds.times_floor else text


def runtime_line(report: VerifyReport) -> str:
    """What the runtime selects by itself, where its indexer's input was aligned; empty otherwise."""
    found = [place.runtime_selection for place in report.places if place.runtime_selection is not None]
    if not found:
        return ""
    others = [1.0 - one.with_ties for one in found]
    mean, worst = sum(others) / len(others), max(others)
    return (
        f"whatever the weights, this runtime (megatron-core {report.versions['megatron-core']}) feeds its "
        "indexer the latent before its norm, so by itself it selects other tokens than Hugging Face: "
        f"{mean:.1%} of them on average, {worst:.1%} in the worst layer; megatron-core 0.19 does not"
    )


def _predictions(predictions: Sequence[Predictions]) -> str:
    head = (
        "",
        "max |Δ|",
        "p99 |Δ|",
        "mean |Δ|",
        "KL HF‖Megatron",
        "KL Megatron‖HF",
        "argmax",
        "positions",
        "",
    )
    rows = []
    for one in predictions:
        for name, parity in ((one.name, one.parity), ("noise floor: HF against HF in fp32", one.floor)):
            if parity is None:
                continue
            rows.append(
                (
                    name,
                    *(f"{value:.2g}" for value in (parity.max_abs, parity.p99_abs, parity.mean_abs)),
                    f"{parity.kl_hf_megatron:.2g}",
                    f"{parity.kl_megatron_hf:.2g}",
                    f"{parity.argmax_agreement:.2%}",
                    str(parity.positions),
                    "; ".join(one.problems) if parity is one.parity else "",
                )
            )
    return _table(head, rows)


def _places(places: Sequence[PlaceReport]) -> str:
    head = (
        "stage",
        "kind",
        "same input",
        "running",
        "floor",
        "set aside",
        "indexer r",
        "top-k",
        "experts",
        "s",
        "",
    )
    return f'<div class="scroll">{_table(head, (place_row(place) for place in places))}</div>'


def place_row(place: PlaceReport) -> tuple[str, ...]:
    """A stage's figures as text, for page and terminal."""
    selection, routing = place.selection, place.routing
    return (
        place.name,
        place.kind,
        number(place.same_input.max),
        number(place.running.max),
        number(place.floor.max) if place.floor else "",
        f"{place.same_input.set_aside:.1%}" if place.same_input.set_aside else "",
        "" if selection is None or selection.pearson is None else f"{selection.pearson:.9f}",
        "" if selection is None else _share(selection.with_ties),
        "" if routing is None else _share(routing.with_ties),
        f"{place.hf_seconds + place.megatron_seconds:.2f}",
        "; ".join(place.problems),
    )


def _share(value: float) -> str:
    return "100%" if value == 1.0 else f"{value:.2%}"


def number(value: float) -> str:
    """Two digits, or a dash for what could not be judged."""
    return f"{value:.2g}" if math.isfinite(value) else "–"


def _errors(report: VerifyReport) -> str:
    places = report.places
    series = [
        Series("same input", "#1565c0", [place.same_input.max for place in places]),
        Series("running", "#8e24aa", [place.running.max for place in places], dashed=True),
    ]
    if any(place.floor for place in places):
        floors = [place.floor.max if place.floor else math.nan for place in places]
        series.append(Series("noise floor", "#757575", floors, dashed=True))
    bound = None if report.bounds.times_floor else report.bounds.hidden
    marks = [bool(place.problems) for place in places]
    return log_plot([place.name for place in places], series, marks, bound)


def _strips(places: Sequence[PlaceReport]) -> str:
    names = [place.name for place in places]
    found = [place.selection.by_position for place in places if place.selection]
    strips = overlap_strip("what was verified", names, found)
    runtime = [place.runtime_selection.by_position for place in places if place.runtime_selection]
    if len(runtime) == len(places):
        strips += overlap_strip("what this runtime selects by itself", names, runtime)
    return strips


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells of the last column are problems and stand out, where there are more than two columns."""
    lines = []
    if any(head):
        lines.append("<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>")
    for row in rows:
        cells = [f"<td>{escape(cell)}</td>" for cell in row]
        if len(row) > 2:
            cells[-1] = f'<td class="bad">{escape(row[-1])}</td>'
        lines.append("<tr>" + "".join(cells) + "</tr>")
    return "<table>" + "\n".join(lines) + "</table>"


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
