"""Chrome trace events of a timeline, which Perfetto opens."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from legroom.core.outcome import Timeline

Event = dict[str, Any]

_FIRST = ("compute", "device->host", "host->device")


def perfetto(timeline: Timeline, pid: int = 1) -> dict[str, Any]:
    """The timeline as one process: a thread per lane, a counter of device bytes by kind."""
    tids = {lane: tid for tid, lane in enumerate(lanes(timeline), start=1)}
    events = [*_names(timeline, pid, tids), *_bars(timeline, pid, tids), *_bytes(timeline, pid)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_perfetto(path: str | os.PathLike[str], *timelines: Timeline) -> Path:
    """Write timelines beside each other in one trace file; return its path."""
    events: list[Event] = []
    for pid, timeline in enumerate(timelines, start=1):
        events += perfetto(timeline, pid)["traceEvents"]
    target = Path(path)
    target.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return target


def lanes(timeline: Timeline) -> list[str]:
    """Names of the lanes: compute, then host copies, then the others as they appear."""
    seen = list(dict.fromkeys(span.lane for span in timeline.spans))
    return [x for x in _FIRST if x in seen] + [x for x in seen if x not in _FIRST]


def _names(timeline: Timeline, pid: int, tids: dict[str, int]) -> Iterator[Event]:
    yield _meta("process_name", pid, 0, {"name": f"legroom, {timeline.source}"})
    yield _meta("process_sort_index", pid, 0, {"sort_index": pid})
    for lane, tid in tids.items():
        yield _meta("thread_name", pid, tid, {"name": lane})
        yield _meta("thread_sort_index", pid, tid, {"sort_index": tid})


def _meta(name: str, pid: int, tid: int, args: dict[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _bars(timeline: Timeline, pid: int, tids: dict[str, int]) -> Iterator[Event]:
    for span in timeline.spans:
        start = _us(span.start_s)
        yield {
            "ph": "X",
            "name": span.label,
            "cat": span.kind or "span",
            "pid": pid,
            "tid": tids[span.lane],
            "ts": start,
            "dur": round(_us(span.end_s) - start, 3),
        }


def _bytes(timeline: Timeline, pid: int) -> Iterator[Event]:
    kinds = sorted(timeline.bytes_by_kind)
    for i, time_s in enumerate(timeline.times_s):
        sizes = {kind: timeline.bytes_by_kind[kind][i] for kind in kinds}
        yield {"ph": "C", "name": "device bytes", "pid": pid, "ts": _us(time_s), "args": sizes}


def _us(seconds: float) -> float:
    """Microseconds to the nanosecond, so that bars which touch still touch."""
    return round(seconds * 1e6, 3)
