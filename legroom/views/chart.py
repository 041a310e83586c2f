"""The numbers behind the page's charts, thinned out so that a page stays small."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from legroom.core.outcome import Span, Timeline
from legroom.views.timeline import lanes

MAX_SPANS = 5000
"""Bars on the page, all lanes together; the longest stay."""
MAX_BUCKETS = 1200
"""Memory samples are kept by first, lowest and highest of each of so many buckets."""
MAX_LABEL = 120
STACK = ("other", "weight", "state", "input", "gradient", "activation", "temporary")
"""Kinds from the bottom up: what stays lies below what comes and goes."""
SPAN_KINDS = ("forward", "backward", "update", "recompute", "stall", "copy")

Json = dict[str, Any]


def chart_data(
    predicted: Timeline, measured: Timeline | None, lines: Mapping[str, int], budget: str
) -> Json:
    """What the page's script draws; `lines` are levels by name, `budget` is the main one."""
    timelines = [x for x in (predicted, measured) if x is not None]
    total = totals(predicted)
    top = max(range(len(total)), key=total.__getitem__, default=0)
    keep = _thin_samples(total)
    labels: dict[str, int] = {}
    kinds = {k: i for i, k in enumerate(_span_kinds(timelines))}
    limit = MAX_SPANS // len(timelines)
    return {
        "end": max((_end(x) for x in timelines), default=0.0) or 1e-9,
        "peak": {
            "index": keep.index(top) if keep else 0,
            "time": _seconds(predicted.times_s[top]) if total else 0,
            "bytes": total[top] if total else 0,
        },
        "times": [_seconds(predicted.times_s[i]) for i in keep],
        "kinds": _kinds(predicted, keep),
        "predictedEnd": _end(predicted),
        "measured": _line(measured),
        "lines": [{"label": k, "bytes": v, "main": k == budget} for k, v in lines.items()],
        "groups": [_group(x, limit, labels, kinds) for x in timelines if x.spans],
        "labels": list(labels),
        "spanKinds": list(kinds),
        "thinned": sum(max(0, len(x.spans) - limit) for x in timelines),
    }


def totals(timeline: Timeline) -> list[int]:
    """Device bytes of all kinds together, at each sample."""
    return [sum(column) for column in zip(*timeline.bytes_by_kind.values(), strict=True)]


def stacked(kinds: Iterable[str]) -> list[str]:
    """Kinds from the bottom of the stack up."""
    names = list(kinds)
    return [k for k in STACK if k in names] + sorted(k for k in names if k not in STACK)


def _span_kinds(timelines: Iterable[Timeline]) -> list[str]:
    seen = {span.kind for timeline in timelines for span in timeline.spans}
    return [k for k in SPAN_KINDS if k in seen] + sorted(seen.difference(SPAN_KINDS))


def _end(timeline: Timeline) -> float:
    return _seconds(max((*timeline.times_s[-1:], *(s.end_s for s in timeline.spans)), default=0.0))


def _kinds(timeline: Timeline, keep: Sequence[int]) -> list[Json]:
    columns = timeline.bytes_by_kind
    return [{"name": k, "values": [columns[k][i] for i in keep]} for k in stacked(columns)]


def _line(timeline: Timeline | None) -> Json | None:
    if timeline is None:
        return None
    total = totals(timeline)
    keep = _thin_samples(total)
    times = [_seconds(timeline.times_s[i]) for i in keep]
    return {"times": times, "total": [total[i] for i in keep], "end": _end(timeline)}


def _thin_samples(total: Sequence[int]) -> list[int]:
    """Indices to keep, in order; the highest of all is always among them."""
    if len(total) <= 3 * MAX_BUCKETS:
        return list(range(len(total)))
    edges = [len(total) * k // MAX_BUCKETS for k in range(MAX_BUCKETS + 1)]
    keep = {0, len(total) - 1}
    for low, high in pairwise(edges):
        bucket = range(low, high)
        keep.add(low)
        keep.add(min(bucket, key=total.__getitem__))
        keep.add(max(bucket, key=total.__getitem__))
    return sorted(keep)


def _group(timeline: Timeline, limit: int, labels: dict[str, int], kinds: dict[str, int]) -> Json:
    longest = sorted(timeline.spans, key=lambda s: s.start_s - s.end_s)[:limit]
    rows: dict[str, list[list[float]]] = {}
    for span in sorted(longest, key=lambda s: s.start_s):
        label = labels.setdefault(_short(span.label), len(labels))
        bar = [_seconds(span.start_s), _seconds(span.end_s), label, kinds[span.kind]]
        rows.setdefault(span.lane, []).append(bar)
    found = [
        {"name": lane, "busy": _busy(timeline.spans, lane), "spans": rows.get(lane, [])}
        for lane in lanes(timeline)
    ]
    return {"title": timeline.source, "lanes": found}


def _busy(spans: Iterable[Span], lane: str) -> float:
    """Seconds in which the lane does something, stalls left out."""
    total, until = 0.0, 0.0
    mine = ((s.start_s, s.end_s) for s in spans if s.lane == lane and s.kind != "stall")
    for start, end in sorted(mine):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return _seconds(total)


def _short(label: str) -> str:
    if len(label) <= MAX_LABEL:
        return label
    return f"{label[: MAX_LABEL // 2]}...{label[-(MAX_LABEL // 2 - 3) :]}"


def _seconds(time_s: float) -> float:
    """To the nanosecond, which keeps the page small."""
    return round(time_s, 9)
