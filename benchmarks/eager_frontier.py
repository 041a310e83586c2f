"""Step time against peak memory of eager training: legroom and its peers, one process per case.

    python benchmarks/eager_frontier.py                       # all cases, on this machine's GPU
    python benchmarks/eager_frontier.py --models llama-1b --tools eager,legroom --caps 45
    python benchmarks/eager_frontier.py --tiny                # small sizes, runs on a CPU too

Each case is a fresh process. With a cap, device memory is limited from the process's start
(`set_per_process_memory_fraction`). Peers know no budget: each runs without a cap first, and fits a
cap if its peak of reserved memory does. Where only what it allocated would, it runs again under
that cap, with growing segments, and fits if it gets through. Results are added to
`benchmarks/results/eager_frontier-<machine>.json`, so the matrix can be filled over several runs.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import sys
from pathlib import Path

from cases import (
    GIB,
    PEER_WARM,
    RESULTS,
    Child,
    Results,
    Row,
    Times,
    adamw,
    add_arguments,
    build,
    cap_device,
    end_children_with_this,
    legroom_row,
    machine_name,
    milliseconds,
    train,
)
from peers import set_up

CAPS = {"llama-1b": (45, 30, 22), "resnet152": (16, 10)}
PEERS = ("eager", "checkpoint", "selective", "save_on_cpu", "offload_activations")


# -- one case ------------------------------------------------------------------------------------


def run_case(args: argparse.Namespace) -> Row:
    """Train some steps; time, peaks, and for legroom what was predicted."""
    cap_device(args.cap)
    example = build(args.case_model, args.tiny)
    optimizer = adamw(example.model)
    times, job, around = Times(), None, contextlib.nullcontext
    if args.case_tool in ("legroom", "idle"):
        import legroom

        budget = int(args.cap * GIB) if args.cap else "auto"
        job = legroom.fit(example.model, optimizer, budget=budget)
    else:
        around = set_up(args.case_tool, example.model)
    # "idle": every other step without legroom, for what it costs where it has nothing to do.
    every = 2 if args.case_tool == "idle" else 1
    warm = min(args.warm, PEER_WARM) if args.case_tool in PEERS else args.warm
    counts = {"warm": warm, "steps": args.steps, "every": every}
    train(times, example, optimizer, around=around, job=job, **counts)
    row = times.row()
    if args.case_tool == "legroom":
        row |= legroom_row(job, args.keep, f"{args.case_model}-{args.cap or 'uncapped'}")
    if times.without:
        row["without_ms"] = milliseconds(times.without)
        row["overhead_percent"] = round((row["ms"] / row["without_ms"] - 1) * 100, 2)
    return row


# -- all cases -----------------------------------------------------------------------------------


def cases(args: argparse.Namespace) -> list[tuple[str, str, float]]:
    """(model, tool, cap in GiB; 0 for none) to run."""
    found = []
    for model in args.models.split(","):
        for tool in args.tools.split(","):
            caps = [float(c) for c in args.caps.split(",")] if args.caps else [*CAPS[model], 0]
            found += [(model, tool, c) for c in (caps if tool == "legroom" else [0])]
    return found


def run_child(model: str, tool: str, cap: float, args: argparse.Namespace) -> Row:
    """Run one case in a process of its own."""
    options = ["--case-model", model, "--case-tool", tool, "--cap", str(cap)]
    options += ["--steps", str(args.steps), "--warm", str(args.warm)]
    options += ["--tiny"] if args.tiny else []
    options += ["--keep", args.keep] if args.keep else []
    env = {}
    if cap and tool in PEERS:  # what wastes least under a cap; legroom sets it by itself
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return Child(__file__, options, env).row(args.timeout, args.verbose)


def main() -> None:
    """Run the cases asked for and add them to the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="llama-1b,resnet152")
    parser.add_argument("--tools", default=",".join((*PEERS, "legroom", "idle")))
    parser.add_argument("--caps", default="", help="GiB, for legroom; 0 is none")
    add_arguments(parser)
    args = parser.parse_args()
    if args.case_model:
        print(json.dumps(run_case(args)), flush=True)
        return
    end_children_with_this()
    path = Path(args.out or RESULTS / f"eager_frontier-{machine_name()}.json")
    results = Results(path, machine_name())
    queue = cases(args)
    for model, tool, cap in queue:
        if tool == "offload_activations" and importlib.util.find_spec("trl") is None:
            print("offload_activations: trl is not installed, left out", file=sys.stderr)
            continue
        row = run_child(model, tool, cap, args)
        if tool in PEERS and not cap:
            low, high = row.get("allocated_gib", 0), row.get("reserved_gib", 0)
            queue += [(model, tool, c) for c in CAPS[model] if low <= c < high]
        name = f"{model} {tool} {cap:g}"
        results.rows[name] = {"model": model, "tool": tool, "cap_gib": cap, **row}
        print(model, tool, f"{cap:g}", json.dumps(row), flush=True)
        results.save()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
