"""A simulated step as a timeline: device bytes by kind over time, and who was busy when."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from legroom.core.outcome import Span, Timeline
from legroom.memory.actions import Action, Compress, Move, Park, Recompute, compressed_bytes
from legroom.memory.parking import update_position
from legroom.memory.plan import away_span, held_inputs
from legroom.memory.play import Play
from legroom.memory.simulate import Levels, Simulator
from legroom.memory.trace import Kind, Step

MAX_POINTS = 1500

Times = npt.NDArray[np.float64]
Columns = dict[str, Levels]


def predicted_timeline(simulator: Simulator, actions: Sequence[Action]) -> Timeline:
    """Play the plan once more and keep what happened."""
    play = Play(simulator, actions)
    play.run()
    times = _op_times(simulator, play)
    levels = _levels(simulator, actions)
    shape = simulator.shape(actions)
    replays = [(r.position, peak) for r, peak in shape.replays]
    points = _points(len(simulator.step.ops), shape.during)
    moments, columns = _columns(times, levels, points, replays, simulator)
    return Timeline(
        source="predicted",
        times_s=tuple(moments),
        bytes_by_kind={kind: tuple(values) for kind, values in columns.items() if any(values)},
        spans=tuple(_spans(simulator, play, times)),
    )


def _op_times(simulator: Simulator, play: Play) -> Times:
    """When each position is reached, stalls and replays included."""
    times = simulator.until.copy()
    late, mark = 0.0, 0
    for position, now_s in play.position_s:
        times[mark:position] += late
        late, mark = now_s - float(simulator.until[position]), position
    times[mark:] += late
    return times


def _levels(simulator: Simulator, actions: Sequence[Action]) -> Columns:
    step, size = simulator.step, len(simulator.step.ops) + 3
    deltas = {kind.value: np.zeros(size, dtype=np.int64) for kind in Kind}
    for s in step.storages:
        deltas[s.kind.value][max(s.birth, 0)] += s.num_bytes
        deltas[s.kind.value][s.death + 1] -= s.num_bytes
    held = held_inputs(step, [a for a in actions if isinstance(a, Recompute)])
    for i, (_, until) in held.items():
        if step.storages[i].death < until:
            _shift(deltas, step, i, step.storages[i].death + 1, until, +1)
    for a in actions:
        if isinstance(a, Move):
            _shift(deltas, step, a.storage, *away_span(step, a), -1)
            _end(deltas, step, a.storage)
        elif isinstance(a, Compress):
            _shift(
                deltas,
                step,
                a.storage,
                step.storages[a.storage].release + 1,
                step.first_use(a.storage),
                -1,
            )
            _end(deltas, step, a.storage)
            small = compressed_bytes(
                a.codec, step.storages[a.storage].num_bytes, step.storages[a.storage].dtype
            )
            deltas["activation"][step.packed(a.storage)] += small
            deltas["activation"][step.storages[a.storage].death + 1] -= small
        elif isinstance(a, Park):
            deltas["state"][0] -= a.num_bytes
            deltas["state"][update_position(step)] += a.window_bytes
            deltas["state"][len(step.ops) + 1] -= a.window_bytes
    for replay in simulator.replays(actions):
        for i in replay.variant.drops:
            gone = max(step.storages[i].release + 1, held.get(i, (0, 0))[1])
            _shift(deltas, step, i, gone, replay.position, -1)
            _end(deltas, step, i)
    return {kind: np.cumsum(delta) for kind, delta in deltas.items()}


def _end(deltas: Columns, step: Step, storage: int) -> None:
    """A copy that came back goes as soon as nobody needs it."""
    row = step.storages[storage]
    _shift(deltas, step, storage, row.last + 1, row.death + 1, -1)


def _shift(
    deltas: Columns,
    step: Step,
    storage: int,
    start: int,
    end: int,
    sign: int,
) -> None:
    row = step.storages[storage]
    deltas[row.kind.value][start] += sign * row.num_bytes
    deltas[row.kind.value][end] -= sign * row.num_bytes


def _points(count: int, during: Levels) -> list[int]:
    """Which ops to draw: all, or the highest of each stretch."""
    if count <= MAX_POINTS:
        return list(range(count))
    edges = np.linspace(0, count, MAX_POINTS + 1).astype(int)
    pairs = zip(edges, edges[1:], strict=False)
    return [int(a + during[a:b].argmax()) for a, b in pairs if b > a]


def _columns(
    times: Times,
    levels: Columns,
    points: list[int],
    replays: list[tuple[int, int]],
    simulator: Simulator,
) -> tuple[list[float], dict[str, list[int]]]:
    """Levels at each point, scratch and replays counted as temporaries."""
    columns: dict[str, list[int]] = {kind: [] for kind in levels}
    moments: list[float] = []
    extra = dict(replays)
    for p in points:
        if p in extra:
            _point(columns, levels, p, extra[p] - sum(int(v[p]) for v in levels.values()))
            moments.append(float(times[p]))
        _point(columns, levels, p, int(simulator.scratch[p]))
        moments.append(float(times[p]))
    return moments, columns


def _point(
    columns: dict[str, list[int]],
    levels: Columns,
    position: int,
    extra: int,
) -> None:
    for kind, values in columns.items():
        values.append(int(levels[kind][position]))
    columns["temporary"][-1] += max(extra, 0)


def _spans(simulator: Simulator, play: Play, times: Times) -> list[Span]:
    ops = simulator.step.ops
    spans = [
        _span("compute", times[i + 1] - op.time_s, times[i + 1], f"{op.module} {op.name}", op.phase)
        for i, op in enumerate(ops)
        if op.time_s > 0
    ]
    for what, start, end, index in play.spans:
        if end > start:
            kind = "stall" if what == "stall" else "recompute"
            label = f"{what} {_subject(simulator.step, play, what, index)}"
            spans.append(_span("compute", start, end, label, kind))
    for road, storage, transfer in play.transfers:
        if transfer.done_s >= 0:
            name = simulator.step.storages[storage].name
            spans.append(_span(road, transfer.started_s, transfer.done_s, name, "copy"))
    return spans


def _span(lane: str, start: float, end: float, label: str, kind: str) -> Span:
    return Span(
        lane=lane, start_s=float(start), end_s=float(end), label=label.strip(), kind=str(kind)
    )


def _subject(step: Step, play: Play, what: str, index: int) -> str:
    """The full name of what a stall or a replay is about."""
    if what == "recompute":
        return step.blocks[play.replays[index].block].name
    storage = play.codes[index].storage if what == "compress" else index
    return step.storages[storage].name
