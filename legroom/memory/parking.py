"""Optimizer states on the host between updates: what that frees, what it takes, how it is planned.

States are needed only while the optimizer runs. Parked, they pass through the device then, a few
at a time: copied in, updated by the optimizer itself, copied out. Every bit is as it would be.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from legroom.machine.spec import Machine
from legroom.memory.actions import Action, Park
from legroom.memory.trace import Kind, Phase, Step, Storage

TIER = "host"
LEAST_BYTES = 1 << 10
"""Smaller states, such as counts of steps, stay where they are."""
WAVE_BYTES, WAVES = 128 << 20, 16
"""States that pass through the device together: so many bytes, or one of so many waves."""
ALIVE = 3
"""Waves on the device at once: one comes, one is updated, one goes."""


def param_states(step: Step) -> dict[str, int]:
    """Bytes an optimizer keeps for each parameter, by its name."""
    found: dict[str, int] = {}
    for s in step.storages:
        if s.kind is Kind.STATE and s.birth < 0 and s.num_bytes >= LEAST_BYTES:
            name = param_of(s.name)
            found[name] = found.get(name, 0) + s.num_bytes
    return found


def param_of(state: str) -> str:
    """Whose state it is: `layer.weight` of `layer.weight.exp_avg`."""
    return state.rpartition(".")[0]


def is_state_of(storage: Storage, params: Collection[str]) -> bool:
    """Whether it is there before the step as a state that one of these parameters has."""
    large = storage.birth < 0 and storage.num_bytes >= LEAST_BYTES
    return large and storage.kind is Kind.STATE and param_of(storage.name) in params


def make_park(step: Step, num_bytes: int) -> Park:
    """Park so many bytes or a few more, with no parameter's states in part."""
    sizes = param_states(step)
    params = _pick(sizes, num_bytes)
    total = sum(sizes[name] for name in params)
    wave = max(min(WAVE_BYTES, total // WAVES), 1)
    waves = [sum(row) for row in pack([sizes[name] for name in params], wave)]
    window = max((sum(waves[i : i + ALIVE]) for i in range(len(waves))), default=0)
    stay = sum(sizes.values()) - total
    at_once = max(stay, *waves) / (stay + total) if waves else 1.0
    return Park(
        params=params, num_bytes=total, wave_bytes=wave, window_bytes=window, at_once=at_once
    )


def _pick(sizes: Mapping[str, int], num_bytes: int) -> tuple[str, ...]:
    """The largest that are not too much, and the smallest that fills what is left."""
    left, picked, others = num_bytes, [], []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if sizes[name] <= left:
            left -= sizes[name]
            picked.append(name)
        else:
            others.append(name)
    if left > 0 and others:
        picked.append(others[-1])
    return tuple(picked)


def pack(sizes: Sequence[int], wave_bytes: int) -> list[list[int]]:
    """Cut a row of sizes into waves; one that is larger than a wave is one by itself."""
    waves: list[list[int]] = []
    for size in sizes:
        if not waves or sum(waves[-1]) + size > wave_bytes:
            waves.append([])
        waves[-1].append(size)
    return waves


def update_position(step: Step) -> int:
    """Where the optimizer begins."""
    return next((i for i, op in enumerate(step.ops) if op.phase is Phase.UPDATE), len(step.ops))


def without_states(step: Step, park: Park) -> Step:
    """The same step with these states elsewhere, for a policy to plan the rest."""
    gone = set(park.params)
    storages = (
        msgspec.structs.replace(s, num_bytes=0)
        if s.kind is Kind.STATE and s.num_bytes >= LEAST_BYTES and param_of(s.name) in gone
        else s
        for s in step.storages
    )
    ops = (
        msgspec.structs.replace(
            op, workspace_bytes=int(op.workspace_bytes * park.at_once) + park.window_bytes
        )
        if op.phase is Phase.UPDATE
        else op
        for op in step.ops
    )
    return msgspec.structs.replace(step, storages=tuple(storages), ops=tuple(ops))


def with_states(step: Step, like: Step | None) -> Step:
    """A step from before the first update: with the states that a fake one foresaw."""
    if like is None or param_states(step):
        return step
    update, end = update_position(step), len(step.ops)
    kept = (  # what the update made and left there are those states
        msgspec.structs.replace(s, num_bytes=0) if s.birth >= update and s.death >= end else s
        for s in step.storages
    )
    states = (
        msgspec.structs.replace(s, release=end, death=end)
        for s in like.storages
        if s.kind is Kind.STATE and s.birth < 0
    )
    return msgspec.structs.replace(step, storages=(*kept, *states)).check()


def held_fast(step: Step, names: Collection[str]) -> Step:
    """The same step with only these parameters' states to be parked; others are as any tensors."""
    storages = (
        msgspec.structs.replace(s, kind=Kind.OTHER)
        if s.kind is Kind.STATE and param_of(s.name) not in names
        else s
        for s in step.storages
    )
    return msgspec.structs.replace(step, storages=tuple(storages))


def park_s(machine: Machine, park: Park) -> float:
    """How long the update takes more: both directions side by side, the first and last alone."""
    route = machine.route(TIER)
    assert route is not None, f"no road to {TIER}"
    out, back = (min(hop.bytes_per_s for hop in way) for way in route)
    roots = {hop.root for way in route for hop in way}
    caps = [machine.duplex[root] for root in roots if root in machine.duplex]
    size, wave = park.num_bytes, park.window_bytes / ALIVE
    together = max(size / out, size / back, *(2 * size / cap for cap in caps))
    return together + wave / min(out, back)


def parks(actions: Sequence[Action]) -> list[Park]:
    """Those among some actions: one at most."""
    return [a for a in actions if isinstance(a, Park)]
