"""Time of an op from its work and a machine's rates, where nothing was measured."""

from legroom.machine.spec import Machine


def op_time(machine: Machine, flops: float, traffic_bytes: float, dtype: str) -> float:
    """The longer of arithmetic and memory traffic, and never less than one launch."""
    arithmetic = flops / machine.rate(dtype) if flops else 0.0
    return max(arithmetic, traffic_bytes / machine.memory_bytes_per_s, machine.launch_s)


def update_time(machine: Machine, grad_bytes: int, state_bytes: int) -> float:
    """Of an optimizer that reads gradients, and reads and writes weights and its states."""
    return op_time(machine, 0, 3 * grad_bytes + 2 * state_bytes, "float32")
