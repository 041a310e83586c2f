"""The recorded steps that come with legroom are whole, and are what their README says."""

import msgspec
import pytest

from legroom.core.errors import InputError, RecordError, UnknownName
from legroom.core.files import Record
from legroom.machine.spec import find_machine
from legroom.memory.retime import retimed
from legroom.memory.shipped import (
    FOLDER,
    INDEX,
    SUFFIX,
    ShippedSteps,
    load_shipped,
    shipped_names,
    shipped_steps,
)
from legroom.memory.simulate import Simulator
from legroom.memory.trace import Kind, Phase

MODELS = [
    "vgg16", "resnet50", "resnet152", "resnet200", "inception", "densenet", "unet-512", "vit-l16",
    "bert-base", "bert-large", "gpt2-medium", "gpt2-xl", "moe", "seq2seq", "dlrm",
]  # fmt: skip
MOST_BYTES = 2_500_000
ROWS = {row.name: row for row in shipped_steps().steps}


def readme_rows() -> dict[str, list[str]]:
    """The README's table: name to cells."""
    lines = (FOLDER / "README.md").read_text().splitlines()
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line)
    return {cells[0].strip("`"): cells[1:] for cells in rows if cells[0].startswith("`")}


def test_each_model_is_there_in_two_batches() -> None:
    jobs = [row.job for row in ROWS.values()]
    assert list(dict.fromkeys(jobs)) == MODELS
    assert all(jobs.count(job) == 2 for job in jobs)


def test_the_folder_holds_what_the_index_names_and_is_small() -> None:
    files = {path.name: len(path.read_bytes()) for path in FOLDER.iterdir()}
    assert set(files) == {"README.md", INDEX, *(f"{name}{SUFFIX}" for name in ROWS)}
    assert sum(files.values()) < MOST_BYTES


@pytest.mark.parametrize("name", ROWS)
def test_a_recorded_step_is_whole_and_as_described(name: str) -> None:
    """It loads, keeps the law of traces, has all phases, and blocks that can run again."""
    row, machine, cells = ROWS[name], shipped_steps().machine, readme_rows()[name]
    step = load_shipped(name).check()
    assert (step.model, step.machine, step.capture) == (row.model, machine, "fake")
    (batch,) = row.sizes.values()
    assert step.signature == f"{row.job} batch={batch}, {row.optimizer}"
    assert cells[:6] == [
        row.model, row.shapes, row.precision, row.optimizer, machine, f"{row.num_ops:,}"
    ]  # fmt: skip
    assert row.num_ops == len(step.ops)
    assert {op.phase for op in step.ops} == set(Phase)
    assert step.ops[-1].name == f"optimizer.{row.optimizer}"
    assert {Kind.WEIGHT, Kind.GRADIENT, Kind.ACTIVATION} <= {s.kind for s in step.storages}
    assert any(s.kind == Kind.STATE for s in step.storages) == (row.optimizer != "sgd")
    assert sum(bool(block.variants) for block in step.blocks) >= 2
    assert not any(block.barred for block in step.blocks)
    outcome = Simulator(step, find_machine(machine)).run([], "keep_all")
    assert (outcome.device_bytes, outcome.step_s) == (row.peak_bytes, pytest.approx(row.step_s))


def test_the_readme_names_versions_and_the_command() -> None:
    text, index = (FOLDER / "README.md").read_text(), shipped_steps()
    for said in (index.torch, index.transformers, index.command, index.machine):
        assert said in text
    assert set(readme_rows()) == set(ROWS)


@pytest.mark.parametrize("name", ["densenet-256", "moe-8", "gpt2-xl-4"])
def test_times_go_to_another_machine_and_come_back(name: str) -> None:
    """Every time is a function of what the trace holds: none is lost on the way."""
    step, machine = load_shipped(name), find_machine(shipped_steps().machine)
    there = retimed(step, find_machine("h200"))
    assert there.machine == "h200" and there.compute_s < step.compute_s
    assert retimed(there, machine) == step


def test_an_unknown_name_answers_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'vgg16-128'") as caught:
        load_shipped("vgg16-129")
    assert isinstance(caught.value, InputError) and caught.value.known == sorted(shipped_names())
    with pytest.raises(UnknownName, match="example or recorded step .* mean 'mlp'"):
        load_shipped("mlpp", others=["mlp"])


def test_an_index_with_a_name_twice_or_of_another_job_is_refused() -> None:
    index: Record = shipped_steps()
    assert isinstance(index, ShippedSteps)
    first = index.steps[0]
    renamed = msgspec.structs.replace(first, name="other-1")
    for steps, says in (((first, first), "twice"), ((renamed,), "recorded from vgg16")):
        with pytest.raises(RecordError, match=says):
            msgspec.structs.replace(index, steps=steps).check()
