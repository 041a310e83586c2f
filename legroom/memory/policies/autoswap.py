"""Move by a score of idle time and bytes, mixed by Bayesian search (AutoSwap, Zhang et al. 2019).

Candidates are tensors of a MiB or more that are idle while the step is at its peak. DOA is how long
one is idle beyond its copies; AOA that times its bytes (or over them, where it is below zero); WDOA
how many bytes are over the limit, and how long, while it is idle; SWDOA the same by what earlier
picks have left. Candidates leave by falling score until the peak fits. The mix of all four, each
brought to one scale, is searched by what the simulator says of the step: about thirty trials of a
Gaussian process. Copies are scheduled out in order of last use and in from the last one backwards.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from legroom.memory.actions import Move
from legroom.memory.gaps import Gap, assign, fewest, find_gaps, link_s
from legroom.memory.planner import POLICIES, Choice, Problem

Floats = npt.NDArray[np.float64]
Score = Callable[[Problem, Sequence[Gap]], Floats]
LEAST_BYTES = 1 << 20
LEAST_SHARE = 1e-3
"""Of the unplanned peak: candidates of small steps may be smaller."""
TRIALS, FIRST_TRIALS = 30, 8
DRAWS = 512
"""Points that each trial is chosen from."""
REACH = 0.7
"""Of the process: weights that differ by more say little of each other."""


def doa(problem: Problem, gaps: Sequence[Gap]) -> Floats:
    """Idle time beyond the copies there and back."""
    tier = problem.tiers()[0]
    copies = [
        link_s(problem.simulator, tier, gap.num_bytes, out=True)
        + link_s(problem.simulator, tier, gap.num_bytes, out=False)
        for gap in gaps
    ]
    return np.array([gap.seconds - x for gap, x in zip(gaps, copies, strict=True)])


def aoa(problem: Problem, gaps: Sequence[Gap]) -> Floats:
    """The same, weighed by bytes."""
    spare, sizes = doa(problem, gaps), np.array([gap.num_bytes for gap in gaps], dtype=float)
    found: Floats = np.where(spare >= 0, spare * sizes, spare / sizes)
    return found


def wdoa(problem: Problem, gaps: Sequence[Gap]) -> Floats:
    """Bytes over the limit while a tensor is idle, times how long."""
    area = _excess_area(problem, problem.simulator.shape([]).during)
    return np.array([area[gap.end] - area[gap.start] for gap in gaps])


def swdoa(problem: Problem, gaps: Sequence[Gap]) -> Floats:
    """The same by what those picked before have left; the first picked scores highest."""
    levels = problem.simulator.shape([]).during.astype(np.int64).copy()
    left, scores = list(range(len(gaps))), np.zeros(len(gaps))
    for rank in range(len(gaps)):
        area = _excess_area(problem, levels)
        best = max(left, key=lambda i: (area[gaps[i].end] - area[gaps[i].start], -i))
        if area[gaps[best].end] - area[gaps[best].start] <= 0:
            break
        scores[best] = len(gaps) - rank
        left.remove(best)
        levels[gaps[best].start : gaps[best].end] -= gaps[best].num_bytes
    return scores


def _excess_area(problem: Problem, levels: npt.NDArray[np.int64]) -> Floats:
    """Up to each position, bytes over the limit times time."""
    times = np.diff(problem.simulator.until)
    over = np.maximum(levels[: len(times)] - problem.limit, 0)
    return np.concatenate(([0.0], np.cumsum(over * times)))


SCORES: dict[str, Score] = {"doa": doa, "aoa": aoa, "wdoa": wdoa, "swdoa": swdoa}


def by_score(name: str, problem: Problem) -> Choice:
    """Move what scores highest, as little as fits."""
    gaps = candidates(problem)
    moves = _picked(problem, gaps, SCORES[name](problem, gaps)) if gaps else []
    return Choice(list(moves), f"{len(moves)} of {len(gaps)} candidates moved, by {name.upper()}")


for _name in SCORES:
    _policy = partial(by_score, _name)
    _policy.__doc__ = f"Move tensors by AutoSwap's score {_name.upper()}, as few as fit."
    POLICIES.register(f"autoswap_{_name}")(_policy)


@POLICIES.register("autoswap")
def autoswap(problem: Problem) -> Choice:
    """Move tensors by a mix of AutoSwap's four scores that is searched on the simulator."""
    gaps = candidates(problem)
    if not gaps or problem.fits([]):
        return Choice([], "everything fits as it is" if gaps else "nothing can be moved")
    table = np.stack([_scaled(score(problem, gaps)) for score in SCORES.values()])

    def cost(weights: Floats) -> tuple[float, list[Move]]:
        moves = _picked(problem, gaps, weights @ table)
        over = max(problem.simulator.shape(moves).peak - problem.limit, 0) / max(problem.limit, 1)
        return problem.simulator.time(moves) / (problem.step.compute_s or 1.0) + 10 * over, moves

    weights, moves = search(cost, len(SCORES), time.monotonic() + problem.time_limit_s)
    mix = ", ".join(f"{x:+.2f} {n.upper()}" for n, x in zip(SCORES, weights, strict=True))
    return Choice(list(moves), f"{len(moves)} of {len(gaps)} candidates moved, by {mix}")


def candidates(problem: Problem) -> list[Gap]:
    """Tensors worth a copy that are idle at the peak."""
    if not problem.tiers():
        return []
    during = problem.simulator.shape([]).during
    peak, at = int(during.max(initial=0)), int(during.argmax())
    gaps = find_gaps(problem, min(LEAST_BYTES, int(LEAST_SHARE * peak)))
    return [gap for gap in gaps if gap.start <= at < gap.end]


def _scaled(scores: Floats) -> Floats:
    spread = scores.std()
    return (scores - scores.mean()) / spread if spread > 0 else np.zeros_like(scores)


def _picked(problem: Problem, gaps: Sequence[Gap], scores: Floats) -> list[Move]:
    """Those of the highest scores, as few as keep the load under the limit."""
    order = sorted(range(len(gaps)), key=lambda i: (-scores[i], i))
    levels = problem.simulator.shape([]).during.copy()
    chosen = []
    for i in order:
        if levels.max(initial=0) <= problem.limit:
            break
        chosen.append(gaps[i])
        levels[gaps[i].start : gaps[i].end] -= gaps[i].num_bytes
    moves = assign(problem, chosen)
    if problem.fits(moves):
        return moves

    def picked(count: int) -> list[Move]:
        return assign(problem, [gaps[i] for i in order[:count]])

    return fewest(problem, len(order), picked, len(chosen))  # copies under way take room, too


def search(
    cost: Callable[[Floats], tuple[float, list[Move]]], count: int, until: float = math.inf
) -> tuple[Floats, list[Move]]:
    """The best weights of -1 to 1 that a Gaussian process finds in time, and what they gave."""
    draw = np.random.default_rng(0)
    points: list[Floats] = [*np.eye(count), *draw.uniform(-1, 1, (FIRST_TRIALS - count, count))]
    found = [cost(points[0])]
    for point in points[1:]:
        if time.monotonic() < until:
            found.append(cost(point))
    del points[len(found) :]
    while len(points) < TRIALS and time.monotonic() < until:
        values = np.array([value for value, _ in found])
        fresh = draw.uniform(-1, 1, (DRAWS, count))
        points.append(fresh[int(_gains(np.array(points), values, fresh).argmax())])
        found.append(cost(points[-1]))
    best = min(range(len(points)), key=lambda i: (found[i][0], i))
    return points[best], found[best][1]


def _gains(points: Floats, values: Floats, fresh: Floats) -> Floats:
    """How much better than the best so far each new point is expected to be."""
    from scipy.stats import norm

    spread = values.std() or 1.0
    scaled = (values - values.mean()) / spread
    inner = _kernel(points, points) + 1e-6 * np.eye(len(points))
    cross = _kernel(fresh, points)
    weights = np.linalg.solve(inner, cross.T)
    mean = weights.T @ scaled
    deviation = np.sqrt(np.maximum(1.0 - np.einsum("ij,ji->i", cross, weights), 1e-12))
    gain = scaled.min() - mean
    found: Floats = gain * norm.cdf(gain / deviation) + deviation * norm.pdf(gain / deviation)
    return found


def _kernel(a: Floats, b: Floats) -> Floats:
    squares: Floats = ((a[:, None, :] - b[None, :, :]) ** 2).sum(-1)
    return np.exp(-squares / (2 * REACH**2))
