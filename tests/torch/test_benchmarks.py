"""What the benchmarks make of their rows: caps, who is faster within one, tables, searches."""

import importlib
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
frontier: Any = importlib.import_module("memory_frontier")
report: Any = importlib.import_module("frontier_report")
cases: Any = importlib.import_module("cases")
sys.path.remove(str(ROOT / "benchmarks"))


def row(tool: str, ms: float, reserved: float, cap: float = 0, **more: Any) -> dict[str, Any]:
    head = {"model": "m", "tool": tool, "setting": "", "cap_gib": cap}
    return head | {"ms": ms, "reserved_gib": reserved, "allocated_gib": reserved} | more


EAGER, BLOCKS, CHECKPOINT = row("eager", 500, 60), row("blocks", 400, 30), row("checkpoint", 600, 9)
PEERS = [EAGER, BLOCKS, CHECKPOINT]


# -- which cases ---------------------------------------------------------------------------------


def test_a_share_is_one_of_what_eager_allocated() -> None:
    """Not of what it reserved; other caps are GiB."""
    rows = {"m eager": EAGER | {"reserved_gib": 80}}
    assert frontier.cap_gib("m", "75%", rows) == 45
    assert frontier.cap_gib("m", "24", rows) == 24


@pytest.mark.parametrize("rows", [{}, {"m eager": {"error": "OutOfMemoryError"}}])
def test_a_share_needs_the_eager_row(rows: dict[str, Any]) -> None:
    with pytest.raises(LookupError, match="run --models m --tools eager first"):
        frontier.cap_gib("m", "75%", rows)


def test_a_missing_eager_row_leaves_the_other_caps(capsys: pytest.CaptureFixture[str]) -> None:
    args = Namespace(caps="50%,24", tiny=False)
    found = frontier.cases_of("llama-1b", "legroom", args, {})
    assert [case.name for case in found] == ["llama-1b legroom 24"]
    assert "50% of what?" in capsys.readouterr().err


def test_two_models_have_caps_in_gib_too() -> None:
    assert frontier.caps_of("moe", "") == ["75%", "50%", "35%", "25%"]
    assert frontier.caps_of("llama-1b", "")[4:] == ["40", "24", "12"]
    assert frontier.caps_of("resnet152", "")[4:] == ["14", "9"]


def test_families_name_all_their_settings() -> None:
    """Eager comes first, for the caps."""
    found = frontier.tools_of("legroom,compile,blocks-0.4,eager")
    assert found[:2] == ["eager", "legroom"]
    assert found[2:] == [f"compile-{b}" for b in (1.0, 0.7, 0.5, 0.3, 0.1)] + ["blocks-0.4"]
    with pytest.raises(SystemExit, match="unknown tools compile-2"):
        frontier.tools_of("compile-2")


def test_every_family_has_its_place_in_the_report() -> None:
    assert list(frontier.TOOLS) == list(report.FAMILIES)


def test_what_did_not_fit_is_done_and_what_broke_is_not() -> None:
    assert frontier.done(EAGER)
    assert frontier.done({"error": "OutOfMemoryError: CUDA out of memory"})
    assert frontier.done({"error": "BudgetError: policy 'auto' needs 3 GiB"})
    assert not frontier.done({"error": "not done after 300 s"})
    assert not frontier.done(None)


@pytest.mark.parametrize("limit", [0, 1, 3, 4, 5, 8, 63, 64, 100])
@pytest.mark.parametrize("start", [1, 4, 64])
def test_the_largest_batch_is_found(limit: int, start: int) -> None:
    """To one part in sixteen, and nothing is tried twice."""
    tried: list[int] = []

    def fits(n: int) -> bool:
        tried.append(n)
        return n <= limit

    found = frontier.largest(fits, start)
    assert found <= limit <= found + found // 16
    assert len(tried) == len(set(tried)) and 0 not in tried


def test_the_largest_batch_has_a_limit() -> None:
    assert frontier.largest(lambda n: True, 4, limit=32) == 32


# -- who is faster -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ms", "cap", "won"),
    [
        (390, 30, True),  # faster than the blocks, which just fit
        (400, 30, False),  # as fast as they
        (590, 29.9, True),  # they do not fit, and checkpointing is slower
        (610, 29.9, False),
        (9000, 8, True),  # nothing else fits
    ],
)
def test_ours_wins_if_no_peer_within_the_cap_is_as_fast(ms: float, cap: float, won: bool) -> None:
    mine = row("legroom", ms, cap, cap)
    assert report.wins(mine, [*PEERS, mine, row("legroom-eager", 1, 1, cap)]) is won


def test_ours_does_not_win_with_an_error_nor_over_its_cap() -> None:
    assert not report.wins(row("legroom", 0, 0, 8) | {"error": "BudgetError: no"}, PEERS)
    over = row("legroom", 1, 8.1, 8)
    assert not report.wins(over, PEERS)
    assert "no: over the cap" in report.model_table("m", [over])


def test_errors_of_peers_do_not_count() -> None:
    broken = {"model": "m", "tool": "compile", "setting": "", "cap_gib": 0, "error": "RuntimeError"}
    assert report.best_peer([broken, CHECKPOINT], 10) is CHECKPOINT
    assert report.fastest_uncapped([broken, *PEERS, row("legroom", 1, 1, 1)]) == 400


# -- text ----------------------------------------------------------------------------------------

OURS = [
    row("legroom", 380, 29, 30, predicted_ms=399, predicted_gib=29),
    row("legroom", 700, 9.5, 10, predicted_ms=700, predicted_gib=9.31),
    {"model": "m", "tool": "legroom", "setting": "", "cap_gib": 5, "error": "BudgetError: no|way"},
]


def test_the_table_of_a_model() -> None:
    assert report.model_table("m", [*OURS, *PEERS]).splitlines() == [
        "### m",
        "",
        "| tool | setting | cap GiB | reserved GiB | ms | of fastest | best within the cap? |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| eager |  |  | 60.0 | 500.0 | 1.25 |  |",
        "| checkpoint |  |  | 9.0 | 600.0 | 1.50 |  |",
        "| blocks |  |  | 30.0 | 400.0 | 1.00 |  |",
        "| legroom |  | 30.0 | 29.0 | 380.0 | 0.95 | yes: blocks takes 400.0 (+5 %) |",
        "| legroom |  | 10.0 | 9.5 | 700.0 | 1.75 | no: checkpoint takes 600.0 (-14 %) |",
        "| legroom |  | 5.0 |  | BudgetError: no/way |  | none of the 3 others run fits |",
    ]


def test_the_summary_counts_caps_and_errors() -> None:
    """The error of a prediction is that of its size; the worst is named, with its sign."""
    assert report.summary([*OURS, *PEERS]).splitlines() == [
        "legroom is faster than every peer within 1 of 3 caps.",
        "Predicted peak over 2 runs: off by 1.0% in the median, -2.0% at worst "
        "(m, legroom in 10.0 GiB).",
        "Predicted time over 2 runs: off by 2.5% in the median, +5.0% at worst "
        "(m, legroom in 30.0 GiB).",
    ]


def test_all_tables_come_from_the_file_alone() -> None:
    trial = {"ms": 100, "reserved_gib": 23}
    largest = row("checkpoint", 100, 23, 24, batch=16, trials={"16": trial, "32": {"broke": True}})
    rows = {str(i): x for i, x in enumerate([*PEERS, *OURS])}
    text = report.tables({"machine": "h", "torch": "2", "rows": rows, "largest": {"x": largest}})
    assert text.startswith("h, torch 2\n\n### m\n")
    assert text.endswith("| m | checkpoint | 24.0 | 16 | 100.0 | 160.0 | 32 |")


def test_the_figure_is_an_svg(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = {str(i): x for i, x in enumerate([*PEERS, *OURS])}
    report.draw({"rows": rows}, tmp_path / "new" / "frontier.svg")
    text = (tmp_path / "new" / "frontier.svg").read_text()
    assert "<svg" in text and "legroom" in text


# -- files ---------------------------------------------------------------------------------------


def test_results_are_added_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    first = cases.Results(path, "h200")
    first.rows["a"] = EAGER
    first.save()
    second = cases.Results(path, "other")
    second.rows["b"] = BLOCKS
    second.save()
    assert cases.Results(path).rows == {"a": EAGER, "b": BLOCKS}
    assert second.content["machine"] == "h200"


# -- processes -----------------------------------------------------------------------------------

PARENT = """
import subprocess
import sys
sys.path.insert(0, sys.argv[1])
from cases import Child, end_children_with_this

end_children_with_this()
child = Child("-c", ["import time; time.sleep(60)"])
print(child._process.pid, flush=True)
child.row(timeout=60)
"""


def test_a_benchmark_that_is_ended_leaves_no_case_behind() -> None:
    """It would share the device with the next one, and spoil its times."""
    command = [sys.executable, "-c", PARENT, str(ROOT / "benchmarks")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.terminate()
        parent.wait()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
