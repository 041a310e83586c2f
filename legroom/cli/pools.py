"""The pools that allocators need for plans: figures for each, as fields and as a table."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from legroom.cli.answer import progress
from legroom.machine.spec import Machine
from legroom.memory.plan import Plan
from legroom.memory.pool.place import Figures, figures
from legroom.memory.simulate import Simulator
from legroom.memory.trace import Step
from legroom.views.policies import pools_table


def pools_of(step: Step, machine: Machine, plans: Sequence[Plan]) -> dict[str, Figures]:
    """Each policy's figures."""
    simulator, found = Simulator(step, machine), dict[str, Figures]()
    with progress("laying out", len(plans)) as advance:
        for plan in plans:
            found[plan.policy] = figures(simulator, plan.actions)
            advance(plan.policy)
    return found


def pools_shown(found: Mapping[str, Figures]) -> Table:
    """A row for each policy."""
    return pools_table({name: (row.live_bytes, row.pool_bytes) for name, row in found.items()})


def into_rows(rows: Iterable[dict[str, Any]], found: Mapping[str, Figures]) -> None:
    """Put each policy's figures into its row of a document."""
    for row in rows:
        if row["policy"] in found:
            row["pool"] = _fields(found[row["policy"]])


def _fields(found: Figures) -> dict[str, Any]:
    pools = {
        name: {"num_bytes": size, "overhead": found.overhead(name)}
        for name, size in found.pool_bytes.items()
    }
    return {"live_bytes": found.live_bytes, "allocators": pools}
