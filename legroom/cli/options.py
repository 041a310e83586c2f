"""Options that several verbs share, and how their texts are read."""

import ast
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from legroom.core.errors import InputError

JobName = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="A built-in example (transformer, convnet, llama-1b, ...), module:function or "
        "file.py:function. The function returns (model, make_batch, loss_fn).",
    ),
]
BudgetText = Annotated[
    str,
    typer.Option(
        "--budget",
        "-b",
        help="The most the device may hold at any moment: 16GiB, or by tier: "
        "device=16GiB,host=64GiB,disk=0. 'auto' is all it has.",
    ),
]
MachineName = Annotated[
    str | None,
    typer.Option(
        "--machine",
        "-m",
        help="A preset (h100-80g, l4, ...) or a machine file; this one if absent.",
    ),
]
PolicyName = Annotated[
    str, typer.Option("--policy", "-p", help="Who chooses: see `legroom policies`.")
]
OptimizerName = Annotated[
    str,
    typer.Option(
        "--optimizer", help="adamw, adamw-foreach, adam, sgd, sgd-momentum, or none at all."
    ),
]
DeviceName = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda or cuda:1; the GPU if there is one.")
]
Sizes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="A keyword of the job's function: --set batch=4."
    ),
]
CompileWhat = Annotated[
    str | None,
    typer.Option("--compile", help="blocks: compile each block on its own, as the plan says."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else.")
]
PagePath = Annotated[
    Path | None, typer.Option("--page", help="Write the report as one HTML file.", dir_okay=False)
]
PerfettoPath = Annotated[
    Path | None,
    typer.Option(
        "--perfetto",
        help="Write the step over time, for https://ui.perfetto.dev.",
        dir_okay=False,
    ),
]


def read_sizes(given: list[str] | None) -> dict[str, Any]:
    """Keywords from `key=value` texts: numbers and tuples (2,3,2) are read, the rest is text."""
    sizes: dict[str, Any] = {}
    for text in given or ():
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise InputError(f"--set {text!r}: write key=value, such as --set batch=4")
        sizes[key] = _value(value)
    return sizes


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def check_folders(files: Iterable[Path | None]) -> None:
    """Raise InputError for a file that could not be written, before any work is done for it."""
    for path in files:
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(f"there is no folder {path.parent} to write {path.name} to")


def read_budget(text: str) -> str | dict[str, str]:
    """A budget for the device ("16GiB"), or by tier ("device=16GiB,host=64GiB")."""
    if "=" not in text:
        return text
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(equals and tier and size for tier, equals, size in pairs):
        raise InputError(f"--budget {text!r}: write device=16GiB,host=64GiB")
    return {tier.strip(): size.strip() for tier, _, size in pairs}
