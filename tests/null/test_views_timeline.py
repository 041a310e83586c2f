"""Perfetto trace of a timeline, field by field."""

import json
from pathlib import Path
from typing import Literal

from legroom.core.outcome import Span, Timeline
from legroom.views.timeline import lanes, perfetto, write_perfetto


def make_timeline(source: Literal["predicted", "measured"] = "predicted") -> Timeline:
    return Timeline(
        source=source,
        times_s=(0.0, 0.01),
        bytes_by_kind={"weight": (100, 100), "activation": (300, 500)},
        spans=(
            Span(lane="host->disk", start_s=0.02, end_s=0.03, label="spill", kind="copy"),
            Span(lane="compute", start_s=0.0, end_s=0.01, label="mm", kind="forward"),
            Span(lane="compute", start_s=0.01, end_s=0.0123456789, label="wait", kind="stall"),
            Span(lane="device->host", start_s=0.01, end_s=0.02, label="out"),
        ),
    )


def test_perfetto_fields() -> None:
    """Metadata, bars in microseconds and byte counters, field by field."""
    timeline = make_timeline()
    assert lanes(timeline) == ["compute", "device->host", "host->disk"]
    trace = perfetto(timeline)
    events = trace["traceEvents"]
    assert trace["displayTimeUnit"] == "ms"
    assert events[0] == {
        "ph": "M",
        "name": "process_name",
        "pid": 1,
        "tid": 0,
        "args": {"name": "legroom, predicted"},
    }
    threads = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert threads == lanes(timeline)
    bars = [e for e in events if e["ph"] == "X"]
    assert bars[2] == {
        "ph": "X",
        "name": "wait",
        "cat": "stall",
        "pid": 1,
        "tid": 1,
        "ts": 10000.0,
        "dur": 2345.679,
    }
    counters = [e for e in events if e["ph"] == "C"]
    assert len(counters) == 2
    assert counters[1] == {
        "ph": "C",
        "name": "device bytes",
        "pid": 1,
        "ts": 10000.0,
        "args": {"activation": 500, "weight": 100},
    }


def test_perfetto_file_holds_both_timelines(tmp_path: Path) -> None:
    """Predicted and measured are two processes of one file."""
    path = write_perfetto(tmp_path / "t.json", make_timeline(), make_timeline("measured"))
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "legroom, predicted", 2: "legroom, measured"}
