"""Steps that leave their plan: record the next one, and where that does not help, plan no more.

A model that looks at its data may run other ops each time. What was planned for one of its steps
does not bound the next, so such a kind of step ends under the online rule, which needs no trace.
"""

import warnings
from collections.abc import Mapping

import msgspec

from legroom.memory.actions import Park
from legroom.memory.arena import NOWHERE
from legroom.memory.kinds import Kind

ENOUGH, FORGIVEN = 2.0, 0.2
"""Steps that strayed before something is done, and how many of them a step that did not makes up
for: every other step may stray."""
MOST_RECORDS = 2
"""How often a kind is recorded anew."""
OVER = 1.02
"""A step that takes so many times its budget has left its plan, whatever it seems."""


def note_step(kind: Kind, strayed: bool, budget: Mapping[str, int]) -> bool:
    """Count a step that did or did not stray; whether another is to be recorded for it.

    After some recordings the online rule is taken up instead, where there is a tier to move to.
    """
    kind.strayed = kind.strayed + 1 if strayed else max(kind.strayed - FORGIVEN, 0.0)
    if kind.strayed < ENOUGH or kind.restless:
        return False
    kind.strayed = 0.0
    if kind.records < MOST_RECORDS:
        kind.records += 1
        record_anew(kind)
        return True
    if any(budget.get(tier) for tier in ("host", "disk")):
        take_up_rule(kind, budget["device"])
    return False


def record_anew(kind: Kind) -> None:
    """Have the next step of a kind recorded."""
    kind.recorded, kind.still, kind.reference = False, False, None
    kind.script = None if kind.outfit.changes else kind.script  # it is for other code
    kind.outfit = kind.base


def take_up_rule(kind: Kind, limit: int) -> None:
    """Run a kind under the online rule from now on; states that are elsewhere stay there."""
    assert kind.plan is not None
    replace, old = msgspec.structs.replace, kind.plan
    kind.restless = kind.still = True
    kind.script, kind.outfit, kind.placement = None, kind.base, NOWHERE
    kind.plan = replace(
        old,
        policy="online",
        why="its steps differ, so what was saved first leaves first",
        actions=tuple(a for a in old.actions if isinstance(a, Park)),
        predicted=replace(old.predicted, peak_bytes={"device": limit}, costs=()),
    )
    kind.start_anew()
    warnings.warn(
        "legroom: steps of this kind differ from each other, and plans made from some did not suit "
        "the next. From now on they run under the online rule, which is slower and keeps the "
        "budget; job.runner.deviation says where a step left its plan",
        stacklevel=5,
    )
