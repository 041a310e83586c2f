"""legroom makes a PyTorch training job fit the machine it has, and run fast there."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from legroom.core.errors import (
    BudgetError,
    InputError,
    LegroomError,
    RecordError,
    StepError,
    TierError,
    UnitError,
    UnknownName,
)
from legroom.core.outcome import Comparison, Outcome
from legroom.machine.spec import Machine, find_machine
from legroom.memory.plan import Plan
from legroom.memory.trace import Step

if TYPE_CHECKING:
    from legroom.ahead import estimate, trace
    from legroom.api import Job, fit, verify
    from legroom.machine.probe import probe
    from legroom.memory.planner import make_plan
    from legroom.memory.verify import Verdict

__version__ = "0.1.0"

_LAZY = {
    "Job": "legroom.api",
    "Verdict": "legroom.memory.verify",
    "estimate": "legroom.ahead",
    "fit": "legroom.api",
    "make_plan": "legroom.memory.planner",
    "probe": "legroom.machine.probe",
    "trace": "legroom.ahead",
    "verify": "legroom.api",
}
"""Names that need torch or a solver, imported on first use so that `import legroom` is fast."""

__all__ = [
    "BudgetError",
    "Comparison",
    "InputError",
    "Job",
    "LegroomError",
    "Machine",
    "Outcome",
    "Plan",
    "RecordError",
    "Step",
    "StepError",
    "TierError",
    "UnitError",
    "UnknownName",
    "Verdict",
    "estimate",
    "find_machine",
    "fit",
    "make_plan",
    "probe",
    "trace",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "nn":
        return import_module("legroom.nn")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'legroom' has no attribute {name!r}")
