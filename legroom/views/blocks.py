"""How each block runs under a plan: kept, recomputed, moved or shrunk."""

from itertools import groupby
from typing import NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from legroom.core.units import format_bytes, format_seconds
from legroom.memory.plan import Plan, find_variant
from legroom.memory.trace import Step
from legroom.views.table import NONE


class Treatment(NamedTuple):
    """What a plan does with one block; equal neighbours are shown as one row."""

    group: int
    variant: str
    dropped_bytes: int
    replay_s: float
    moved_bytes: int
    shrunk: int
    price: str = ""

    @property
    def why(self) -> str:
        """What it buys, in words."""
        if self.price:
            return self.price
        if self.dropped_bytes:
            return f"{format_seconds(self.replay_s)} for {format_bytes(self.dropped_bytes)} less"
        if self.moved_bytes:
            return "copied beside the compute"
        return "in fewer bits" if self.shrunk else "there is room"

    @property
    def state(self) -> str:
        """The treatment in one word."""
        if self.dropped_bytes:
            return "recomputed"
        return "moved" if self.moved_bytes else "shrunk" if self.shrunk else "kept"


def treatments(step: Step, plan: Plan) -> list[Treatment]:
    """For each block, what the plan does with it."""
    chosen = {action.block: find_variant(step, action) for action in plan.recomputes}
    owner = {s: rows[0].block for s, rows in step.saves.items()}
    moved, shrunk = [0] * len(step.blocks), [0] * len(step.blocks)
    for move in plan.moves:
        if owner.get(move.storage, -1) >= 0:
            moved[owner[move.storage]] += step.storages[move.storage].num_bytes
    for row in plan.compressions:
        if owner.get(row.storage, -1) >= 0:
            shrunk[owner[row.storage]] += 1
    found = []
    for b, block in enumerate(step.blocks):
        v = chosen.get(b)
        name, dropped, replay_s = (v.name, v.dropped_bytes, v.replay_s) if v else ("keep", 0, 0.0)
        name = f"compiled, {block.build}" if block.build else name
        rest = (moved[b], shrunk[b], block.price)
        found.append(Treatment(block.group, name, dropped, replay_s, *rest))
    return found


def block_states(step: Step, plan: Plan) -> list[str]:
    """For each block, its treatment in one word."""
    return [t.state for t in treatments(step, plan)]


HEADS = ("block", "calls", "variant", "dropped each", "replay each", "moved each", "why")


def block_rows(step: Step, plan: Plan) -> list[tuple[str, ...]]:
    """Cells of the blocks; neighbours that run the same way share a row."""
    rows: list[tuple[str, ...]] = []
    pairs = zip(step.blocks, treatments(step, plan), strict=True)
    for t, run in groupby(pairs, key=lambda pair: pair[1]):
        names = [block.name for block, _ in run]
        name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        rows.append(
            (
                name,
                str(len(names)),
                t.variant + (f", {t.shrunk} shrunk" if t.shrunk else ""),
                format_bytes(t.dropped_bytes) if t.dropped_bytes else NONE,
                format_seconds(t.replay_s) if t.replay_s else NONE,
                format_bytes(t.moved_bytes) if t.moved_bytes else NONE,
                t.why,
            )
        )
    return rows


def blocks_table(step: Step, plan: Plan, limit: int = 30) -> Table:
    """The same for a terminal."""
    table = Table(box=box.SIMPLE_HEAD, title_justify="left")
    for head in HEADS:
        words = head in ("block", "variant", "why")
        table.add_column(head, justify="left" if words else "right", no_wrap=not words)
    rows = block_rows(step, plan)
    for row in rows[:limit]:
        table.add_row(*(Text(cell) for cell in row))
    if len(rows) > limit:
        table.caption = f"and {len(rows) - limit} more rows"
    return table
