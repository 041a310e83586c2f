"""Recorded steps are those of the examples, and the command takes them by name."""

import importlib.metadata
import json

import msgspec
import pytest
from typer.testing import CliRunner

from legroom.cli.app import app
from legroom.cli.jobs import build, trace_job
from legroom.examples import EXAMPLES
from legroom.machine.spec import find_machine
from legroom.memory.retime import retimed
from legroom.memory.shipped import load_shipped, shipped_names, shipped_steps
from legroom.memory.trace import Step

PLANNED = ["--budget", "5GiB", "--policies", "every_nth,keep_all"]
SMALL = {"layers": 3, "dim": 64, "vocab": 100, "batch": 64, "sequence": 20}


@pytest.mark.parametrize("name", ["vgg16-128", "dlrm-16384"])
def test_a_recorded_step_is_the_examples_own(name: str) -> None:
    """Recorded anew by the same torch, it has the same ops and bytes: if not, make them again."""
    index = shipped_steps()
    if importlib.metadata.version("torch") != index.torch:
        pytest.skip(f"recorded with torch {index.torch}")
    (row,) = (row for row in index.steps if row.name == name)
    job = build(row.job, "meta", row.sizes)
    step = trace_job(job, find_machine(index.machine), row.optimizer)
    assert work(step) == work(load_shipped(name))


def test_times_for_another_machine_are_those_of_a_capture_for_it() -> None:
    """All of the step: variants of blocks are chosen by times as well."""
    machine, job = find_machine("l4"), build("seq2seq", "meta", SMALL)
    step = trace_job(job, find_machine("v100-16g"), "adam")
    assert retimed(step, machine) == trace_job(job, machine, "adam") != step


def test_measured_times_stay() -> None:
    step = msgspec.structs.replace(load_shipped("dlrm-16384"), capture="real")
    assert retimed(step, find_machine("l4")) is step


def work(step: Step) -> object:
    """What ran and what lived, without times."""
    ops = [(op.name, op.module, op.phase, op.reads, op.writes, op.flops) for op in step.ops]
    return ops, step.storages, step.saved


def test_examples_keep_their_names() -> None:
    assert not set(shipped_names()) & set(EXAMPLES)
    assert {row.job for row in shipped_steps().steps} <= set(EXAMPLES)


# -- the command ---------------------------------------------------------------------------------


def run(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == code, result.stderr
    return result.stdout if code != 2 else result.stderr


def test_compare_takes_a_recorded_step_by_its_name() -> None:
    """On the machine it was recorded for, or another; its sizes are fixed."""
    found = json.loads(run("compare", "vgg16-128", *PLANNED, "--json"))
    assert found["machine"] == "a100-40g" and [p["fits"] for p in found["policies"]] == [
        True,
        False,
    ]
    other = json.loads(run("compare", "vgg16-128", "-m", "l4", *PLANNED, "--json"))
    assert other["machine"] == "l4"
    assert other["unlimited"]["step_s"] > 2 * found["unlimited"]["step_s"]
    assert "sizes are fixed" in run("compare", "vgg16-128", "--set", "batch=2", code=2)


def test_an_unknown_name_answers_with_examples_and_recorded_steps() -> None:
    said = run("compare", "vgg16-129", "-m", "l4", code=2)
    assert "unknown example or recorded step" in said and "Did you mean 'vgg16-128'" in said
    assert "Did you mean 'transformer'" in run("compare", "transfomer", "-m", "l4", code=2)
    assert "Did you mean 'dlrm-16384'" in run("show", "dlrm-1638", code=2)


def test_show_lists_recorded_steps_and_prints_one() -> None:
    assert all(name in run("show", "traces") for name in shipped_names())
    assert "gpt2-xl batch=4, adamw" in run("show", "gpt2-xl-4")
    assert json.loads(run("show", "vgg16-128", "--json"))["body"]["model"] == "Vgg"
