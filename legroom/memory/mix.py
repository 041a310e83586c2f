"""Mix: which build each compiled block runs, given what moves can take off the device.

Blocks of a step are alike, and what they save is all there when backward begins; so the choice is
a knapsack over blocks and builds, with a memory constraint at every position. How much of the
budget moves will free is not known before they are planned: the knapsack is solved for several
guesses, each answer is planned in full, and the simulator says which is fastest.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix

from legroom.machine.spec import Link, Machine
from legroom.memory.builds import Build
from legroom.memory.rebuild import Rebuilt, rebuilt
from legroom.memory.simulate import Simulator
from legroom.memory.trace import Step
from legroom.memory.variants import with_variants

Options = Mapping[int, Sequence[Build]]
"""The builds there are for each block."""
RELIEF = (0.0, 0.15, 0.3, 0.5, 0.75, 1.0)
"""Shares of what the links can carry away in forward."""
SOLVE_S = 1.0


def mixes(step: Step, machine: Machine, limit: int, options: Options) -> Iterator[Rebuilt]:
    """The step with builds chosen, for one guess after the other of what moves will free."""
    least = {
        b: min(builds, key=lambda x: (x.saved_bytes, x.forward_bytes))
        for b, builds in options.items()
    }
    base = with_builds(step, least)
    options = {b: builds for b, builds in options.items() if base.step.blocks[b].build}
    knapsack = Knapsack(base.step, machine, options, least)
    seen: set[tuple[str, ...]] = set()
    for share in RELIEF:
        picked = knapsack.solve(limit + int(share * knapsack.carried))
        choice = least if picked is None else picked
        names = tuple(build.name for build in choice.values())
        if names not in seen:
            seen.add(names)
            yield with_builds(step, choice)


def with_builds(step: Step, choice: Mapping[int, Build]) -> Rebuilt:
    """The step with these builds, and variants for what is left eager."""
    made = rebuilt(step, choice)
    return made._replace(step=with_variants(made.step))


def fitting_share(simulator: Simulator, limit: int) -> float:
    """About how much of what a step saves it can keep within a limit, moves left aside."""
    step = simulator.step
    saved = sum(step.storages[s].num_bytes for s in step.saves)
    over = simulator.shape([]).peak - limit
    return 1 - max(over, 0) / max(saved, 1)


class Knapsack:
    """One build for each block: least time, with room at every position."""

    def __init__(
        self, step: Step, machine: Machine, options: Options, least: Mapping[int, Build]
    ) -> None:
        self.step, self.options, self.least = step, options, least
        simulator = Simulator(step, machine)
        self.levels = simulator.shape([]).during
        rate = max((hop.bytes_per_s for hop in first_hops(machine)), default=0.0)
        self.carried = int(rate * float(simulator.until[step.turn]))
        """Bytes the links take off the device while forward runs, at most."""
        self.backs = {
            op.block: i
            for i, op in enumerate(step.ops)
            if op.block in options and i != step.blocks[op.block].first
        }
        self.columns = [(b, build) for b, builds in options.items() for build in builds]
        self.matrix, self.rows = self._memory()

    def solve(self, limit: int) -> dict[int, Build] | None:
        """The fastest choice that keeps the limit; None if there is none."""
        blocks = list(self.options)
        one = coo_matrix(
            (
                np.ones(len(self.columns)),
                (
                    [blocks.index(b) for b, _ in self.columns],
                    np.arange(len(self.columns)),
                ),
            ),
            shape=(len(blocks), len(self.columns)),
        )
        room = (limit - self.levels[self.rows]) / _UNIT
        found = milp(
            np.array([build.seconds for _, build in self.columns]) * 1e3,
            constraints=[
                LinearConstraint(one.tocsr(), 1, 1),
                LinearConstraint(self.matrix, -np.inf, room),
            ],
            integrality=np.ones(len(self.columns)),
            bounds=Bounds(0, 1),
            options={"time_limit": SOLVE_S, "mip_rel_gap": 1e-3},
        )
        if found.x is None:
            return None
        chosen = (self.columns[i] for i in np.flatnonzero(found.x > 0.5))
        return {b: build for b, build in sorted(chosen, key=lambda x: x[0])}

    def _memory(self) -> tuple[object, list[int]]:
        """What each column adds to the level with the smallest builds, where it can matter."""
        rows = self._positions()
        table = np.zeros((len(rows), len(self.columns)))
        place = np.array(rows)
        for k, (b, build) in enumerate(self.columns):
            least, at, back = self.least[b], self.step.blocks[b].first, self.backs[b]
            more = build.saved_bytes - least.saved_bytes
            table[(at <= place) & (place <= back), k] += more
            table[place == at, k] += build.forward_bytes - least.forward_bytes
            table[place == back, k] += build.backward_bytes - least.backward_bytes
        return coo_matrix(table / _UNIT).tocsr(), rows

    def _positions(self) -> list[int]:
        """Ops of blocks, and of each run between them the one with the highest level."""
        edges = sorted({*(self.step.blocks[b].first for b in self.options), *self.backs.values()})
        rows = []
        for low, high in zip([-1, *edges], [*edges, len(self.levels)], strict=True):
            between = self.levels[low + 1 : high]
            rows += [low + 1 + int(between.argmax())] if len(between) else []
            rows += [high] if high < len(self.levels) else []
        return rows


_UNIT = float(1 << 20)


def first_hops(machine: Machine) -> list[Link]:
    """The links that lead away from the device."""
    routes = (machine.route(t.name) for t in machine.tiers if t.name != "device")
    return [route[0][0] for route in routes if route is not None]
