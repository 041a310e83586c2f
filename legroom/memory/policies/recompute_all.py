"""Recompute every block in full: the least memory that needs no link."""

from legroom.memory.actions import Recompute
from legroom.memory.planner import POLICIES, Choice, Problem
from legroom.memory.trace import FULL


@POLICIES.register("recompute_all")
def recompute_all(problem: Problem) -> Choice:
    """Recompute every block in full, as checkpointing each block does."""
    blocks = [b for b, block in enumerate(problem.step.blocks) if block.variants]
    actions = [Recompute(block=b, variant=FULL) for b in blocks]
    return Choice(list(actions), f"all {len(actions)} blocks recomputed in full")
