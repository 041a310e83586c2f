"""Keep what is needed soonest, move the rest by its life (Meng et al. 2017).

Feature maps are met from the loss backwards, and stay while a threshold of bytes lasts; all that
were made before those leave as soon as forward is done with them. Each comes back when the latest
op has ended that still leaves its copy enough time. The paper gives no rule for the threshold: it
is the largest here that keeps the budget. Nor does it count on a link that is busy: copies do queue
here, so triggers may come too late, as they would there. Its special case, running additive
attention again, is not built.
"""

from bisect import bisect_left

from legroom.memory.actions import Move
from legroom.memory.gaps import Gap, fewest, find_gaps, link_s, make_move, nearest_tier
from legroom.memory.planner import POLICIES, Choice, Problem


@POLICIES.register("meng17")
def meng17(problem: Problem) -> Choice:
    """Move the longest-lived tensors, as few as fit, and fetch each just in time."""
    gaps = sorted(find_gaps(problem), key=lambda gap: (-gap.end, gap.start))
    moves = fewest(problem, len(gaps), lambda n: _moves(problem, gaps[:n]))
    return Choice(list(moves), f"{len(moves)} of {len(gaps)} tensors moved, the longest-lived")


def _moves(problem: Problem, gaps: list[Gap]) -> list[Move]:
    simulator, room, found = problem.simulator, dict[str, int](), []
    for gap in gaps:
        tier = nearest_tier(problem, gap.num_bytes, room)
        if tier is not None:
            there_s = link_s(simulator, tier, gap.num_bytes, out=True)
            back_s = link_s(simulator, tier, gap.num_bytes, out=False)
            leave = bisect_left(simulator.until_s, gap.start_s + there_s)
            trigger = max(bisect_left(simulator.until_s, gap.end_s - back_s) - 1, gap.start)
            found.append(make_move(problem.step, gap, tier, leave, trigger))
    return found
