"""The command: what it prints, what it writes, and with which code it leaves."""

import json
import os
import subprocess
import sys
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from legroom import __version__
from legroom.cli import many
from legroom.cli.app import app
from legroom.cli.rerun import run_policy
from legroom.core.errors import LegroomError
from legroom.machine.spec import Link, Machine, Tier, find_machine
from legroom.memory.plan import Plan
from legroom.memory.planner import POLICIES, Choice
from legroom.memory.trace import Step

TINY = {"layers": 4, "dim": 32, "batch": 8, "sequence": 64, "vocab": 64}
SET = [part for key, value in TINY.items() for part in ("--set", f"{key}={value}")]
JOB = ["transformer", *SET]
BUDGET = ["--budget", "2500KB"]
"""Of 5.48 MB, of which 0.69 are there before the step."""
FILE = """
import torch
print("printed while it was imported")

def job(device="cpu", dim=8):
    print("printed while it was built")
    model = torch.nn.Linear(dim, dim, device=device)
    return model, lambda: torch.ones(4, dim, device=device), lambda m, x: m(x).square().mean()

def broken(device="cpu"):
    raise KeyError("a mistake of the user's own")
"""


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The option for a machine with a CPU and a disk, so that no test measures one."""
    disk = {"bytes_per_s": 1e9, "root": "disk"}
    machine = Machine(
        name="test-cpu",
        device="cpu",
        origin="made up",
        tiers=(Tier(name="device", num_bytes=8 << 30), Tier(name="disk", num_bytes=8 << 30)),
        links=(
            Link(source="device", target="disk", **disk),
            Link(source="disk", target="device", **disk),
        ),
        duplex={"disk": 1e9},
        matrix_flops={"float32": 5e10},
        vector_flops=5e10,
        memory_bytes_per_s=1e10,
    )
    path = tmp_path_factory.mktemp("machine") / "cpu.json"
    return ["--machine", str(machine.save(path))]


def call(*args: str) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


def answer(*args: str, code: int = 0) -> Any:
    """The document a command prints with --json; there must be nothing else on stdout."""
    result = call(*args, "--json")
    assert result.exit_code == code, result.stderr
    return json.loads(result.stdout)


def refusal(*args: str) -> str:
    """The one line on stderr of a command that got bad input."""
    result = call(*args)
    assert result.exit_code == 2, (result.stdout, result.stderr)
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("legroom: "), result.stderr
    return lines[0]


# -- the command itself --------------------------------------------------------------------------


def test_the_version_is_printed() -> None:
    assert call("--version").stdout == f"legroom {__version__}\n"


@pytest.mark.parametrize(
    "verb", ["probe", "estimate", "fit", "compare", "papers", "policies", "show", "demo"]
)
def test_every_help_has_an_example(verb: str) -> None:
    """Help teaches: each verb shows a command line of its own."""
    text = call(verb, "--help").stdout
    assert "legroom " in text.split("Options")[0].split("Usage:")[1].split("\n", 1)[1]
    assert "Exit codes" in text


def test_policies_lists_each_with_a_line() -> None:
    rows = [r for r in answer("policies")["policies"] if not r["name"].startswith("test_")]
    assert {"auto", "keep_all", "every_nth", "swap_all"} <= {row["name"] for row in rows}
    assert all(row["doc"].endswith(".") for row in rows)
    assert "keep_all" in call("policies").stdout


def test_stdout_holds_the_answer_alone_even_when_a_solver_prints(tmp_path: Path) -> None:
    """What the user's module and libraries print goes to stderr; as a process of its own."""
    (tmp_path / "mine.py").write_text(FILE + "import os\nos.write(1, b'past Python')\n")
    code = "from legroom.cli import main; main()"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, "estimate", "mine.py:job", "-m", "l4", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["fits"] is True
    assert "past Python" in done.stderr and "while it was built" in done.stderr


# -- bad input: code 2, one line, the nearest name -----------------------------------------------


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["estimate", "transformr", "-m", "l4"], "Did you mean 'transformer'?"),
        (["estimate", *JOB, "-m", "h100-80"], "Did you mean 'h100-80g'?"),
        (["estimate", *JOB, "-m", "l4", "--policy", "autoo"], "Did you mean 'auto'?"),
        (["estimate", *JOB, "-m", "l4", "--optimizer", "adamw-forech"], "'adamw-foreach'?"),
        (["estimate", *JOB, "-m", "l4", "--set", "layer=2"], "Did you mean 'layers'?"),
        (["estimate", *JOB, "-m", "l4", "--set", "layers=many"], "something like layers=8"),
        (["estimate", *JOB, "-m", "l4", "--set", "layers=-1"], "something like layers=8"),
        (["estimate", *JOB, "-m", "l4", "--set", "layers"], "write key=value"),
        (["estimate", *JOB, "-m", "l4", "--set", "heads=5"], "heads=5"),
        (["estimate", *JOB, "-m", "l4", "--budget", "16"], "a number and a unit"),
        (["estimate", *JOB, "-m", "l4", "--budget", "16XB"], "unknown unit"),
        (["estimate", *JOB, "-m", "l4", "--budget", "-1GiB"], "above zero"),
        (["estimate", *JOB, "-m", "l4", "--budget", "900GiB"], "larger than l4's"),
        (["estimate", *JOB, "-m", "l4", "--budget", "gpu=1GiB"], "no tier 'gpu'"),
        (["estimate", *JOB, "-m", "l4", "--budget", "device="], "write device=16GiB"),
        (["estimate", "nowhere.py:job", "-m", "l4"], "no file at nowhere.py"),
        (["estimate", *JOB, "-m", "nowhere.toml"], "no machine file"),
        (["fit", *JOB, "--device", "tpu"], "use cpu, cuda"),
        (["fit", *JOB, "--device", "cuda:99"], "no device 'cuda:99'"),
        (["fit", *JOB, "--policy", "autoo"], "Did you mean 'auto'?"),
        (["compare", *JOB, "-m", "l4", "--policies", "auto,swop_all"], "Did you mean 'swap_all'?"),
        (["compare", *JOB, "-m", "l4", "--policies", ","], "names none"),
        (["compare", "nowhere.json", "-m", "l4"], "no step file"),
        (["show", "nowhere.json"], "no file at nowhere.json"),
        (["show", "h20"], "Did you mean 'h200'?"),
        (["show", "l4", "--page", "out.html"], "has no page"),
        (["show", "l4", "--trace", "t.json"], "--trace is for"),
        (["probe", "--device", "tpu"], "cannot probe"),
    ],
)
def test_bad_input_is_one_line_that_helps(args: list[str], says: str) -> None:
    assert says in refusal(*args)


def test_bad_input_with_json_is_a_document_too() -> None:
    found = answer("estimate", "transformr", "-m", "l4", code=2)
    assert found["kind"] == "UnknownName" and "transformer" in found["error"]
    assert found["fits"] is None


def test_a_mistake_in_the_users_code_shows_where(tmp_path: Path) -> None:
    """It is neither bad input nor a job that does not fit: a traceback, and a code of its own."""
    (tmp_path / "mine.py").write_text(FILE)
    result = call("estimate", f"{tmp_path}/mine.py:broken", "-m", "l4")
    assert result.exit_code == 3
    assert "in broken" in result.stderr and "a mistake of the user's own" in result.stderr


# -- estimate ------------------------------------------------------------------------------------


def test_estimate_has_a_row_per_machine() -> None:
    found = answer("estimate", *JOB, "-m", "l4", "-m", "h200")
    assert [row["machine"] for row in found["machines"]] == ["l4", "h200"]
    slow, fast = (row["unlimited"] for row in found["machines"])
    assert slow["peak_bytes"] == fast["peak_bytes"] and slow["step_s"] >= fast["step_s"]
    assert {row["fits"] for row in found["machines"]} == {"as it is"}


def test_estimate_plans_for_a_budget() -> None:
    (row,) = answer("estimate", *JOB, "-m", "l4", *BUDGET)["machines"]
    assert row["fits"] == "with a plan"
    assert row["planned"]["peak_bytes"]["device"] <= 2_500_000
    assert row["unlimited"]["peak_bytes"]["device"] > 2_500_000


def test_estimate_plans_for_a_card_that_is_too_small(tmp_path: Path) -> None:
    """Without a budget, what does not fit as it is gets a plan for what the machine has."""
    import msgspec

    card = find_machine("l4")
    tiers = (Tier(name="device", num_bytes=2_500_000), *card.tiers[1:])
    small = msgspec.structs.replace(card, name="small", tiers=tiers).save(tmp_path / "small.json")
    (row,) = answer("estimate", *JOB, "-m", str(small))["machines"]
    assert row["fits"] == "with a plan" and row["budget"]["device"] == 2_500_000


def test_estimate_that_cannot_fit_is_code_1_and_says_what_would() -> None:
    result = call("estimate", *JOB, "-m", "l4", "--budget", "100KB")
    assert result.exit_code == 1
    assert "The smallest budget that works" in result.stdout
    (row,) = answer("estimate", *JOB, "-m", "l4", "--budget", "100KB", code=1)["machines"]
    assert row["fits"] == "no" and row["planned"] is None


def test_estimate_takes_a_users_own_job(tmp_path: Path) -> None:
    """What the user's code prints does not get between the answer's lines."""
    (tmp_path / "mine.py").write_text(FILE)
    found = answer("estimate", f"{tmp_path}/mine.py:job", "-m", "l4", "--set", "dim=16")
    assert found["machines"][0]["fits"] == "as it is"


def test_estimate_with_another_optimizer_needs_less(tmp_path: Path) -> None:
    peaks = [
        answer("estimate", *JOB, "-m", "l4", "--optimizer", name)["machines"][0]["unlimited"]
        for name in ("adamw", "sgd")
    ]
    parts = [peak["peak_parts"].get("state", 0) for peak in peaks]
    assert parts[0] > 0 and parts[1] == 0


# -- compare -------------------------------------------------------------------------------------


def test_compare_has_a_row_per_policy_and_failures_are_rows(cpu: list[str]) -> None:
    names = ["--policies", "auto,keep_all,every_nth,swap_all"]
    found = answer("compare", *JOB, *cpu, *BUDGET, *names)
    rows = {row["policy"]: row for row in found["policies"]}
    assert {"auto", "keep_all", "every_nth", "swap_all"} <= set(rows)
    assert rows["keep_all"]["fits"] is False and rows["keep_all"]["missing_bytes"] > 0
    assert rows["auto"]["fits"] and rows["auto"]["outcome"]["peak_bytes"]["device"] <= 2_500_000
    text = call("compare", *JOB, *cpu, *BUDGET, *names).stdout
    assert "over the budget" in text and "no budget" in text


def test_compare_plans_in_processes_what_is_not_the_users_own(
    cpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the user's own that fails is a row; so is every other, the fastest first."""

    def mine(problem: object) -> Choice:
        raise ValueError("not today")

    monkeypatch.setattr(POLICIES, "_entries", POLICIES._entries | {"mine": mine})
    names = "keep_all,every_nth,swap_all,vdnn,capuchin,mine"
    found = answer("compare", *JOB, *cpu, *BUDGET, "--policies", names)["policies"]
    rows = {row["policy"]: row for row in found}
    assert len(rows) == 6 and not rows["mine"]["fits"] and "not today" in str(rows["mine"])
    times = [row["outcome"]["step_s"] for row in found if row["fits"]]
    assert len(times) >= 2 and times == sorted(times) and found[0]["fits"]


def test_a_process_that_dies_is_a_row() -> None:
    done: Future[Any] = Future()
    done.set_exception(BrokenProcessPool("a process ended"))
    assert "failed: BrokenProcessPool: a process ended" in str(many.result_of(done))


def test_compare_runs_plans_for_real(cpu: list[str]) -> None:
    """Each in a process of its own; one that does not fit is not run."""
    names = ["--policies", "every_nth,swap_all,keep_all"]
    found = answer("compare", *JOB, *cpu, *BUDGET, *names, "--run")
    rows = {row["policy"]: row for row in found["policies"]}
    assert "run" not in rows["keep_all"]
    for name in ("every_nth", "swap_all"):
        both = rows[name]["run"]
        assert both["measured"]["source"] == "measured" and both["measured"]["step_s"] > 0
        peaks = [both[k]["peak_bytes"]["device"] for k in ("predicted", "measured")]
        assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


def test_a_run_that_fails_is_said_and_not_a_crash(cpu: list[str]) -> None:
    nowhere = run_policy("auto", ["nowhere.py:job"])
    assert isinstance(nowhere, LegroomError) and "nowhere" in str(nowhere)
    small = run_policy("auto", [*JOB, *cpu, "--budget", "100KB"])
    assert isinstance(small, LegroomError) and "smallest budget" in str(small)


def test_compare_over_many_budgets_is_a_table_and_a_figure(tmp_path: Path, cpu: list[str]) -> None:
    """Ratios fall with the budget; what fits nowhere is not drawn."""
    path = tmp_path / "frontier.svg"
    names = ["--policies", "auto,keep_all,every_nth"]
    found = answer("compare", *JOB, *cpu, *names, "--plot", str(path))
    assert len(found["budgets"]) == 8 and found["ratios"]["keep_all"] == [None] * 8
    auto = [x for x in found["ratios"]["auto"] if x is not None]
    assert len(auto) >= 5 and auto == sorted(auto)
    drawing = ElementTree.parse(path).getroot()
    lines = [x for x in drawing.iter() if x.tag.endswith("polyline")]
    words = [x.text for x in drawing.iter() if x.tag.endswith("text")]
    assert len(lines) == 2 and "auto" in words and "keep_all" not in words
    text = call("compare", *JOB, *cpu, *names, "--frontier").stdout
    assert "90 %" in text and "every_nth" in text


def test_compare_refuses_what_does_not_go_together(cpu: list[str]) -> None:
    assert "leave --budget out" in refusal("compare", *JOB, *cpu, *BUDGET, "--frontier")
    assert "one budget" in refusal("compare", *JOB, *cpu, "--frontier", "--run")
    assert "cannot be trained" in refusal("compare", "trace.json", *cpu, "--run")
    assert "no folder" in refusal("compare", *JOB, *cpu, "--plot", "nowhere/x.svg")


def test_compare_says_what_pool_each_plan_needs() -> None:
    """For those that fit, by allocator, with what that is larger than what lives at the peak."""
    given = ["compare", "seq2seq-128", "-m", "l4", "-b", "16GiB", "--policies"]
    found = answer(*given, "keep_all,every_nth", "--pool")["policies"]
    for row in found:
        live, pools = row["pool"]["live_bytes"], row["pool"]["allocators"]
        assert live == row["outcome"]["peak_bytes"]["device"] and len(pools) == 5
        for pool in pools.values():
            assert pool["num_bytes"] >= live
            assert pool["overhead"] == pytest.approx(pool["num_bytes"] / live - 1)
    assert "smartpool" in call(*given, "keep_all", "--pool").stdout
    tight = answer(*given[:4], "-b", "1GiB", "--policies", "keep_all", "--pool", code=1)
    assert "pool" not in tight["policies"][0]
    assert "lays out plans for one budget" in refusal(*given[:4], "--frontier", "--pool")


def test_compare_that_no_policy_passes_is_code_1(cpu: list[str]) -> None:
    found = answer("compare", *JOB, *cpu, *BUDGET, "--policies", "keep_all", code=1)
    assert found["fits"] is False and len(found["policies"]) == 1


def test_the_frontier_is_printed_without_training(cpu: list[str]) -> None:
    found = answer("fit", *JOB, *cpu, "--frontier")
    times = [point["step_s"] for point in found["frontier"]]
    assert len(times) > 2 and times[0] >= times[-1] == found["unlimited"]["step_s"]
    assert all(p["peak_bytes"] <= p["budget_bytes"] for p in found["frontier"])
    assert "against no limit" in call("fit", *JOB, *cpu, "--frontier").stdout
    assert "leave --budget out" in refusal("fit", *JOB, "--frontier", "--budget", "1MiB")


def test_compiled_blocks_are_foreseen_without_training(cpu: list[str]) -> None:
    found = answer("fit", *JOB, *cpu, "--frontier", "--compile", "blocks")
    assert any("blocks compiled (" in point["why"] for point in found["frontier"])
    row = answer("estimate", *JOB, *cpu, "--compile", "blocks")["machines"][0]
    assert "blocks compiled (" in row["how"]
    assert row["planned"]["step_s"] < row["unlimited"]["step_s"]
    assert '"blocks" or None' in refusal("estimate", *JOB, *cpu, "--compile", "model")


# -- fit, and what it leaves ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted(cpu: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """One run of fit with all its files."""
    folder = tmp_path_factory.mktemp("fit")
    files = {"--page": "p.html", "--perfetto": "t.json", "--save-plan": "plan.json"}
    files |= {"--save-trace": "trace.json.gz"}
    options = [part for flag, name in files.items() for part in (flag, str(folder / name))]
    steps = ["--steps", "10", "--verify", "--device", "cpu"]
    return folder, answer("fit", *JOB, *cpu, *BUDGET, *steps, *options)


def test_fit_keeps_the_budget_with_identical_gradients(fitted: tuple[Path, Any]) -> None:
    found = fitted[1]
    assert found["fits"] is True and found["verdict"]["identical"] is True
    measured = found["comparison"]["measured"]
    assert 0 < measured["peak_bytes"]["device"] <= found["budget"]["device"] == 2_500_000
    assert len(found["losses"]) == 10


def test_fit_writes_what_it_was_asked_to(fitted: tuple[Path, Any]) -> None:
    folder, found = fitted
    assert sorted(found["files"]) == ["page", "perfetto", "plan", "trace"]
    assert "<html" in (folder / "p.html").read_text()
    assert json.loads((folder / "t.json").read_text())["traceEvents"]
    step = Step.load(folder / "trace.json.gz")
    assert Plan.load(folder / "plan.json").check_against(step).model == "Decoder"


def test_show_prints_what_fit_saved(fitted: tuple[Path, Any], cpu: list[str]) -> None:
    folder, _ = fitted
    plan, trace = str(folder / "plan.json"), str(folder / "trace.json.gz")
    assert "budget" in call("show", plan).stdout
    assert "saved tensors" in call("show", trace).stdout
    page = str(folder / "again.html")
    result = call("show", plan, "--trace", trace, "--page", page, *cpu)
    assert result.exit_code == 0 and f"written to {page}" in result.stdout, result.stderr
    assert "<html" in Path(page).read_text()
    assert "add --trace" in refusal("show", plan, "--page", page)


def test_compare_takes_a_saved_trace(fitted: tuple[Path, Any], cpu: list[str]) -> None:
    trace = str(fitted[0] / "trace.json.gz")
    found = answer("compare", trace, *cpu, *BUDGET, "--policies", "auto,keep_all")
    assert [row["fits"] for row in found["policies"]] == [True, False]
    assert "sizes are fixed" in refusal("compare", trace, *cpu, "--set", "layers=2")
    assert "name one with --machine" in refusal("compare", trace, *BUDGET)


def test_fit_that_cannot_fit_is_code_1(cpu: list[str]) -> None:
    found = answer("fit", *JOB, *cpu, "--budget", "100KB", "--device", "cpu", code=1)
    assert found["fits"] is False and found["missing_bytes"] > 0
    result = call("fit", *JOB, *cpu, "--budget", "100KB", "--device", "cpu")
    assert result.exit_code == 1 and result.stderr.startswith("legroom: policy 'auto' needs")


def test_fit_of_few_steps_says_why_nothing_is_measured(cpu: list[str]) -> None:
    options = ["--steps", "2", "--device", "cpu", "--optimizer", "sgd"]
    result = call("fit", *JOB, *cpu, *options)
    assert result.exit_code == 0 and "before a step was recorded" in result.stdout


# -- show, probe, demo ---------------------------------------------------------------------------


def test_show_prints_presets_and_records_as_they_were_saved(tmp_path: Path) -> None:
    machine = find_machine("l4")
    assert answer("show", "l4") == json.loads(machine.to_json())
    machine.save(tmp_path / "m.json")
    assert answer("show", str(tmp_path / "m.json")) == json.loads(machine.to_json())


def test_show_refuses_files_that_are_none_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for text in ("{}", "[1]", "not JSON", '{"legroom": "secret"}'):
        path.write_text(text)
        assert "is no legroom file" in refusal("show", str(path))


def test_show_prints_outcomes_and_timelines(tmp_path: Path) -> None:
    from legroom.core.outcome import Outcome, Span, Timeline

    outcome = Outcome(source="measured", peak_bytes={"device": 1024}, step_s=0.5)
    assert "1.00 KiB" in call("show", str(outcome.save(tmp_path / "o.json"))).stdout
    span = Span(lane="compute", start_s=0.0, end_s=2.0, label="op", kind="forward")
    timeline = Timeline(
        source="predicted", times_s=(0.0,), bytes_by_kind={"weight": (2048,)}, spans=(span,)
    )
    path = str(timeline.save(tmp_path / "t.json"))
    assert "compute, forward" in call("show", path).stdout
    assert call("show", path, "--perfetto", str(tmp_path / "p.json")).exit_code == 0
    assert json.loads((tmp_path / "p.json").read_text())["traceEvents"]


def test_probe_prints_and_saves_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The document is the file: either is a machine to plan for."""
    from legroom.machine import probe as module

    def measure(device: str | None, *, progress: Any, **_: Any) -> Machine:
        progress("disk", 0.4)
        progress("done", 1.0)
        return find_machine("l4")

    monkeypatch.setattr(module, "probe", measure)
    path = tmp_path / "m.json"
    found = answer("probe", "--quick", "--save", str(path))
    assert found == json.loads(path.read_text()) and find_machine(path).name == "l4"


def test_demo_shows_three_columns_and_writes_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu: list[str]
) -> None:
    """All three are there, unlimited is measured, gradients are compared, pages written."""
    from legroom.cli import demo
    from legroom.machine import probe as module

    monkeypatch.setattr(module, "cached_probe", lambda device: find_machine(cpu[1]))
    monkeypatch.setitem(demo.SIZES, "cpu", {"transformer": TINY})
    monkeypatch.chdir(tmp_path)
    found = answer("demo", "--device", "cpu")
    (run,) = found["runs"]
    assert found["fits"] is True and run["verdict"]["identical"] is True
    sources = {k: run["comparison"][k]["source"] for k in ("predicted", "measured", "unlimited")}
    assert sources == {"predicted": "predicted", "measured": "measured", "unlimited": "measured"}
    peaks = {k: run["comparison"][k]["peak_bytes"]["device"] for k in sources}
    assert 0 < peaks["measured"] <= run["budget"] < peaks["unlimited"]
    assert Path(run["page"]) == tmp_path / "legroom-demo-transformer.html"
    assert "<html" in Path(run["page"]).read_text()


# -- papers --------------------------------------------------------------------------------------


def test_papers_puts_a_figure_beside_ours() -> None:
    """The step as it is, in float32: a figure, a ratio, and what was done."""
    (row,) = answer("papers", "--only", "vdnn-memory")["papers"]
    assert row["figure"] == 28.0 and 15 < row["ours"] < 28
    assert row["ratio"] == pytest.approx(row["ours"] / 28)
    assert (row["num_steps"], row["num_plans"]) == (1, 0)
    assert "28.0 GB" in call("papers", "--only", "vdnn-memory").stdout


def test_papers_refuses_a_name_that_is_not_there() -> None:
    assert "Did you mean 'vdnn-vgg16'?" in refusal("papers", "--only", "vdnn-vgg15")
