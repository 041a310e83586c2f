"""`legroom fit`: train a job here under a budget, and show predicted beside measured."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from legroom.cli.answer import Answer, progress, verb
from legroom.cli.frontier import frontier_answer
from legroom.cli.jobs import build, check_policy, make_optimizer, pick_device
from legroom.cli.options import (
    AsJson,
    BudgetText,
    CompileWhat,
    DeviceName,
    JobName,
    MachineName,
    OptimizerName,
    PagePath,
    PerfettoPath,
    PolicyName,
    Sizes,
    check_folders,
    read_budget,
    read_sizes,
)
from legroom.cli.train import Training, lift_cap, train
from legroom.core.errors import InputError, StepError

if TYPE_CHECKING:
    from legroom.api import Job
    from legroom.memory.kinds import Kind

NUM_STEPS = 14
"""Enough for plans to settle, and to measure the last."""


@verb
def fit(
    job: JobName,
    budget: BudgetText = "auto",
    machine: MachineName = None,
    policy: PolicyName = "auto",
    optimizer: OptimizerName = "adamw",
    device: DeviceName = None,
    sizes: Sizes = None,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Steps to train; the first four are not measured.")
    ] = NUM_STEPS,
    disk_dir: Annotated[
        str | None, typer.Option("--disk-dir", help="Where tensors that go to disk are put.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare all gradients with those of a plain step.")
    ] = False,
    compile_what: CompileWhat = None,
    show_frontier: Annotated[
        bool,
        typer.Option("--frontier", help="Only print what each budget would give; train nothing."),
    ] = False,
    page: PagePath = None,
    perfetto: PerfettoPath = None,
    save_plan: Annotated[
        Path | None, typer.Option("--save-plan", help="Keep the plan.", dir_okay=False)
    ] = None,
    save_trace: Annotated[
        Path | None, typer.Option("--save-trace", help="Keep the recorded step.", dir_okay=False)
    ] = None,
    as_json: AsJson = False,
) -> Answer:
    """Train a job on this machine under a memory budget.

    The first steps run under a plan from fake tensors, so the budget holds from the start; the
    third, on CUDA the fourth, is recorded; after it the plan made from that recording is in force:

        legroom fit transformer --budget 120MiB --verify

    What each budget would give, by the simulator, with no training at all:

        legroom fit llama-1b --machine a100-40g --frontier

    Your own job, with a page to look at; `compare` and `show` read the files again:

        legroom fit train.py:job -b 16GiB --page fit.html --save-plan p.json --save-trace t.json
    """
    import legroom

    check_policy(policy)
    if show_frontier and budget != "auto":
        raise InputError("--frontier plans for one budget after the other: leave --budget out")
    if show_frontier:
        return frontier_answer(job, machine, policy, optimizer, read_sizes(sizes), compile_what)
    files = {"page": page, "perfetto": perfetto, "plan": save_plan, "trace": save_trace}
    check_folders(files.values())
    target = pick_device(device)
    example = build(job, target, read_sizes(sizes))
    training = Training(example, make_optimizer(optimizer, example.model), target)
    with legroom.fit(
        example.model,
        training.optimizer,
        budget=read_budget(budget),
        policy=policy,
        machine=machine,
        disk_dir=disk_dir,
        compile=compile_what,
    ) as running:
        with progress("training", steps) as advance:
            losses = train(training, running, steps, advance)
        document, shown = _report(running)
        _write(running, files)
        if verify:
            verdict = check_gradients(training, running)
            document["verdict"] = verdict
            shown.append(f"{verdict}.")
    document |= {"job": job, "losses": losses, "files": {k: v for k, v in files.items() if v}}
    shown += [f"{what} written to {path}" for what, path in document["files"].items()]
    return Answer(document, shown, bool(document["fits"]))


def check_gradients(training: Training, job: "Job") -> Any:
    """How a planned step's loss and gradients compare with a plain one's."""
    example = training.example
    lift_cap(training.device)
    batch = example.make_batch(seed=0)
    return job.verify(lambda: example.loss_fn(example.model, batch))


def _report(job: "Job") -> tuple[dict[str, Any], list[RenderableType]]:
    from legroom.views.table import over_budget

    kind, comparison = last_kind(job), job.comparison()
    plan = kind.plan
    assert plan is not None
    shown: list[RenderableType] = [*job.parts()]
    if comparison.measured is None:
        made = "The plan was made anew after the last step, and has not been measured yet"
        early = "Nothing is measured before a step was recorded, the third or fourth"
        shown.append(f"{made if kind.replans else early}: use more --steps.")
    over = over_budget(comparison.peaks, job.budget)
    document = {"fits": not over, "policy": plan.policy, "why": plan.why, "budget": job.budget}
    return document | {"machine": plan.machine, "comparison": comparison}, shown


def _write(job: "Job", files: dict[str, Path | None]) -> None:
    from legroom.views.timeline import write_perfetto

    kind = last_kind(job)
    assert kind.plan is not None and kind.capture is not None
    if files["page"]:
        job.page(str(files["page"]))
    if files["perfetto"]:
        write_perfetto(files["perfetto"], job.timeline())
    if files["plan"]:
        kind.plan.save(files["plan"])
    if files["trace"]:
        kind.capture.step.save(files["trace"])


def last_kind(job: "Job") -> "Kind":
    """The kind of the step that ran last; raises StepError if there was none."""
    if job.current is None:
        raise StepError("the job's loss_fn never called its model, so there is nothing to plan")
    return job.current
