"""The mixed-integer program behind `auto`: variants by block, moves by storage, slots of time.

Solved in whole variants it is slow to prove what it found; in shares of variants it takes a tenth
of a second, and only a few blocks come out divided. Those are given one of their variants each, so
that over the blocks what is dropped adds up.
"""

from dataclasses import dataclass

import numpy as np

from legroom.memory.host import MOVE_S, WATCH_S
from legroom.memory.plan import replay_position
from legroom.memory.planner import Problem
from legroom.memory.policies.rows import Rows, Values
from legroom.memory.schedule import leave_position

SLOTS = 96
"""About how many slots of time the step is cut into."""
TIME_LIMIT_S = 0.8
GAP = 0.01
MOVE_PRICE = 0.01
"""A second on the link costs at least this: of two plans alike, take the one that moves less."""


@dataclass(frozen=True)
class Answer:
    """Chosen variants by block, and the share of each storage to move to a tier."""

    variants: dict[int, str]
    moves: dict[tuple[int, str], float]


class Program:
    """Columns and rows for one problem; `cut` adds what the simulator found."""

    def __init__(self, problem: Problem, storages: list[int]) -> None:
        self.problem, self.step, self.sim = problem, problem.step, problem.simulator
        self.scale = 1.0 / max(problem.limit, 1)
        self.cost: list[float] = []
        self.whole: list[bool] = []
        self.upper: list[float] = []
        self.edges = _slot_edges(problem)
        self._column_variants()
        self._column_moves(storages)
        self._column_links()
        self.late_host = self._column(1.0)
        self._spots()
        self._terms: dict[int, dict[int, float]] = {}
        """What choices take away at a position, where that was asked for."""

    # -- columns -----------------------------------------------------------------------------

    def _column(self, cost: float = 0.0, upper: float = np.inf, whole: bool = False) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.cost) - 1

    def _column_variants(self) -> None:
        self.variants: dict[tuple[int, int], int] = {}
        self.replay_at: dict[int, dict[int, int]] = {}
        for b, block in enumerate(self.step.blocks):
            for v, variant in enumerate(block.variants):
                self.variants[b, v] = self._column(variant.replay_s, 1.0, whole=True)
                self.replay_at.setdefault(b, {})[v] = replay_position(self.step, variant)

    def _column_moves(self, storages: list[int]) -> None:
        self.moves: dict[tuple[int, str], int] = {}
        self.leave = {s: leave_position(self.sim, s) for s in storages}
        self.need = {s: self._need(s) for s in storages}
        for tier in self.problem.tiers():
            for s in storages:
                seconds = self.step.storages[s].num_bytes / self._rate(tier)
                price = max(MOVE_PRICE, 2 * self.sim.machine.contention)
                self.moves[s, tier] = self._column(price * seconds, 1.0)

    def _need(self, storage: int) -> int:
        """First position that may need a storage: its use, or the replay of a block it is in."""
        blocks = {row.block for row in self.step.saves[storage]} & self.replay_at.keys()
        replays = (min(self.replay_at[b].values()) for b in blocks)
        return min((self.step.first_use(storage), *replays))

    def _column_links(self) -> None:
        count = len(self.edges) - 1
        self.flying, self.early, self.late_out, self.late_in = {}, {}, {}, {}
        for tier in self.problem.tiers():
            for q in range(count):
                self.flying[tier, q] = self._column()
                self.early[tier, q] = self._column()
                self.late_out[tier, q] = self._column(1.0)
                self.late_in[tier, q] = self._column(1.0)

    def _rate(self, tier: str) -> float:
        route = self.sim.routes[tier]
        assert route is not None
        return min(h.bytes_per_s for h in (*route[0], *route[1]))

    # -- rows --------------------------------------------------------------------------------

    def _spots(self) -> None:
        """Positions whose memory is bounded: the highest of each slot."""
        during = self.sim.shape([]).during
        self.during = during
        self.spots: dict[int, int] = {}
        for start, end in zip(self.edges, self.edges[1:], strict=False):
            if end > start:
                self.spots[start + int(during[start:end].argmax())] = 0
        self.replay_extra: dict[int, int] = {}

    def forget_cuts(self) -> None:
        """Demand no more than the budget itself."""
        self.spots, self.replay_extra = dict.fromkeys(self.spots, 0), {}

    def cut(self, position: int, over: int) -> None:
        """The simulator found this position too high by so much: demand that much more there."""
        position = min(position, len(self.step.ops) - 1)
        self.spots[position] = self.spots.get(position, 0) + int(over * 1.02)
        for b, places in self.replay_at.items():
            if position in places.values():
                self.replay_extra[b] = self.replay_extra.get(b, 0) + int(over * 1.02)

    def _slot(self, position: int) -> int:
        slot = int(np.searchsorted(self.edges, position, side="right")) - 1
        return min(max(slot, 0), len(self.edges) - 2)

    def _less(self, position: int) -> dict[int, float]:
        """What each choice takes away at a position, in shares of the budget."""
        if position not in self._terms:
            terms = self._gone(position) | self._away(position)
            self._terms[position] = {c: x * self.scale for c, x in terms.items()}
        return self._terms[position]

    def _gone(self, position: int) -> dict[int, float]:
        """Bytes each variant takes away at a position."""
        terms: dict[int, float] = {}
        for (b, v), column in self.variants.items():
            variant, back = self.step.blocks[b].variants[v], self.replay_at[b][v]
            if not self.step.blocks[b].first <= position < back:
                continue
            away = sum(
                self.step.storages[s].num_bytes
                for s in variant.drops
                if self.step.storages[s].release < position
            )
            held = sum(
                self.step.storages[s].num_bytes
                for s in self.step.blocks[b].inputs
                if self.step.storages[s].death < position
            )
            terms[column] = float(held - away)
        return terms

    def _away(self, position: int) -> dict[int, float]:
        """Bytes moves take away at a position: out in an earlier slot, needed in a later one."""
        q, terms = self._slot(position), {}
        start, end = self.edges[q], self.edges[min(q + 1, len(self.edges) - 1)]
        for (s, _), column in self.moves.items():
            storage = self.step.storages[s]
            if self.leave[s] < start and storage.release < position and self.need[s] >= end:
                terms[column] = -float(storage.num_bytes)
        for tier in self.problem.tiers():
            terms[self.early[tier, q]] = 1.0 / self.scale
            if q > 0:
                terms[self.flying[tier, q - 1]] = 1.0 / self.scale
        return terms

    def _memory_rows(self, rows: Rows, limit: int, more: dict[int, float]) -> None:
        for position, extra in self.spots.items():
            bound = limit - extra - int(self.during[position])
            rows.add(self._less(position) | more, bound * self.scale)
        for b, places in self.replay_at.items():
            position = next(iter(places.values()))
            terms = self._less(position) | more
            for v in places:
                variant = self.step.blocks[b].variants[v]
                extra = variant.replay_peak_bytes - variant.dropped_bytes
                terms[self.variants[b, v]] = extra * self.scale
            before = self.during[position] - self.sim.births[position] - self.sim.scratch[position]
            bound = limit - self.replay_extra.get(b, 0) - int(before)
            rows.add(terms, bound * self.scale)

    def _choice_rows(self, rows: Rows) -> None:
        for b in self.replay_at:
            rows.add({self.variants[b, v]: 1.0 for v in self.replay_at[b]}, 1.0)
        droppers: dict[int, list[int]] = {}
        for (b, v), column in self.variants.items():
            for s in self.step.blocks[b].variants[v].drops:
                droppers.setdefault(s, []).append(column)
        for s in self.leave:
            columns = [self.moves[s, t] for t in self.problem.tiers()] + droppers.get(s, [])
            rows.add(dict.fromkeys(columns, 1.0), 1.0)
        for tier in self.problem.tiers():
            terms = {
                self.moves[s, tier]: self.step.storages[s].num_bytes * self.scale
                for s in self.leave
            }
            rows.add(terms, self.problem.budget[tier] * self.scale)

    def _host_rows(self, rows: Rows) -> None:
        """The host's own work, where it is a matter: late if forward, or the step, has too much."""
        if not self.step.host_s:
            return
        host, blocks = self.sim.host, self.step.blocks
        variants = {c: blocks[b].variants[v] for (b, v), c in self.variants.items()}
        # A move has up to three blocks watched: where it is saved, waited for, and fetched.
        saves = len(self.step.saved) / max(len(blocks), 1)
        seconds = host.pace * (MOVE_S + 3 * saves * WATCH_S)
        moves = dict.fromkeys(self.moves.values(), seconds)
        terms = {c: host.pace * v.host_s - v.replay_s for c, v in variants.items()} | moves
        rows.add(terms | {self.late_host: -1.0}, self.step.compute_s - host.step_s)
        terms = {c: host.pace * v.noting_s for c, v in variants.items()}
        terms |= dict.fromkeys(moves, seconds / 2)
        forward_s = float(self.sim.until[host.turn]) - host.until_s[host.turn]
        rows.add(terms | {self.late_host: -1.0}, forward_s)

    def _link_rows(self, rows: Rows, share: float) -> None:
        count = len(self.edges) - 1
        until = self.sim.until
        for tier in self.problem.tiers():
            rate = self._rate(tier) * self.scale * share
            leaving = self._by_slot(tier, self.leave)
            needed = self._by_slot(tier, self.need)
            for q in range(count):
                seconds = float(until[self.edges[q + 1]] - until[self.edges[q]])
                work = {self.variants[k]: -rate * t for k, t in self._replays_in(q)}
                out = leaving[q] | {self.flying[tier, q]: -1.0, self.late_out[tier, q]: -rate}
                if q:
                    out[self.flying[tier, q - 1]] = 1.0
                rows.add(out | work, rate * seconds)
                if q:
                    back = needed[q] | {self.early[tier, q]: 1.0, self.early[tier, q - 1]: -1.0}
                    rows.add(back | work | {self.late_in[tier, q]: -rate}, rate * seconds)
                    here = needed[q] | {self.early[tier, q - 1]: -1.0}
                    rows.add(here | {self.late_in[tier, q]: -rate}, 0.0)

    def _by_slot(self, tier: str, position: dict[int, int]) -> list[dict[int, float]]:
        found: list[dict[int, float]] = [{} for _ in self.edges]
        for s, place in position.items():
            size = self.step.storages[s].num_bytes * self.scale
            found[min(self._slot(place), len(self.edges) - 2)][self.moves[s, tier]] = size
        return found

    def _replays_in(self, q: int) -> list[tuple[tuple[int, int], float]]:
        start, end = self.edges[q], self.edges[q + 1]
        return [
            ((b, v), self.step.blocks[b].variants[v].replay_s)
            for b, places in self.replay_at.items()
            for v, place in places.items()
            if start <= place < end
        ]

    # -- solving -----------------------------------------------------------------------------

    def solve(self, share: float = 1.0, whole: bool = True) -> Answer | None:
        """The cheapest choice within the budget, or None if there is none.

        `share` of the links' rate is counted on; if not `whole`, variants may be divided at first.
        """
        rows = Rows()
        self._memory_rows(rows, self.problem.limit, {})
        self._choice_rows(rows)
        self._link_rows(rows, share)
        self._host_rows(rows)
        return self._run(rows, np.array(self.cost), len(self.cost), whole)

    def smallest(self) -> list[Answer]:
        """The choice with the smallest peak, whatever it costs."""
        rows, peak = Rows(), len(self.cost)
        self._memory_rows(rows, 0, {peak: -1.0})
        self._choice_rows(rows)
        self._link_rows(rows, 1.0)
        cost = np.append(np.array(self.cost) * 1e-6, 1.0)
        answer = self._run(rows, cost, peak + 1)
        return [answer] if answer is not None else []

    def _run(
        self,
        rows: Rows,
        cost: Values,
        count: int,
        whole: bool = True,
    ) -> Answer | None:
        extra = count - len(self.cost)
        upper = [*self.upper, *[np.inf] * extra]
        wholes = [whole and one for one in (*self.whole, *[False] * extra)]
        x = rows.cheapest(cost, upper, wholes, time_limit_s=TIME_LIMIT_S, gap=GAP)
        return None if x is None else self._answer(x)

    def _answer(self, x: Values) -> Answer:
        shares: dict[int, dict[int, float]] = {}
        for (b, v), column in self.variants.items():
            if x[column] > 1e-6:
                shares.setdefault(b, {})[v] = float(x[column])
        chosen: dict[int, str] = {}
        debt, dropped = 0.0, set[int]()
        for b, by_variant in shares.items():
            variants = self.step.blocks[b].variants
            sizes = {v: float(variants[v].dropped_bytes) for v in by_variant}
            debt += sum(share * sizes[v] for v, share in by_variant.items())
            if sum(by_variant.values()) < 0.999:
                sizes[-1] = 0.0  # it stays as it is
            v = min(sizes, key=lambda v: abs(sizes[v] - debt))
            debt -= sizes[v]
            if v >= 0:
                chosen[b] = variants[v].name
                dropped.update(variants[v].drops)
        moves = {
            key: float(x[column])
            for key, column in self.moves.items()
            if x[column] > 1e-6 and key[0] not in dropped
        }
        return Answer(chosen, moves)


def _slot_edges(problem: Problem) -> list[int]:
    """Cut the step where block or phase changes, and wherever a slot would last too long."""
    ops, until = problem.step.ops, problem.simulator.until
    longest = float(until[-1]) / SLOTS
    edges, opened = [0], 0.0
    for i, op in enumerate(ops[1:], start=1):
        changed = (op.phase, op.block) != (ops[i - 1].phase, ops[i - 1].block)
        lasted = float(until[i]) - opened
        if (changed and lasted > longest / 4) or lasted > longest:
            edges.append(i)
            opened = float(until[i])
    return [*edges, len(ops)]
