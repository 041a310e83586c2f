"""Keep all optimizer states on the host, and run every block again (ZeRO-Offload, Ren et al. 2021).

Nothing is searched: of all ways to cut the graph of a training step between two devices, the paper
takes the one that leaves 2 bytes of 16 a parameter on the device for the least traffic, whatever
the model. Activations are left to checkpoints. Here all states rest on the host and pass through
the device while it updates, and every block runs again in full. Neither looks at the budget.

Not run, and not counted: the update on the CPU (states would not travel at all), gradients that
leave as backward makes them, half-precision parameters that come back, the update that is a step
late, and more than one device. So gradients and parameters are on the device, and the link carries
states where the paper's carries gradients and parameters.
"""

from legroom.core.units import format_bytes
from legroom.memory.actions import Park, Recompute
from legroom.memory.parking import TIER, make_park, param_states
from legroom.memory.planner import POLICIES, Choice, Problem
from legroom.memory.trace import FULL


@POLICIES.register("zero_offload")
def zero_offload(problem: Problem) -> Choice:
    """Keep all optimizer states on the host, and run every block again."""
    actions, why = all_states(problem)
    again = all_blocks(problem)
    return Choice([*actions, *again], f"{why}; {len(again)} blocks recomputed in full")


def all_states(problem: Problem) -> tuple[list[Park], str]:
    """All optimizer states on the host, if there are any and there is a host; and in words."""
    total = sum(param_states(problem.step).values())
    if not total:
        return [], "the step has no optimizer states"
    if TIER not in problem.tiers():
        return [], "no host for optimizer states"
    park = make_park(problem.step, total)
    return [park], f"optimizer states of {format_bytes(park.num_bytes)} on the host"


def all_blocks(problem: Problem) -> list[Recompute]:
    """Every block that can run again, in full."""
    blocks = enumerate(problem.step.blocks)
    return [Recompute(block=b, variant=FULL) for b, x in blocks if x.variants and not x.barred]
