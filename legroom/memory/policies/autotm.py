"""Choose moves and their ops by an integer program (AutoTM, Hildebrand et al. 2020).

Each tensor flows through the step on the device or below it. `static` decides once where it lives:
whoever uses it below pays the copy. `sync` lets it leave after its last use and come back for the
next one, and the step stops for both copies. The full form also offers copies that run beside one
op, up to 15 positions from a use: such an op takes its own time or that of all copies on it,
whichever is more. The sum over ops and stops is minimised, to within 1 %, with a limit for each op.
If the tensors then find no room in the budget as an allocator places them, limits within 10 ops of
the peak shrink, by a tenth at most, and the program is solved again.

Chosen here: the tiers below are one, as fast as the nearest; a layout does not say which tensors
stick out, so limits shrink around the peak; tensors below a share of the budget stay. Left out:
kernels that read from below (a device cannot), algorithms by workspace, weights, gaps between two
uses in backward, and the best ratio of two memories.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from legroom.core.quiet import silenced
from legroom.memory.actions import Move
from legroom.memory.arena import place
from legroom.memory.gaps import Gap, fewest, find_gaps, link_s, make_move, nearest_tier
from legroom.memory.plan import away_span
from legroom.memory.planner import POLICIES, Choice, Problem
from legroom.memory.schedule import peak_position

Floats = npt.NDArray[np.float64]
WINDOW = 15
"""Positions from a use within which a copy may run beside an op."""
GAP = 0.01
"""Solved to within this share of the step."""
MOST = 2000
"""Of many tensors the window is smaller: solvers do not keep to a time limit in large programs."""
ROUNDS, NEIGHBOURS, LEAST_FACTOR = 5, 10, 0.90
"""Of the back-off."""
LEAST_SHARE = 20_000
"""Tensors smaller than this part of the budget are not worth a move."""
LAID_OUT_BYTES = 256 << 20
"""In smaller budgets a layout says little: the walls it keeps count for too much."""
QUICK_S = 1.0


class Form(NamedTuple):
    """What a tensor may do."""

    window: int = 0
    """Positions from a use within which copies run beside an op; 0: all are waited for."""
    each_use: bool = False
    """Whether every use pays for the copy."""


STATIC, SYNC, ASYNC = Form(each_use=True), Form(), Form(window=WINDOW)


class Option(NamedTuple):
    """One way for one of a gap's two copies."""

    gap: int
    position: int
    """As asked of `make_move`: where a copy out is waited for, or a copy in begins."""
    place: int
    """From here on its room on the device is free, or taken."""
    op: int
    """It runs beside this op; -1: the step waits for it."""
    seconds: float


class Program:
    """Columns: gaps, options out and in, lateness of ops, bytes away in stretches, the step."""

    def __init__(self, problem: Problem, gaps: Sequence[Gap], form: Form) -> None:
        self.problem, self.gaps, self.form = problem, gaps, form
        self.tier = problem.tiers()[0]
        self.during = problem.simulator.shape([]).during.astype(np.float64)
        self.times = np.diff(problem.simulator.until)
        self.scale_s = float(self.times.sum()) or 1.0
        every = range(len(gaps))
        self.outs = [option for g in every for option in self._options(g, out=True)]
        self.ins = [option for g in every for option in self._options(g, out=False)]
        both = (*self.outs, *self.ins)
        self.ops = sorted({x.op for x in both if x.op >= 0})
        self.edges = sorted({0, *(x.place for x in both)})
        """Where stretches begin: only there do bytes leave or come back."""
        self.objective_s = 0.0
        """What the program takes the step to last, by its last solution."""
        self._parts = (len(gaps), len(self.outs), len(self.ins), len(self.ops), len(self.edges), 1)
        self._first = [0, *np.cumsum(self._parts).tolist()]
        """First column of each part."""
        self._rows = _Rows()
        self._gap_rows()
        self._room_row()
        self._late_rows()
        self._stretch_rows()

    # -- columns -----------------------------------------------------------------------------

    def _options(self, g: int, out: bool) -> list[Option]:
        """All ways for a copy: waited for, or beside an op near the use."""
        gap, step, simulator = self.gaps[g], self.problem.step, self.problem.simulator
        seconds = link_s(simulator, self.tier, gap.num_bytes, out)
        uses = {p for row in step.saves[gap.storage] for p in row.unpacked}
        many = len(uses) if self.form.each_use and not out else 1
        found = [self._option(g, gap.start if out else gap.end, -1, many * seconds, out)]
        window = min(self.form.window, MOST // len(self.gaps))
        saved, begun = step.packed(gap.storage), gap.start - window
        first = max(saved, begun) if out else max(gap.start, gap.end - window)
        last = min(gap.start + window, gap.end) if out else gap.end
        for op in range(first, last) if window else ():
            found.append(self._option(g, op + out, op, seconds, out))
        return found

    def _option(self, g: int, position: int, op: int, seconds: float, out: bool) -> Option:
        gap, step = self.gaps[g], self.problem.step
        there = (position, gap.end) if out else (gap.start, position)
        span = away_span(step, make_move(step, gap, self.tier, *there))
        return Option(g, position, span[0 if out else 1], op, seconds)

    # -- rows --------------------------------------------------------------------------------

    def _gap_rows(self) -> None:
        """A gap that is used has one copy out and one in, and the second after the first."""
        count = len(self.gaps)
        outs, ins = list[list[tuple[int, Option]]](), list[list[tuple[int, Option]]]()
        for found, options, first in (
            (outs, self.outs, self._first[1]),
            (ins, self.ins, self._first[2]),
        ):
            found.extend([] for _ in range(count))
            for i, option in enumerate(options):
                found[option.gap].append((first + i, option))
        for g in range(count):
            for mine in (outs[g], ins[g]):
                self._rows.add({g: -1.0} | {c: 1.0 for c, _ in mine}, 0.0, 0.0)
            last = max(x.place for _, x in outs[g])
            for at in sorted({x.place for _, x in ins[g] if x.place < last}):
                back = {c: 1.0 for c, x in ins[g] if x.place <= at}
                gone = {c: -1.0 for c, x in outs[g] if x.place <= at}
                self._rows.add(back | gone, -np.inf, 0.0)

    def _room_row(self) -> None:
        """Below there is room for so much."""
        room = sum(self.problem.budget[tier] for tier in self.problem.tiers())
        scale = 1.0 / max(self.problem.limit, 1)
        sizes = {g: gap.num_bytes * scale for g, gap in enumerate(self.gaps)}
        self._rows.add(sizes, -np.inf, room * scale)

    def _late_rows(self) -> None:
        """An op is late by what the copies beside it take more than itself."""
        beside: dict[int, dict[int, float]] = {op: {} for op in self.ops}
        for i, option in enumerate((*self.outs, *self.ins)):
            if option.op >= 0:
                beside[option.op][self._first[1] + i] = option.seconds / self.scale_s
        for i, (op, terms) in enumerate(beside.items()):
            late = {self._first[3] + i: -1.0}
            self._rows.add(terms | late, -np.inf, float(self.times[op]) / self.scale_s)

    def _stretch_rows(self) -> None:
        """What is away in a stretch: as in the one before, and what goes, less what comes."""
        terms: dict[int, dict[int, float]] = {edge: {} for edge in self.edges}
        for i, option in enumerate((*self.outs, *self.ins)):
            sign = -1.0 if i < len(self.outs) else 1.0
            share = sign * self.gaps[option.gap].num_bytes / max(self.problem.limit, 1)
            terms[option.place][self._first[1] + i] = share
        for i, moved in enumerate(terms.values()):
            column = self._first[4] + i
            before = {column - 1: -1.0} if i else {}
            self._rows.add(moved | before | {column: 1.0}, 0.0, 0.0)

    # -- solving -----------------------------------------------------------------------------

    def solve(self, limits: Floats, seconds: float) -> list[Move] | None:
        """The moves of the best solution found in that time; None if there is none."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        num_whole, count = self._first[3], self._first[-1]
        low, high = np.zeros(count), np.full(count, np.inf)
        high[:num_whole], low[-1], high[-1] = 1.0, 1.0, 1.0
        low[self._first[4] : self._first[5]] = self._least(limits)
        with silenced(1):  # HiGHS prints a stray line now and then
            found = milp(
                self._costs(),
                constraints=LinearConstraint(*self._rows.matrix(count)),
                bounds=Bounds(low, high),
                integrality=(np.arange(count) < num_whole).astype(int),
                options={"time_limit": max(seconds, 0.1), "mip_rel_gap": GAP},
            )
        if found.x is None:
            return None
        self.objective_s = float(found.fun) * self.scale_s
        return self._moves(found.x)

    def _costs(self) -> Floats:
        """In shares of the step; the last column is the step itself."""
        waits = [0.0 if x.op >= 0 else x.seconds / self.scale_s for x in (*self.outs, *self.ins)]
        costs = np.zeros(self._first[-1])
        costs[self._first[1] : self._first[3]] = waits
        costs[self._first[3] : self._first[4]] = 1.0
        costs[-1] = float(self.times.sum()) / self.scale_s
        return costs

    def _least(self, limits: Floats) -> Floats:
        """What must be away in each stretch, in shares of the budget."""
        over = self.during - limits
        tops = np.maximum.reduceat(over, self.edges)
        least: Floats = np.maximum(tops, 0.0) / max(self.problem.limit, 1)
        return least

    def _moves(self, x: Floats) -> list[Move]:
        chosen = x > 0.5
        outs = {o.gap: o for i, o in enumerate(self.outs) if chosen[self._first[1] + i]}
        ins = {o.gap: o for i, o in enumerate(self.ins) if chosen[self._first[2] + i]}
        spans = {g: (outs[g].position, ins[g].position) for g in sorted(outs)}
        return placed(self.problem, [(self.gaps[g], *span) for g, span in spans.items()])


def placed(problem: Problem, spans: Sequence[tuple[Gap, int, int]]) -> list[Move]:
    """Moves over these gaps, each to the nearest tier that still has room."""
    room: dict[str, int] = {}
    found = []
    for gap, leave, back in spans:
        tier = nearest_tier(problem, gap.num_bytes, room)
        if tier is not None:
            found.append(make_move(problem.step, gap, tier, leave, back))
    return found


class _Rows:
    """Constraints being collected: least <= sum of coefficient * variable <= most."""

    def __init__(self) -> None:
        self.columns: list[int] = []
        self.values: list[float] = []
        self.ends: list[int] = [0]
        self.bounds: list[tuple[float, float]] = []

    def add(self, terms: dict[int, float], least: float, most: float) -> None:
        """One more row."""
        self.columns.extend(terms)
        self.values.extend(terms.values())
        self.ends.append(len(self.columns))
        self.bounds.append((least, most))

    def matrix(self, num_columns: int) -> tuple[object, Floats, Floats]:
        """All of them, with what each has to be at least and at most."""
        from scipy.sparse import csr_matrix

        shape = (len(self.bounds), num_columns)
        low, high = np.array(self.bounds).T
        return csr_matrix((self.values, self.columns, self.ends), shape=shape), low, high


def by_form(form: Form, problem: Problem) -> Choice:
    """Solve, lay out, shrink limits around the peak, and solve again, while there is time."""
    if problem.fits([]):
        return Choice([], "everything fits as it is")
    gaps = find_gaps(problem, max(problem.limit // LEAST_SHARE, 1))
    if not gaps or not problem.tiers():
        return Choice([], "nothing can be moved")
    seconds = min(problem.time_limit_s, QUICK_S) if problem.quick else problem.time_limit_s
    until, program = time.monotonic() + seconds, Program(problem, gaps, form)
    limits = np.full(len(program.during), float(problem.limit))
    found = list[tuple[int, list[Move]]]()
    for _ in range(ROUNDS + 1):
        moves = program.solve(limits, (until - time.monotonic()) / 2)  # the rest for later ones
        if moves is None:
            break
        found.append((excess(problem, moves), moves))
        if not found[-1][0] or time.monotonic() > until:
            break
        shrink(problem, limits, moves, found[-1][0])
    over, moves = min(found, key=lambda x: x[0], default=(0, _waiting(problem, gaps)))
    lacks = f", of which a layout lacks {over} bytes" if over else ""
    return Choice(
        list(moves),
        f"{len(moves)} of {len(gaps)} tensors moved{lacks}; {len(found)} programs solved",
    )


def excess(problem: Problem, moves: Sequence[Move]) -> int:
    """Bytes the device lacks for these moves, or for all tensors as an allocator places them."""
    over = problem.simulator.shape(moves).peak - problem.limit
    if over > 0 or problem.quick or problem.limit < LAID_OUT_BYTES:
        return max(over, 0)
    return place(problem.simulator, moves, problem.limit).missing_bytes


def shrink(problem: Problem, limits: Floats, moves: Sequence[Move], over: int) -> None:
    """Lower the limits of the ops around the peak by up to a tenth."""
    shape = problem.simulator.shape(moves)
    at = peak_position(shape.during, shape.replays)
    factor = max(LEAST_FACTOR, 1.0 - over / max(problem.limit, 1) / 2)
    limits[max(at - NEIGHBOURS, 0) : at + NEIGHBOURS + 1] *= factor


def _waiting(problem: Problem, gaps: Sequence[Gap]) -> list[Move]:
    """The largest tensors away for all of their gaps, as few as fit: where no program is solved."""
    largest = sorted(gaps, key=lambda gap: -gap.num_bytes)

    def first(count: int) -> list[Move]:
        return placed(problem, [(gap, gap.start, gap.end) for gap in largest[:count]])

    return fewest(problem, len(gaps), first)


_FORMS = {"autotm": ASYNC, "autotm_sync": SYNC, "autotm_static": STATIC}
_DOCS = {
    "autotm": "Move tensors by AutoTM's integer program, copies beside one op or waited for.",
    "autotm_sync": "Move tensors by AutoTM's integer program, where every copy is waited for.",
    "autotm_static": "Move tensors by AutoTM's integer program, each placed once for all its uses.",
}
for _name, _form in _FORMS.items():
    _policy = partial(by_form, _form)
    _policy.__doc__ = _DOCS[_name]
    POLICIES.register(_name)(_policy)
