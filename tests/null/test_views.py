"""Tables and page of one small step whose every number is known."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from rich.table import Table

from legroom.core.outcome import ActionCost, Comparison, Outcome, Point, Span, Timeline
from legroom.memory.actions import Compress, Move, Recompute
from legroom.memory.plan import Plan
from legroom.memory.trace import Block, Kind, Op, Phase, Saved, Step, Storage, Variant
from legroom.views.blocks import block_rows, block_states, blocks_table
from legroom.views.chart import MAX_SPANS, chart_data
from legroom.views.page import family, page, write_page
from legroom.views.peak import find_peak
from legroom.views.table import (
    comparison_table,
    costs_table,
    plans_table,
    to_text,
)

MIB = 2**20
HOSTILE = "</script><b onclick=\"x\">[red]& 'q'"


def make_step(name: str = "layers.0") -> Step:
    """Two blocks forward and backward: 610 MiB at op 1, when both activations are there."""
    full = Variant(name="full", drops=(3,), replays=(1,), last=1, dropped_bytes=200 * MIB)
    return Step(
        model="tiny",
        signature="x[2]",
        machine="by hand",
        capture="fake",
        ops=(
            Op("mm", name, Phase.FORWARD, 0, 0.01, (0, 1), (2,)),
            Op("relu", "layers.1", Phase.FORWARD, 1, 0.01, (2,), (3,)),
            Op("relu_back", "layers.1", Phase.BACKWARD, 1, 0.01, (3,), ()),
            Op("mm_back", name, Phase.BACKWARD, 0, 0.01, (2,), (4,), 7 * MIB),
        ),
        storages=(
            Storage("weight", 100 * MIB, Kind.WEIGHT, -1, 4, 4, "float32"),
            Storage("x", 10 * MIB, Kind.INPUT, -1, 4, 4, "float32"),
            Storage(f"{name}.out", 300 * MIB, Kind.ACTIVATION, 0, 1, 3, "float32"),
            Storage("layers.1.out", 200 * MIB, Kind.ACTIVATION, 1, 1, 2, "float32"),
            Storage("weight.grad", 100 * MIB, Kind.GRADIENT, 3, 4, 4, "float32"),
        ),
        saved=(Saved(2, 0, 0, 1, (3,)), Saved(3, 1, 0, 2, (2,))),
        blocks=(
            Block(module=name, first=0, last=0, inputs=(1,)),
            Block(module="layers.1", group=1, first=1, last=1, inputs=(2,), variants=(full,)),
        ),
    ).check()


def make_outcome(**changes: object) -> Outcome:
    outcome = Outcome(
        source="predicted",
        policy="auto",
        peak_bytes={"device": 610 * MIB, "host": 300 * MIB},
        step_s=0.05,
        compute_s=0.04,
        stall_s=0.002,
        recompute_s=0.008,
        moved_bytes={"device->host": 300 * MIB, "host->device": 300 * MIB},
        costs=(
            ActionCost(label="recompute layers.1", freed_bytes=200 * MIB, recompute_s=0.008),
            ActionCost(
                label="move layers.0.out to host",
                freed_bytes=300 * MIB,
                moved_bytes=300 * MIB,
                stall_s=0.002,
            ),
        ),
        peak_at="relu in layers.1 (forward)",
        peak_parts={"weight": 100 * MIB, "input": 10 * MIB, "activation": 500 * MIB},
    )
    return msgspec.structs.replace(outcome, **changes)


def make_plan(step: Step, **changes: object) -> Plan:
    plan = Plan(
        policy="auto",
        why="least time",
        machine="box",
        model=step.model,
        budget={"device": 640 * MIB},
        actions=(
            Move(storage=2, tier="host", out_start=1, out_wait=2, in_start=3, in_wait=3),
            Recompute(block=1, variant="full"),
        ),
        predicted=make_outcome(),
        planning_s=0.25,
    )
    return msgspec.structs.replace(plan, **changes)


def make_timeline(source: str = "predicted", name: str = "layers.0") -> Timeline:
    return Timeline(
        source="measured" if source == "measured" else "predicted",
        times_s=(0.0, 0.01, 0.02, 0.05),
        bytes_by_kind={
            "activation": (300 * MIB, 500 * MIB, 200 * MIB, 300 * MIB),
            "weight": (100 * MIB,) * 4,
        },
        spans=(
            Span(lane="host->disk", start_s=0.02, end_s=0.03, label="spill", kind="copy"),
            Span(lane="compute", start_s=0.0, end_s=0.01, label=f"mm {name}", kind="forward"),
            Span(lane="compute", start_s=0.01, end_s=0.0123456789, label="wait", kind="stall"),
            Span(lane="device->host", start_s=0.01, end_s=0.02, label="out", kind="copy"),
        ),
    )


def make_comparison() -> Comparison:
    measured = make_outcome(
        source="measured",
        peak_bytes={"device": 600 * MIB, "host": 300 * MIB},
        step_s=0.0625,
        stall_s=0.0,
    )
    unlimited = make_outcome(
        peak_bytes={"device": 610 * MIB}, step_s=0.04, stall_s=0.0, recompute_s=0.0, moved_bytes={}
    )
    return Comparison(predicted=make_outcome(), measured=measured, unlimited=unlimited)


def cells(table: Table) -> list[list[str]]:
    """The table's cells as plain text, row by row."""
    columns = [[getattr(c, "plain", c) for c in column.cells] for column in table.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def test_comparison_cells() -> None:
    """Predicted, measured, error and unlimited stand in one row per quantity."""
    table = comparison_table(make_comparison(), make_plan(make_step()))
    heads = [str(column.header) for column in table.columns]
    assert heads == ["", "predicted", "measured", "error", "unlimited"]
    assert str(table.title) == "tiny: auto, fits in 640.0 MiB"
    assert cells(table) == [
        ["peak", "610.0 MiB", "600.0 MiB", "+1.7 %", "610.0 MiB"],
        ["peak, host", "300.0 MiB", "300.0 MiB", "+0.0 %", "0 B"],
        ["step time", "50.0 ms", "62.5 ms", "-20.0 %", "40.0 ms"],
        ["bytes moved", "600.0 MiB", "600.0 MiB", "+0.0 %", "0 B"],
        ["recomputed time", "8.00 ms", "8.00 ms", "+0.0 %", "0 s"],
        ["stall", "2.00 ms", "0 s", "-", "0 s"],
    ]


def test_comparison_without_measurement() -> None:
    """What was not measured shows a dash, in every row."""
    rows = cells(comparison_table(Comparison(predicted=make_outcome())))
    assert len(rows) == 6
    assert all(row[2:] == ["-", "-", "-"] for row in rows)


def test_costs_largest_first_and_rest_summed() -> None:
    """The action that freed most comes first; what is cut off is one row with its sums."""
    outcome = make_outcome()
    big = ["move layers.0.out to host", "300.0 MiB", "300.0 MiB", "2.00 ms", "-"]
    assert cells(costs_table(outcome)) == [
        big,
        ["recompute layers.1", "200.0 MiB", "-", "-", "8.00 ms"],
    ]
    assert cells(costs_table(outcome, limit=1)) == [
        big,
        ["1 more", "200.0 MiB", "-", "-", "8.00 ms"],
    ]


def test_plans_cells() -> None:
    """One row per policy; a failed one has no numbers, and its reason stands below."""
    plan = make_plan(make_step())
    tight = make_plan(make_step(), policy="keep_all", budget={"device": 600 * MIB})
    lossy = make_plan(
        make_step(),
        policy="gist",
        actions=(Compress(storage=2, codec="fp8"),),
        simulate_only=("pools",),
    )
    table = plans_table([plan, ("milp", "no plan: misses by 3 MiB"), tight, lossy], 0.04)
    row = ["610.0 MiB", "50.0 ms", "1.25x", "600.0 MiB", "8.00 ms", "2.00 ms", "250.0 ms"]
    assert cells(table) == [
        ["auto", "yes", *row],
        ["milp", "no", *["-"] * 7],
        ["keep_all", "no", *row],
        ["gist", "yes", *row],
    ]
    assert str(table.caption).split("\n") == [
        "milp: no plan: misses by 3 MiB",
        "keep_all: 10.0 MiB over on device",
        "gist: lossy; simulate-only: pools",
    ]
    assert cells(plans_table([plan]))[0][4] == "-"


def test_text_is_plain_and_narrow() -> None:
    """No escape codes, no line over the width, and brackets in names are not markup."""
    outcome = make_outcome(costs=(ActionCost(label=HOSTILE, freed_bytes=MIB),))
    text = to_text(costs_table(outcome), width=60)
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 60
    assert HOSTILE in to_text(costs_table(outcome), width=120)


def test_peak_is_the_sum_of_named_tensors() -> None:
    """At op 1: weight 100, input 10, both activations 300 and 200 MiB."""
    step = make_step()
    peak = find_peak(step, make_plan(step))
    assert [(h.name, h.num_bytes // MIB, h.note) for h in peak.holdings] == [
        ("layers.0.out", 300, "moved to host"),
        ("layers.1.out", 200, "recomputed"),
        ("weight", 100, ""),
        ("x", 10, ""),
    ]
    assert (peak.op, peak.num_bytes) == (1, 610 * MIB)


def test_blocks_say_how_they_run() -> None:
    """One block's tensor is moved, the other block is recomputed."""
    step = make_step()
    plan = make_plan(step)
    assert block_states(step, plan) == ["moved", "recomputed"]
    assert block_rows(step, plan) == [
        ("layers.0", "1", "keep", "-", "-", "300.0 MiB", "copied beside the compute"),
        ("layers.1", "1", "full", "200.0 MiB", "-", "-", "0 s for 200.0 MiB less"),
    ]


def test_compiled_blocks_say_what_their_build_costs() -> None:
    """Next to the fastest one."""
    step = make_step()
    block = msgspec.structs.replace(step.blocks[0], build="keep 20%", price="3 ms for 1 GiB less")
    step = msgspec.structs.replace(step, blocks=(block, step.blocks[1]))
    row = block_rows(step, make_plan(step))[0]
    assert (row[2], row[-1]) == ("compiled, keep 20%", "3 ms for 1 GiB less")
    assert "3 ms for 1 GiB less" in to_text(blocks_table(step, make_plan(step)), width=160)


def test_other_budgets_are_a_line_and_a_table() -> None:
    """With the plan in force marked on it."""
    points = [Point(2**30 * n, 2**30 * n, 0.5 / n, f"plan {n}") for n in (1, 2, 4)]
    step = make_step()
    text = page(step, make_plan(step), make_comparison(), make_timeline(), points=points)
    structure = Structure(text)
    assert not structure.wrong
    assert [tag for tag, _ in structure.seen].count("circle") == 4
    assert "4.00 GiB" in text and "plan 2" in text and "this plan" in text
    assert "h-budgets" not in page(step, make_plan(step), make_comparison(), make_timeline())


class Structure(HTMLParser):
    """Counts tags, collects text, and notes the first tag that is closed out of order."""

    VOID = frozenset({"meta", "link", "br", "img", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def make_page(name: str = "layers.0") -> str:
    step = make_step(name)
    timelines = make_timeline(name=name), make_timeline("measured", name)
    return page(step, make_plan(step), make_comparison(), *timelines, lines={"card": 700 * MIB})


def page_data(text: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    data = json.loads(found.group(1))
    assert isinstance(data, dict)
    return data


@pytest.mark.parametrize("name", ["layers.0", HOSTILE])
def test_page_is_whole_and_alone(name: str) -> None:
    """Tags close in order, nothing is loaded, the text is ASCII, whatever a module is called."""
    text = make_page(name)
    seen = Structure(text)
    assert (seen.wrong, seen.open) == ([], [])
    assert "http://" not in text and "https://" not in text and text.isascii()
    assert not any(a.get("src") for _, a in seen.seen)
    assert [a["href"] for _, a in seen.seen if "href" in a] == ["data:,"]
    assert not any("onclick" in a for _, a in seen.seen)
    assert [tag for tag, _ in seen.seen].count("script") == 2
    assert any(f"{name}.out" in words for words in seen.words)


def test_page_shows_the_numbers() -> None:
    """Verdict, peaks, times, errors, tensors, actions and blocks are on the page as text."""
    words = " ".join(" ".join(Structure(make_page()).words).split())
    for expected in (
        "Fits measured peak 600.0 MiB of a 640.0 MiB budget, 40.0 MiB to spare",
        "610.0 MiB at relu in layers.1 (forward), op 1 of 4.",
        "predicted 50.0 ms",
        "error -20.0 %",
        "error +1.7 %",
        "ratio 1.56x",
        "recompute layers.1",
        "layers.0.out activation 1 300.0 MiB 49.2% moved to host",
        "exact: gradients bit for bit",
    ):
        assert expected in words, expected


def test_page_says_what_does_not_fit_and_what_is_lossy() -> None:
    """Over the budget is said by tier, lossy and simulate-only actions by name."""
    step = make_step()
    plan = make_plan(
        step,
        budget={"device": 600 * MIB, "host": 100 * MIB},
        actions=(Compress(storage=2, codec="fp8"),),
        simulate_only=("pools",),
    )
    text = page(step, plan, Comparison(predicted=make_outcome()), make_timeline())
    words = " ".join(Structure(text).words)
    assert "Does not fit" in words
    assert "10.0 MiB over on device, 200.0 MiB over on host" in words
    assert "stored as fp8" in words and "carries this out: pools" in words


def test_page_data_is_what_was_given() -> None:
    """Levels, samples and bars reach the script unchanged, lanes in reading order."""
    data = page_data(make_page())
    assert data["lines"] == [
        {"label": "budget", "bytes": 640 * MIB, "main": True},
        {"label": "without a plan", "bytes": 610 * MIB, "main": False},
        {"label": "card", "bytes": 700 * MIB, "main": False},
    ]
    assert data["peak"] == {"index": 1, "time": 0.01, "bytes": 600 * MIB}
    assert data["times"] == [0.0, 0.01, 0.02, 0.05]
    groups = data["groups"]
    assert isinstance(groups, list) and len(groups) == 2
    names = [lane["name"] for lane in groups[0]["lanes"]]
    assert names == ["compute", "device->host", "host->disk"]
    assert groups[0]["lanes"][0]["busy"] == 0.01


def test_page_stays_small() -> None:
    """Of many bars the longest stay, the peak is never thinned out, the page is under 3 MB."""
    count = 20_000
    step = make_step()
    level = [100] * count
    level[12_345] = 10**6
    spans = tuple(
        Span(lane="compute", start_s=i, end_s=i + i / count, label=f"op {i} " + "m" * 300)
        for i in range(count)
    )
    timeline = Timeline(
        source="predicted",
        times_s=tuple(float(i) for i in range(count)),
        bytes_by_kind={"activation": tuple(level)},
        spans=spans,
    )
    text = page(step, make_plan(step), make_comparison(), timeline)
    data = chart_data(timeline, None, {}, "budget")
    bars = data["groups"][0]["lanes"][0]["spans"]
    assert len(text) < 3_000_000
    assert data["thinned"] == count - MAX_SPANS
    assert [bars[0][0], len(bars)] == [count - MAX_SPANS, MAX_SPANS]
    assert data["kinds"][0]["values"][data["peak"]["index"]] == 10**6


def test_empty_timeline_makes_a_page(tmp_path: Path) -> None:
    """A timeline with nothing in it is no error."""
    step = make_step()
    empty = Timeline(source="predicted", times_s=(), bytes_by_kind={})
    path = write_page(tmp_path / "page.html", step, make_plan(step), make_comparison(), empty)
    assert Structure(path.read_text(encoding="utf-8")).wrong == []


def test_family_joins_layers() -> None:
    """Names that differ by numbers alone are one family."""
    assert family("layers.12.mlp.act_0") == family("layers.3.mlp.act_1") == "layers.*.mlp.act_*"


def test_views_import_without_torch() -> None:
    """Views need neither torch nor plotly."""
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['plotly'] = None\n"
        "import legroom.views.page, legroom.views.table, legroom.views.timeline"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
