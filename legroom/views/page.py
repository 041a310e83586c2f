"""One HTML file that shows a step under a plan; it loads nothing from anywhere."""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from legroom.core.outcome import ActionCost, Comparison, Outcome, Point, Timeline
from legroom.core.units import format_bytes, format_seconds
from legroom.memory.plan import Plan
from legroom.memory.trace import Kind, Step
from legroom.views.blocks import HEADS as BLOCK_HEADS
from legroom.views.blocks import block_rows, block_states
from legroom.views.budgets import HEADS as BUDGET_HEADS
from legroom.views.budgets import budget_rows, budgets_chart
from legroom.views.chart import chart_data, stacked
from legroom.views.peak import Holding, Peak, find_peak
from legroom.views.table import (
    NONE,
    comparison_rows,
    cost_rows,
    moved_bytes,
    over_budget,
    percent,
    sum_up,
)

MAX_ROWS = 200
NUM_TENSORS = 20
BUDGET = "budget"
COLOURS = {"kept": "weight", "recomputed": "recompute", "moved": "copy", "shrunk": "state"}


def page(
    step: Step,
    plan: Plan,
    comparison: Comparison,
    predicted: Timeline,
    measured: Timeline | None = None,
    *,
    lines: Mapping[str, int] | None = None,
    points: Sequence[Point] = (),
) -> str:
    """The page as text. `lines` are more levels to draw, in device bytes by name; `points` are
    what other budgets would give.

    Raises RecordError when the plan was not made for this step.
    """
    levels = {BUDGET: plan.budget["device"], **_unlimited_line(comparison), **(lines or {})}
    over = over_budget(comparison.peaks, plan.budget)
    return Template(_asset("page.html")).substitute(
        title=f"{escape(step.model)}: {escape(plan.policy)} - legroom",
        style=_asset("page.css"),
        script=_asset("page.js"),
        policy=escape(plan.policy),
        model=escape(step.model),
        state="bad" if over else "good",
        badge="Does not fit" if over else "Fits",
        verdict=_verdict(comparison, plan, over),
        facts=_facts(step, plan),
        notes=_notes(plan),
        cards="\n".join(_cards(plan, comparison)),
        comparison=_comparison(comparison),
        peak=_peak(step, plan, comparison.predicted),
        costs=_costs(comparison.predicted),
        blocks=_blocks(step, plan),
        budgets=_budgets(points, plan, comparison),
        data=_embed(chart_data(predicted, measured, levels, BUDGET)),
    )


def write_page(
    path: str | os.PathLike[str],
    step: Step,
    plan: Plan,
    comparison: Comparison,
    predicted: Timeline,
    measured: Timeline | None = None,
    *,
    lines: Mapping[str, int] | None = None,
    points: Sequence[Point] = (),
) -> Path:
    """Write the page to `path` and return the path."""
    target = Path(path)
    text = page(step, plan, comparison, predicted, measured, lines=lines, points=points)
    target.write_text(text, encoding="utf-8")
    return target


def _asset(name: str) -> str:
    return (resources.files("legroom.views") / name).read_text(encoding="utf-8").rstrip("\n")


def _embed(data: dict[str, Any]) -> str:
    """JSON that cannot end its script element, whatever the names in it hold."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _unlimited_line(comparison: Comparison) -> dict[str, int]:
    unlimited = comparison.unlimited
    return {} if unlimited is None else {"without a plan": unlimited.device_bytes}


def _verdict(comparison: Comparison, plan: Plan, over: Mapping[str, int]) -> str:
    outcome = comparison.peaks
    budget = plan.budget["device"]
    peak = f"{outcome.source} peak {format_bytes(outcome.device_bytes)}"
    parts = [f"{format_bytes(size)} over on {tier}" for tier, size in over.items()]
    left = format_bytes(budget - outcome.device_bytes) + " to spare"
    return escape(f"{peak} of a {format_bytes(budget)} budget, {', '.join(parts) or left}")


def _facts(step: Step, plan: Plan) -> str:
    facts = [
        f"machine {plan.machine}",
        step.signature,
        f"{len(step.ops):,} ops, {step.capture} capture",
        f"planned in {format_seconds(plan.planning_s)}",
        "exact: gradients bit for bit" if plan.exact else "",
        plan.why,
    ]
    return " &middot; ".join(escape(x) for x in facts if x)


def _notes(plan: Plan) -> str:
    notes = []
    if not plan.exact:
        codecs = ", ".join(sorted({a.codec for a in plan.compressions}))
        notes.append(f"Lossy: some tensors are stored as {codecs}, so gradients differ a little.")
    if plan.simulate_only:
        names = ", ".join(plan.simulate_only)
        notes.append(f"Simulate-only, no runtime carries this out: {names}.")
    return "\n".join(f'<p class="note">{escape(note)}</p>' for note in notes)


def _cards(plan: Plan, comparison: Comparison) -> Iterable[str]:
    predicted = comparison.predicted
    shown, budget = comparison.measured or predicted, plan.budget["device"]
    high = comparison.peaks
    peak = {"of the budget": f"{high.device_bytes / budget:.0%}"}
    meter = _meter({"activation": high.device_bytes}, budget)
    yield _card(
        "Peak",
        high,
        format_bytes(high.device_bytes),
        meter,
        _beside(comparison, format_bytes(predicted.device_bytes), comparison.peak_error) | peak,
    )
    meter = _meter(_time_parts(predicted), predicted.step_s)
    yield _card(
        "Step time",
        shown,
        format_seconds(shown.step_s),
        meter,
        _beside(comparison, format_seconds(predicted.step_s), comparison.time_error)
        | _ratio(comparison),
    )
    added = {
        "recomputing": format_seconds(predicted.recompute_s),
        "waiting": format_seconds(predicted.stall_s),
    }
    total = format_seconds(predicted.recompute_s + predicted.stall_s)
    yield _card("Time paid for room", predicted, total, "", added)
    links = {k: format_bytes(v) for k, v in list(predicted.moved_bytes.items())[:4]}
    yield _card("Bytes moved", predicted, format_bytes(moved_bytes(predicted)), "", links)


def _card(head: str, outcome: Outcome, big: str, meter: str, rows: Mapping[str, str]) -> str:
    lines = "".join(f"<p>{escape(k)} <b>{escape(v)}</b></p>" for k, v in rows.items())
    number = f'<p class="big">{big} <small>{outcome.source}</small></p>'
    return f'<div class="card"><h2>{head}</h2>{number}{meter}{lines}</div>'


def _beside(comparison: Comparison, predicted: str, error: float | None) -> dict[str, str]:
    if comparison.measured is None:
        return {}
    return {"predicted": predicted, "error": percent(error)}


def _ratio(comparison: Comparison) -> dict[str, str]:
    shown, unlimited = comparison.measured or comparison.predicted, comparison.unlimited
    if unlimited is None or not unlimited.step_s:
        return {}
    ratio = f"{shown.step_s / unlimited.step_s:.2f}x"
    return {"without a plan": format_seconds(unlimited.step_s), "ratio": ratio}


def _time_parts(outcome: Outcome) -> dict[str, float]:
    return {
        "forward": outcome.compute_s,
        "recompute": outcome.recompute_s,
        "stall": outcome.stall_s,
    }


def _meter(parts: Mapping[str, float], whole: float, name: str = "") -> str:
    """A bar whose parts are shares of a whole; for the eye, the numbers stand beside it."""
    total = max(whole, sum(parts.values())) or 1
    bars = "".join(
        f'<i class="{_colour(k)}" style="width:{100 * v / total:.2f}%"></i>'
        for k, v in parts.items()
        if v > 0
    )
    return f'<div class="meter {name}" aria-hidden="true">{bars}</div>'


def _colour(kind: str) -> str:
    """A class of the style sheet; other names get the colour of the rest."""
    return f"c-{kind}" if kind.isalpha() and kind.isascii() else "c-other"


def _legend(entries: Mapping[str, str]) -> str:
    items = "".join(
        f'<li><i class="swatch {_colour(kind)}"></i>{escape(text)}</li>'
        for kind, text in entries.items()
    )
    return f'<ul class="legend">{items}</ul>'


def _comparison(comparison: Comparison) -> str:
    heads = ("what", "predicted", "measured", "error", "unlimited")
    return _table("Predicted beside measured", heads, comparison_rows(comparison))


def _peak(step: Step, plan: Plan, predicted: Outcome) -> str:
    peak = find_peak(step, plan)
    parts = {k: predicted.peak_parts[k] for k in stacked(predicted.peak_parts)}
    intro = (
        f"{format_bytes(predicted.device_bytes)} at {peak.where}, op {peak.op} of {len(step.ops)}."
    )
    bar = _meter(parts, predicted.device_bytes, "tall") if parts else ""
    legend = _legend({k: f"{k} {format_bytes(v)}" for k, v in parts.items()})
    heads = ("tensors", "kind", "count", "bytes", "share", "plan")
    families = _table("Tensors at the peak", heads, _family_rows(peak, predicted), words=(1, 5))
    columns = ("tensor", "kind", "bytes", "share", "plan")
    single = _table("Single tensors", columns, _tensor_rows(peak, predicted), words=(1, 4))
    more = _details(f"The largest of {len(peak.holdings)} single tensors", single)
    return f"<p>{escape(intro)}</p>{bar}{legend}{families}{more}"


def _family_rows(peak: Peak, predicted: Outcome) -> list[tuple[str, ...]]:
    """Tensors that differ by numbers in their names alone share a row; the sum is the peak."""
    whole = predicted.device_bytes or 1
    families: dict[tuple[str, str, str], list[Holding]] = {}
    for h in peak.holdings:
        families.setdefault((family(h.name), h.kind, _note(h)), []).append(h)
    found = [
        (name if len(hs) > 1 else hs[0].name, kind, len(hs), sum(h.num_bytes for h in hs), note)
        for (name, kind, note), hs in families.items()
    ]
    found.sort(key=lambda row: -row[3])
    shown, rest = found[:NUM_TENSORS], found[NUM_TENSORS:]
    if rest:
        shown.append(("the rest", NONE, sum(r[2] for r in rest), sum(r[3] for r in rest), NONE))
    if gap := predicted.device_bytes - peak.num_bytes:
        shown.append(("rounding and copies in flight", NONE, 0, gap, NONE))
    return [
        (name, kind, str(count or NONE), format_bytes(size), f"{size / whole:.1%}", note)
        for name, kind, count, size, note in shown
    ]


def _tensor_rows(peak: Peak, predicted: Outcome) -> list[tuple[str, ...]]:
    whole = predicted.device_bytes or 1
    return [
        (h.name, h.kind, format_bytes(h.num_bytes), f"{h.num_bytes / whole:.1%}", _note(h))
        for h in peak.holdings[:NUM_TENSORS]
    ]


def _note(holding: Holding) -> str:
    return holding.note or ("kept" if holding.kind == Kind.ACTIVATION.value else NONE)


def _costs(predicted: Outcome) -> str:
    if not predicted.costs:
        return "<p>No actions: everything is kept.</p>"
    families: dict[str, list[ActionCost]] = {}
    for cost in predicted.costs:
        families.setdefault(family(cost.label), []).append(cost)
    sums = [
        sum_up(costs, f"{len(costs)} x {name}" if len(costs) > 1 else costs[0].label)
        for name, costs in families.items()
    ]
    heads = ("action", "freed", "moved", "stall", "recomputed")
    table = _table("What the actions bought", heads, cost_rows(sums, MAX_ROWS))
    single = _table("What each action bought", heads, cost_rows(predicted.costs, MAX_ROWS))
    return table + _details(f"Each of the {len(predicted.costs)} actions", single)


def _details(summary: str, text: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{text}</details>"


def family(name: str) -> str:
    """A name with its numbers as stars: layers of one model share it."""
    return re.sub(r"\d+", "*", name)


def _blocks(step: Step, plan: Plan) -> str:
    if not step.blocks:
        return "<p>The step has no blocks.</p>"
    states = block_states(step, plan)
    counts = {COLOURS[k]: f"{k} {states.count(k)}" for k in COLOURS if k in states}
    squares = "".join(
        f'<i class="{_colour(COLOURS[state])}" title="{escape(f"{block.name}: {state}")}"></i>'
        for block, state in zip(step.blocks, states, strict=True)
    )
    table = _table("Blocks", BLOCK_HEADS, block_rows(step, plan)[:MAX_ROWS], words=(2, 6))
    return f'{_legend(counts)}<div class="strip" aria-hidden="true">{squares}</div>{table}'


def _budgets(points: Sequence[Point], plan: Plan, comparison: Comparison) -> str:
    if not points:
        return ""
    natural_s = comparison.unlimited.step_s if comparison.unlimited is not None else 0.0
    chart = budgets_chart(points, (plan.predicted.device_bytes, plan.predicted.step_s))
    rows = budget_rows(points, natural_s)
    table = _table("What other budgets would give", BUDGET_HEADS, rows, words=(4,))
    head = '<h2 id="h-budgets">What other budgets would give, as predicted</h2>'
    return f'<section aria-labelledby="h-budgets">{head}{chart}{table}</section>'


def _table(
    name: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    words: Sequence[int] = (),
) -> str:
    """A table that scrolls sideways when it must; columns in `words` are not numbers."""
    kinds = [' class="word"' if i in words else "" for i in range(len(heads))]
    head = "".join(
        f'<th scope="col"{k}>{escape(x)}</th>' for k, x in zip(kinds, heads, strict=True)
    )
    lines = [
        "".join(f"<td{k}>{escape(x)}</td>" for k, x in zip(kinds, row, strict=True)) for row in rows
    ]
    text = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>\n{text}\n</tbody></table></div>"
    )
