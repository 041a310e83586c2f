"""Terminal tables of saved records: a step, a plan, an outcome, a timeline, the shipped steps."""

from collections import Counter
from collections.abc import Iterable

from rich import box
from rich.table import Table
from rich.text import Text

from legroom.core.outcome import Comparison, Outcome, Timeline
from legroom.core.units import format_bytes, format_seconds
from legroom.memory.plan import Plan
from legroom.memory.shipped import ShippedSteps
from legroom.memory.trace import Step
from legroom.views.table import comparison_table, costs_table, moved_bytes, plan_notes


def step_tables(step: Step) -> list[Table]:
    """What ran and what lived: totals, bytes by kind, and the blocks by group."""
    facts = {
        "signature": step.signature,
        "machine": step.machine,
        "capture": step.capture,
        "ops": f"{len(step.ops):,}, {format_seconds(step.compute_s)}",
        "saved tensors": f"{len(step.saved):,}",
    }
    return [_facts(step.model, facts), _kinds(step), *([_blocks(step)] if step.blocks else [])]


def plan_tables(plan: Plan) -> list[Table]:
    """What is predicted, who chose, and what each action buys and costs."""
    budget = ", ".join(f"{tier} {format_bytes(size)}" for tier, size in plan.budget.items())
    counts = {
        "recomputed blocks": len(plan.recomputes),
        "moved tensors": len(plan.moves),
        "shrunk tensors": len(plan.compressions),
    }
    facts = {
        "machine": plan.machine,
        "signature": plan.signature,
        "budget": budget,
        "why": plan.why,
        **{name: str(count) for name, count in counts.items() if count},
        "notes": "; ".join(plan_notes(plan)),
    }
    tables = [comparison_table(Comparison(predicted=plan.predicted), plan), _facts("", facts)]
    return [*tables, *([costs_table(plan.predicted)] if plan.predicted.costs else [])]


def outcome_tables(outcome: Outcome) -> list[Table]:
    """Peaks, times, stalls and bytes of one step."""
    peaks = {f"peak, {tier}": format_bytes(size) for tier, size in outcome.peak_bytes.items()}
    parts = {f"  {kind}": format_bytes(size) for kind, size in outcome.peak_parts.items()}
    facts = {
        **peaks,
        "peak at": outcome.peak_at,
        **parts,
        "step time": format_seconds(outcome.step_s),
        "recomputed time": format_seconds(outcome.recompute_s),
        "stall": format_seconds(outcome.stall_s),
        "bytes moved": format_bytes(moved_bytes(outcome)),
    }
    title = f"{outcome.policy or 'step'}, {outcome.source}"
    return [_facts(title, facts), *([costs_table(outcome)] if outcome.costs else [])]


def timeline_tables(timeline: Timeline) -> list[Table]:
    """How long each lane was busy, and the most bytes of each kind."""
    busy: dict[str, float] = {}
    for span in timeline.spans:
        name = f"{span.lane}, {span.kind}" if span.kind else span.lane
        busy[name] = busy.get(name, 0.0) + span.end_s - span.start_s
    end = max((span.end_s for span in timeline.spans), default=0.0)
    lanes = _rows(("lane", "busy"), [(k, format_seconds(v)) for k, v in busy.items()])
    lanes.title = Text(f"timeline, {timeline.source}: {format_seconds(end)}")
    most = {k: max(values, default=0) for k, values in timeline.bytes_by_kind.items()}
    return [lanes, _rows(("kind", "most"), [(k, format_bytes(v)) for k, v in most.items()])]


def shipped_tables(index: ShippedSteps) -> list[Table]:
    """The recorded steps that come with legroom, and what each takes as it is."""
    rows = [
        (
            row.name,
            row.precision,
            row.optimizer,
            f"{row.num_ops:,}",
            format_bytes(row.peak_bytes),
            format_seconds(row.step_s),
        )
        for row in index.steps
    ]
    table = _rows(("name", "numbers", "optimizer", "ops", "peak", "step"), rows)
    table.title = Text(f"recorded steps, with the rates of {index.machine}")
    return [table]


def _kinds(step: Step) -> Table:
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for storage in step.storages:
        sizes[storage.kind.value] += storage.num_bytes
        counts[storage.kind.value] += 1
    rows = [(kind, f"{counts[kind]:,}", format_bytes(size)) for kind, size in sizes.most_common()]
    return _rows(("kind", "storages", "bytes, all together"), rows)


def _blocks(step: Step) -> Table:
    """One row for each group of blocks that ran alike."""
    rows = []
    for group in dict.fromkeys(block.group for block in step.blocks):
        alike = [block for block in step.blocks if block.group == group]
        first = alike[0]
        seconds = sum(op.time_s for op in step.ops[first.first : first.last + 1])
        ways = first.build or first.barred or ", ".join(v.name for v in first.variants) or "keep"
        rows.append((first.name, str(len(alike)), format_seconds(seconds), ways))
    table = _rows(("block", "alike", "forward", "variants"), rows)
    table.columns[3].justify, table.columns[3].no_wrap = "left", False
    return table


def _facts(title: str, facts: dict[str, str]) -> Table:
    table = _rows(("", ""), [(k, v) for k, v in facts.items() if v])
    table.show_header = False
    table.columns[1].justify, table.columns[1].no_wrap = "left", False
    table.title = Text(title) if title else None
    return table


def _rows(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title_justify="left")
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i else "left", no_wrap=bool(i))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
