"""Terminal tables: an outcome, its costs, a machine, and plans side by side."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from io import StringIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from legroom.core.outcome import ActionCost, Comparison, Outcome
from legroom.core.units import format_bytes, format_seconds
from legroom.machine.spec import Machine
from legroom.memory.plan import Plan

NONE = "-"
"""What a cell shows when there is no number."""

Row = tuple[str, ...]


def comparison_table(comparison: Comparison, plan: Plan | None = None) -> Table:
    """Predicted beside measured, the error, and the step with no plan."""
    table = _table("", "predicted", "measured", "error", "unlimited")
    if plan is not None:
        table.title = Text(f"{plan.model}: {plan.policy}, {verdict(comparison, plan.budget)}")
    for row in comparison_rows(comparison):
        table.add_row(*_texts(row))
    return table


def costs_table(outcome: Outcome, limit: int = 15) -> Table:
    """What each action bought and cost, largest first; the rest as one row."""
    table = _table("action", "freed", "moved", "stall", "recomputed")
    for row in cost_rows(outcome.costs, limit):
        table.add_row(*_texts(row))
    return table


def machine_table(machine: Machine) -> Table:
    """What a machine can do: tiers, links and rates."""
    table = _table("what", "how much")
    table.columns[1].justify = "left"
    table.title = Text(f"{machine.name} ({machine.device})")
    table.caption = Text(f"source: {machine.origin}")
    for row in (*_tier_rows(machine), *_link_rows(machine), *_rate_rows(machine)):
        table.add_row(*_texts(row))
    return table


def plans_table(rows: Sequence[Plan | tuple[str, str]], unlimited_s: float | None = None) -> Table:
    """One row per policy, and below the rows what to know of each.

    A (name, message) pair is a policy that failed, and why; its row has no numbers.
    `unlimited_s` is the step time with no budget, which the ratios are against.
    """
    heads = ("fits", "peak", "step", "ratio", "moved", "recomputed", "stall", "planning")
    table = _table("policy", *heads)
    notes = []
    for x in rows:
        name, *cells = _plan_row(x, unlimited_s) if isinstance(x, Plan) else _failed_row(*x)
        note = "; ".join(plan_notes(x)) if isinstance(x, Plan) else x[1]
        table.add_row(*_texts((name, *cells)))
        notes += [f"{name}: {note}"] if note else []
    if notes:
        table.caption = Text("\n".join(notes))
    return table


def to_text(table: Table, width: int = 100) -> str:
    """The table as plain text, no line wider than `width`."""
    out = StringIO()
    console = Console(file=out, width=width, color_system=None, legacy_windows=False)
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def over_budget(outcome: Outcome, budget: Mapping[str, int]) -> dict[str, int]:
    """Bytes over the budget, for each tier that does not hold it; empty when it fits."""
    excess = {tier: outcome.peak_bytes.get(tier, 0) - size for tier, size in budget.items()}
    return {tier: size for tier, size in excess.items() if size > 0}


def verdict(comparison: Comparison, budget: Mapping[str, int]) -> str:
    """Whether it fits, in words; what was measured counts before what was predicted."""
    over = over_budget(comparison.peaks, budget)
    if not over:
        return f"fits in {format_bytes(budget['device'])}"
    parts = [f"{format_bytes(size)} over on {tier}" for tier, size in over.items()]
    return f"does not fit in {format_bytes(budget['device'])}: {', '.join(parts)}"


def comparison_rows(comparison: Comparison) -> list[Row]:
    """Cells of the comparison: what, predicted, measured, error, unlimited."""
    tiers = [tier for tier in comparison.predicted.peak_bytes if tier != "device"]
    return [
        _row("peak", comparison, lambda x: x.device_bytes, format_bytes),
        *(_row(f"peak, {t}", comparison, partial(peak_of, t), format_bytes) for t in tiers),
        _row("step time", comparison, lambda x: x.step_s, format_seconds),
        _row("bytes moved", comparison, moved_bytes, format_bytes),
        _row("recomputed time", comparison, lambda x: x.recompute_s, format_seconds),
        _row("stall", comparison, lambda x: x.stall_s, format_seconds),
    ]


def cost_rows(costs: Sequence[ActionCost], limit: int) -> list[Row]:
    """Cells of the costs, most bytes freed first, with what is cut off summed up last."""
    ranked = sorted(costs, key=lambda c: (-c.freed_bytes, -c.stall_s - c.recompute_s))
    shown, rest = ranked[:limit], ranked[limit:]
    if rest:
        shown.append(sum_up(rest, f"{len(rest)} more"))
    return [
        (
            c.label,
            _bytes(c.freed_bytes),
            _bytes(c.moved_bytes),
            _seconds(c.stall_s),
            _seconds(c.recompute_s),
        )
        for c in shown
    ]


def runs_table(found: Mapping[str, Comparison | None]) -> Table:
    """Predicted beside measured for several policies; None is a run that failed."""
    table = _table("policy", "peak", "measured", "error", "step", "measured", "error")
    table.title = Text("as run on this machine, predicted from the recorded step")
    for name, both in found.items():
        rows = [] if both is None else comparison_rows(both)
        cells = {row[0]: row[1:4] for row in rows}
        none = (NONE,) * 3
        table.add_row(*_texts((name, *cells.get("peak", none), *cells.get("step time", none))))
    return table


def sum_up(costs: Sequence[ActionCost], label: str) -> ActionCost:
    """Many costs as one."""
    return ActionCost(
        label=label,
        freed_bytes=sum(c.freed_bytes for c in costs),
        moved_bytes=sum(c.moved_bytes for c in costs),
        stall_s=sum(c.stall_s for c in costs),
        recompute_s=sum(c.recompute_s for c in costs),
    )


def moved_bytes(outcome: Outcome) -> int:
    """Bytes over all links, both ways."""
    return sum(outcome.moved_bytes.values())


def peak_of(tier: str, outcome: Outcome) -> int:
    """Peak of a tier, 0 if the outcome does not have it."""
    return outcome.peak_bytes.get(tier, 0)


def percent(error: float | None) -> str:
    """An error with its sign: "+1.2 %"."""
    return NONE if error is None else f"{error * 100:+.1f} %"


def _row(
    name: str,
    comparison: Comparison,
    get: Callable[[Outcome], float],
    show: Callable[[float], str],
) -> Row:
    predicted = get(comparison.predicted)
    measured = None if comparison.measured is None else get(comparison.measured)
    if name.startswith("peak") and not measured:  # peaks are not taken at every step
        measured = None
    unlimited = NONE if comparison.unlimited is None else show(get(comparison.unlimited))
    if measured is None:
        return name, show(predicted), NONE, NONE, unlimited
    error = percent(predicted / measured - 1) if measured else NONE
    return name, show(predicted), show(measured), error, unlimited


def _plan_row(plan: Plan, unlimited_s: float | None) -> Row:
    outcome = plan.predicted
    return (
        plan.policy,
        "no" if over_budget(outcome, plan.budget) else "yes",
        format_bytes(outcome.device_bytes),
        format_seconds(outcome.step_s),
        f"{outcome.step_s / unlimited_s:.2f}x" if unlimited_s else NONE,
        _bytes(moved_bytes(outcome)),
        _seconds(outcome.recompute_s),
        _seconds(outcome.stall_s),
        format_seconds(plan.planning_s),
    )


def plan_notes(plan: Plan) -> list[str]:
    """What to know of a plan beside its numbers: over by how much, lossy, simulate-only."""
    over = over_budget(plan.predicted, plan.budget)
    notes = [f"{format_bytes(size)} over on {tier}" for tier, size in over.items()]
    if not plan.exact:
        notes.append("lossy")
    if plan.simulate_only:
        notes.append(f"simulate-only: {', '.join(plan.simulate_only)}")
    return notes


def _failed_row(name: str, _: str) -> Row:
    return (name, "no", *(NONE,) * 7)


def _tier_rows(machine: Machine) -> Iterator[Row]:
    for tier in machine.tiers:
        kept = f", {format_bytes(tier.reserve_bytes)} reserved" if tier.reserve_bytes else ""
        yield f"{tier.name} bytes", format_bytes(tier.num_bytes) + kept


def _link_rows(machine: Machine) -> Iterator[Row]:
    for link in machine.links:
        late = f", {format_seconds(link.latency_s)} delay" if link.latency_s else ""
        root = f", shares {link.root}" if link.root else ""
        yield link.name, f"{_rate(link.bytes_per_s, 'B/s')}{late}{root}"
    for name, cap in machine.duplex.items():
        yield f"{name}, all together", _rate(cap, "B/s")


def _rate_rows(machine: Machine) -> Iterator[Row]:
    for dtype, flops in machine.matrix_flops.items():
        yield f"matrix, {dtype}", _rate(flops, "FLOP/s")
    yield "vector", _rate(machine.vector_flops, "FLOP/s")
    yield "device memory", _rate(machine.memory_bytes_per_s, "B/s")
    if machine.launch_s:
        yield "least time of an op", format_seconds(machine.launch_s)
    if machine.pin_s_per_byte:
        yield "pinning", f"{format_seconds(machine.pin_s_per_byte * 2**30)} per GiB"
    if machine.cpu_worker_bytes_per_s:
        yield "one CPU thread", _rate(machine.cpu_worker_bytes_per_s, "B/s")


def _rate(rate: float, unit: str) -> str:
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if rate >= factor:
            return f"{rate / factor:.{1 if rate < 100 * factor else 0}f} {prefix}{unit}"
    return f"{rate:.0f} {unit}"


def _bytes(size: int) -> str:
    return format_bytes(size) if size else NONE


def _seconds(seconds: float) -> str:
    return format_seconds(seconds) if seconds else NONE


def _table(*heads: str) -> Table:
    """A table whose first column is words and the others numbers."""
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i else "left", no_wrap=bool(i))
    table.columns[0].overflow = "fold"
    return table


def _texts(row: Row) -> list[Text]:
    """Cells as they are: names such as "layers[0]" are not markup."""
    return [Text(cell) for cell in row]
