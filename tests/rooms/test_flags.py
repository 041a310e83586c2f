"""Few flags: the options of the command are a list, and a new one is a decision."""

from typing import Any

from typer.main import get_command

from legroom.cli.app import app

FLAGS = {
    "": ["--version"],
    "probe": ["--device", "--directory", "--quick", "--save", "--json"],
    "estimate": [
        "JOB",
        "--machine",
        "--budget",
        "--policy",
        "--optimizer",
        "--set",
        "--compile",
        "--json",
    ],
    "fit": [
        "JOB",
        "--budget",
        "--machine",
        "--policy",
        "--optimizer",
        "--device",
        "--set",
        "--steps",
        "--disk-dir",
        "--verify",
        "--compile",
        "--frontier",
        "--page",
        "--perfetto",
        "--save-plan",
        "--save-trace",
        "--json",
    ],
    "compare": [
        *("JOB", "--machine", "--budget", "--policies", "--optimizer", "--set"),
        *("--run", "--frontier", "--plot", "--time-limit", "--pool", "--json"),
    ],
    "papers": ["--only", "--json"],
    "policies": ["--json"],
    "show": ["FILE", "--page", "--perfetto", "--trace", "--machine", "--json"],
    "demo": ["--device", "--json"],
}
SHORT = {"--budget": "-b", "--machine": "-m", "--policy": "-p"}
"""The only options with a letter; it means the same in every verb."""


def commands() -> dict[str, Any]:
    top: Any = get_command(app)
    return {"": top, **top.commands}


def names(command: Any) -> list[str]:
    """Options by their long name, arguments by what the help calls them."""
    return [
        p.metavar if p.param_type_name == "argument" else max(p.opts, key=len)
        for p in command.params
        if p.name != "help"
    ]


def test_the_list_of_flags_is_frozen() -> None:
    assert {verb: names(command) for verb, command in commands().items()} == FLAGS


def test_a_letter_means_one_thing() -> None:
    for command in commands().values():
        for p in command.params:
            letters = [o for o in p.opts if len(o) == 2]
            if p.param_type_name == "option" and p.name != "help":
                expected = SHORT.get(max(p.opts, key=len))
                assert letters == ([expected] if expected else []), p.opts


def test_every_verb_speaks_json() -> None:
    assert all("--json" in flags for verb, flags in FLAGS.items() if verb)


def test_every_option_has_a_help_text() -> None:
    for verb, command in commands().items():
        for p in command.params:
            assert p.help, f"{verb} {p.name}"
