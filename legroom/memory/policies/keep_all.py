"""Change nothing: the unplanned step, as a floor for time and a ceiling for memory."""

from legroom.memory.planner import POLICIES, Choice, Problem


@POLICIES.register("keep_all")
def keep_all(problem: Problem) -> Choice:
    """Keep every saved tensor where it is."""
    return Choice([], "every saved tensor stays on the device")
