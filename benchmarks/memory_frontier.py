"""Step time against peak memory: legroom with compiled blocks and all its peers, on seven models.

    python benchmarks/memory_frontier.py                      # what is missing, on this GPU
    python benchmarks/memory_frontier.py --models llama-1b --tools eager,compile,legroom
    python benchmarks/memory_frontier.py --models moe --tools blocks-0.4 --fresh
    python benchmarks/memory_frontier.py --largest-batch 24   # the largest batch within 24 GiB
    python benchmarks/memory_frontier.py --table --figure docs/frontier.svg
    python benchmarks/memory_frontier.py --tiny --out /tmp/x.json   # small sizes, on a CPU too

Each case is a fresh process. Peers know no budget: each setting of each is a case of its own,
without a cap and with growing segments, which waste least; it fits a cap if the peak of what it
reserved after its warm steps does. legroom gets shares of what eager training allocates, and round
numbers of GiB; the device is capped from the process's start (`set_per_process_memory_fraction`).
Results are added to `benchmarks/results/memory_frontier-<machine>.json`; what is there already is
left alone, but for cases that broke, unless `--fresh` is given.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cases import (
    GIB,
    PEER_WARM,
    RESULTS,
    TINY,
    Child,
    Results,
    Row,
    Times,
    adamw,
    add_arguments,
    await_turn,
    build,
    cap_device,
    end_children_with_this,
    legroom_row,
    machine_name,
    train,
)
from frontier_report import OURS, draw, tables
from peers import num_graphs, set_up

COMPILE, BLOCKS = (1.0, 0.7, 0.5, 0.3, 0.1), (1.0, 0.7, 0.4, 0.2, 0.0)
TOOLS: dict[str, dict[str, str]] = {
    "eager": {"eager": ""},
    "checkpoint": {"checkpoint": "every block"},
    "selective": {"selective": "keep matmuls, attention", "selective-attention": "keep attention"},
    "save_on_cpu": {"save_on_cpu": ""},
    "offload_activations": {"offload_activations": ""},
    "compile": {f"compile-{b}": f"budget {b}" for b in COMPILE},
    "blocks": {f"blocks-{b}": f"budget {b}" for b in BLOCKS},
    "offload-compiled": {"offload-compiled": "", "offload-compiled-async": "own streams"},
    "legroom": {"legroom": ""},
    "legroom-eager": {"legroom-eager": ""},
}
"""By family, the tools and the setting of each in words."""
SHARES = ("75%", "50%", "35%", "25%")
CAPS = {"llama-1b": ("40", "24", "12"), "resnet152": ("14", "9")}
"""GiB, beside the shares of what eager training allocates."""
LARGEST = "eager,checkpoint,selective,compile-0.1,blocks-0.0,legroom,legroom-eager"
COMPILED = ("compile", "blocks", "offload-compiled")
FIRST_BATCH = {"llama-1b": 4, "resnet152": 64}
WITHOUT_ATTENTION = ("resnet152", "unet-512")
AHEAD_STEPS = 5
"""Warm steps of a case that is only to be compiled: legroom tries builds in its third."""
ANSWERS = ("OutOfMemoryError", "BudgetError")
"""Errors that say that a case does not fit; after others it is run again."""


@dataclass(frozen=True)
class Case:
    """One process to run."""

    model: str
    tool: str
    cap: str = ""
    """The cap in words, "75%" or "24"."""
    cap_gib: float = 0.0
    batch: int = 0

    @property
    def family(self) -> str:
        """The tool without its setting."""
        return next(family for family, tools in TOOLS.items() if self.tool in tools)

    @property
    def name(self) -> str:
        """The key of its row."""
        return " ".join(x for x in (self.model, self.tool, self.cap) if x)

    def head(self) -> Row:
        """What a row begins with."""
        words = f"{self.cap} of eager" if self.cap.endswith("%") else ""
        setting = TOOLS[self.family][self.tool] or words
        head = {"model": self.model, "tool": self.family, "setting": setting}
        return head | {"cap_gib": self.cap_gib}


# -- one case ------------------------------------------------------------------------------------


def run_case(args: argparse.Namespace) -> Row:
    """Train some steps; time, peaks, and for legroom what was predicted."""
    cap_device(args.cap)
    example = build(args.case_model, args.tiny, args.batch)
    optimizer = adamw(example.model)
    times, tool = Times(), args.case_tool
    job, around = None, contextlib.nullcontext
    if tool in OURS:
        job = fit(tool, example.model, optimizer, args.cap)
    else:
        around = set_up(tool, example.model)
    counts = {"warm": args.warm if job else min(args.warm, PEER_WARM), "steps": args.steps}
    train(times, example, optimizer, around=around, job=job, tidy=job is None, **counts)
    row = times.row()
    if tool == "legroom" or "compile" in tool or "blocks" in tool:
        row["compile_s"] = times.extra_s()
        row["num_graphs"] = num_graphs()
    if job:
        row |= legroom_row(job, args.keep, f"{args.case_model}-{tool}-{args.cap or 'uncapped'}")
    if "allocated_gib" not in row:
        row |= cpu_peak(example, optimizer, around, job)
    return row


def fit(tool: str, model: Any, optimizer: Any, cap_gib: float) -> Any:
    """A job of legroom, with compiled blocks unless the tool is the eager one."""
    import legroom

    budget = int(cap_gib * GIB) if cap_gib else "auto"
    options = {"compile": "blocks"} if tool == "legroom" else {}
    return legroom.fit(model, optimizer, budget=budget, **options)


def cpu_peak(example: Any, optimizer: Any, around: Any, job: Any) -> Row:
    """The peak of one more step on a CPU, whose allocator keeps no count by itself."""
    import torch

    from legroom.memory.profile import held_bytes
    from legroom.memory.timers import memory_reports, reports_peak

    held = held_bytes(example.model, optimizer, torch.device("cpu"))
    reports: list[tuple[int, int]] = []
    with memory_reports(reports):
        train(Times(), example, optimizer, warm=0, steps=1, around=around, job=job)
    peak = round((held + reports_peak(reports)) / GIB, 5)
    return {"allocated_gib": peak, "reserved_gib": peak}


# -- all cases -----------------------------------------------------------------------------------


def tools_of(asked: str) -> list[str]:
    """Tools from names of tools or families; eager first, since caps are shares of its peak."""
    known = {name: [name] for tools in TOOLS.values() for name in tools}
    known |= {family: list(tools) for family, tools in TOOLS.items()}
    names = asked.split(",") if asked else list(TOOLS)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"unknown tools {', '.join(unknown)}; known: {', '.join(known)}")
    found = [tool for name in names for tool in known[name]]
    return sorted(dict.fromkeys(found), key=lambda tool: tool != "eager")


def models_of(asked: str, default: Iterable[str]) -> list[str]:
    """Models by name; raises SystemExit for one that is not known."""
    names = asked.split(",") if asked else list(default)
    unknown = [name for name in names if name not in TINY]
    if unknown:
        raise SystemExit(f"unknown models {', '.join(unknown)}; known: {', '.join(TINY)}")
    return names


def caps_of(model: str, asked: str, tiny: bool = False) -> list[str]:
    """The caps of a model, in words: shares of eager's peak, and GiB."""
    if asked:
        return asked.split(",")
    return [*SHARES, *(CAPS.get(model, ()) if not tiny else ())]


def cap_gib(model: str, cap: str, rows: dict[str, Row]) -> float:
    """A cap in GiB; a share is one of what eager training allocated.

    Raises LookupError where there is no such row.
    """
    if not cap.endswith("%"):
        return float(cap)
    peak = rows.get(f"{model} eager", {}).get("allocated_gib")
    if not peak:
        raise LookupError(
            f"{model}: {cap} of what? There is no peak of eager training in the result file: "
            f"run --models {model} --tools eager first"
        )
    share: float = float(cap[:-1]) / 100 * peak
    return round(share, 2 if share > 1 else 5)


def cases_of(model: str, tool: str, args: argparse.Namespace, rows: dict[str, Row]) -> list[Case]:
    """The cases of a tool; says so where they cannot be run."""
    if tool == "offload_activations" and importlib.util.find_spec("trl") is None:
        print("offload_activations: trl is not installed, left out", file=sys.stderr)
        return []
    if tool == "selective-attention" and model in WITHOUT_ATTENTION:
        return []
    if tool not in OURS:
        return [Case(model, tool)]
    found = []
    for cap in caps_of(model, args.caps, args.tiny):
        try:
            found.append(Case(model, tool, cap, cap_gib(model, cap, rows)))
        except LookupError as error:
            print(error.args[0], file=sys.stderr)
    return found


def done(row: Row | None) -> bool:
    """Whether a case was run and gave an answer, be it that it does not fit."""
    return row is not None and ("error" not in row or answers(row))


def answers(row: Row) -> bool:
    """Whether an error says that the case does not fit."""
    return any(row["error"].startswith(kind) for kind in ANSWERS)


def start(
    case: Case, args: argparse.Namespace, steps: int, warm: int, untimed: bool = False
) -> Child:
    """A process for one case, which loads its libraries and waits; untimed, others run beside."""
    options = ["--case-model", case.model, "--case-tool", case.tool, "--cap", str(case.cap_gib)]
    options += ["--batch", str(case.batch), "--steps", str(steps), "--warm", str(warm)]
    options += ["--tiny"] if args.tiny else []
    options += ["--keep", args.keep] if args.keep else []
    env = {}
    if args.cold or args.ahead:
        env["TORCHINDUCTOR_CACHE_DIR"] = f"{args.scratch}/{case.name if args.cold else case.model}"
    if untimed:  # what legroom measures in its trials is not for others
        env["XDG_CACHE_HOME"] = f"{args.scratch}/untimed"
    if case.tool not in OURS:  # what wastes least; legroom sets it by itself
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return Child(__file__, options, env)


def todo(args: argparse.Namespace, results: Results) -> Iterator[tuple[Case, bool]]:
    """The cases asked for that are missing, and whether the compiler has met their code."""
    for model in models_of(args.models, TINY):
        ahead = compile_ahead(model, args, results) if args.ahead else set()
        for tool in tools_of(args.tools):
            for case in cases_of(model, tool, args, results.rows):
                if args.fresh or not done(results.rows.get(case.name)):
                    yield case, case in ahead


def fill(args: argparse.Namespace, results: Results) -> None:
    """Run the cases asked for and add them to the result file; the next one loads meanwhile."""
    cases = todo(args, results)
    begun: tuple[Case, bool, Child] | None = None

    def begin() -> tuple[Case, bool, Child] | None:
        case, met = next(cases, (None, False))
        return (case, met, start(case, args, args.steps, args.warm)) if case else None

    try:
        begun = begin()
        while begun is not None:
            (case, met, child), begun = begun, None
            if case.tool != "eager":  # caps of others are shares of its peak
                begun = begin()
            row = child.row(args.timeout, args.verbose)
            if met:
                row.pop("compile_s", None)  # it found the code there
            results.rows[case.name] = case.head() | row
            print(case.name, json.dumps(row), flush=True)
            results.save()
            begun = begun or begin()
    finally:
        if begun is not None:
            begun[2].end()


def compile_ahead(model: str, args: argparse.Namespace, results: Results) -> set[Case]:
    """Have the compiler make what cases will find in its cache, several at a time.

    Which kernel is the fastest they find out each for itself, when the device is theirs alone; so
    do legroom's trials.
    """
    tools = [t for t in tools_of(args.tools) if t.startswith(COMPILED) or t == "legroom"]
    found = (case for tool in tools for case in cases_of(model, tool, args, results.rows))
    cases = [c for c in found if args.fresh or not done(results.rows.get(c.name))]

    def compile_case(case: Case) -> None:
        start(case, args, steps=1, warm=AHEAD_STEPS, untimed=True).row(args.timeout)

    with ThreadPoolExecutor(args.ahead) as pool:
        list(pool.map(compile_case, cases))
    for choice in Path(args.scratch).rglob("*.best_config"):
        choice.unlink()
    return set(cases)


# -- the largest batch ---------------------------------------------------------------------------


def largest(fits: Callable[[int], bool], start: int, limit: int = 1 << 14) -> int:
    """The largest number that fits, to one part in sixteen; 0 if none does.

    Doubles from `start` while it fits, up to a limit, or halves until it does, and then bisects.
    """
    low, high = 0, start
    while high <= limit and fits(high):
        low, high = high, 2 * high
    if high > limit:
        return low
    while not low and high > 1:
        if fits(high // 2):
            low = high // 2
        else:
            high //= 2
    while low and high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def fill_largest(args: argparse.Namespace, results: Results) -> None:
    """Find the largest batches asked for; each trial is kept, so that a search can go on."""
    rows = results.content.setdefault("largest", {})
    for model in models_of(args.models, FIRST_BATCH):
        for tool in tools_of(args.tools or LARGEST):
            case = Case(model, tool, f"{args.largest_batch:g}", args.largest_batch)
            if args.fresh or case.name not in rows:
                rows[case.name] = case.head() | {"trials": {}}
            find_largest(case, rows[case.name], args, results)


def find_largest(case: Case, row: Row, args: argparse.Namespace, results: Results) -> None:
    """Find the largest batch of one tool, and note its time."""

    def fits(n: int) -> bool:
        return try_batch(replace(case, batch=n), row["trials"], args, results)

    start, limit = (2, 8) if args.tiny else (FIRST_BATCH.get(case.model, 4), 1 << 14)
    row["batch"] = largest(fits, start, limit)
    row |= row["trials"].get(str(row["batch"]), {})
    print(case.name, json.dumps(row), flush=True)
    results.save()


def try_batch(case: Case, trials: Row, args: argparse.Namespace, results: Results) -> bool:
    """Whether a batch of that size trains under the cap; run once."""
    name = str(case.batch)
    if not done(trials.get(name)):
        child = start(case, args, min(args.steps, 3), min(args.warm, 8))
        row = child.row(args.timeout, args.verbose)
        kept = ("ms", "allocated_gib", "reserved_gib", "error")
        trials[name] = {key: row[key] for key in kept if key in row}
        trials[name] |= {} if done(row) else {"broke": True}
        print(f"{case.name}, batch {name}:", json.dumps(trials[name]), flush=True)
        results.save()
    within = trials[name].get("reserved_gib", 0) <= case.cap_gib  # a CPU has no cap
    return "error" not in trials[name] and within


# -- the command ---------------------------------------------------------------------------------


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="", help=f"of {', '.join(TINY)}")
    parser.add_argument("--tools", default="", help=f"of {', '.join(TOOLS)}, or compile-0.7, ...")
    parser.add_argument("--caps", default="", help="for legroom: GiB, or 50%% of eager's peak")
    add_arguments(parser)
    parser.add_argument("--cold", action="store_true", help="compile each case from nothing")
    parser.add_argument("--ahead", type=int, default=0, help="cases to compile at a time, untimed")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--fresh", action="store_true", help="run cases again that were run before")
    again.add_argument("--skip-done", action="store_false", dest="fresh", help="do not (default)")
    parser.add_argument("--largest-batch", type=float, default=0, metavar="GIB")
    parser.add_argument("--table", action="store_true", help="print the results as markdown")
    parser.add_argument("--figure", default="", help="draw the results as SVG")
    parser.add_argument("--batch", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def print_case(args: argparse.Namespace) -> None:
    """Run the one case of this process and print its row, or its error as one."""
    await_turn()
    try:
        row = run_case(args)
    except Exception as error:
        traceback.print_exc()
        words = " ".join(str(error).split())
        row = {"error": f"{type(error).__name__}: {words}"[:300]}
    print(json.dumps(row), flush=True)


def show(args: argparse.Namespace, path: Path) -> None:
    """Print the table and draw the figure; of the one result file there is, if not of this one."""
    others = list(RESULTS.glob("memory_frontier-*.json"))
    if not path.exists() and not args.out and len(others) == 1:
        path = others[0]
    if not path.exists():
        raise SystemExit(f"no results at {path}: name a file with --out")
    content = Results(path).content
    if args.table:
        print(tables(content))
    if args.figure:
        draw(content, Path(args.figure))


def main() -> None:
    """Run one case, or all that are missing, or show what is there."""
    args = read_arguments()
    if args.case_model:
        return print_case(args)
    name = machine_name() + ("-tiny" if args.tiny else "")
    path = Path(args.out or RESULTS / f"memory_frontier-{name}.json")
    if args.table or args.figure:
        return show(args, path)
    end_children_with_this()
    results = Results(path, machine_name())
    with tempfile.TemporaryDirectory() as args.scratch:
        (fill_largest if args.largest_batch else fill)(args, results)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
