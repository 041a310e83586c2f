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
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

GIB = 2**30
CAPS = {"llama-1b": (45, 30, 22), "resnet152": (16, 10)}
PEERS = ("eager", "checkpoint", "selective", "save_on_cpu", "offload_activations")
RESULTS = Path(__file__).parent / "results"


# -- one case ------------------------------------------------------------------------------------


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, as a user of torch's checkpointing would pick them."""
    if hasattr(model, "model") and hasattr(model.model, "layers"):
        return list(model.model.layers)
    names = ("Bottleneck", "Block")
    return [m for m in model.modules() if type(m).__name__.endswith(names)]


def wrap_blocks(model: nn.Module, **options: object) -> None:
    """Recompute each block with torch.utils.checkpoint."""
    for block in blocks_of(model):
        forward = block.forward

        def again(*args: object, _forward: object = forward, **kwargs: object) -> object:
            return checkpoint(_forward, *args, use_reentrant=False, **options, **kwargs)

        block.forward = again


def expensive_ops() -> list[object]:
    """The ops torch's own recipes for selective checkpointing keep: matrix products, attention."""
    aten = torch.ops.aten
    return [
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    ]


def peer_context(tool: str, model: nn.Module) -> object:
    """Set a peer up; the context to run each forward in."""
    if tool == "checkpoint":
        wrap_blocks(model)
    elif tool == "selective":
        keep = set(expensive_ops())

        def policy(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if op in keep else CheckpointPolicy.PREFER_RECOMPUTE

        wrap_blocks(model, context_fn=lambda: create_selective_checkpoint_contexts(policy))
    elif tool == "save_on_cpu":
        return lambda: torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())
    elif tool == "offload_activations":
        from trl.models.activation_offloading import OffloadActivations

        manager = OffloadActivations(use_streams=torch.cuda.is_available())
        return lambda: manager
    return contextlib.nullcontext


def build(model: str, device: str, tiny: bool) -> object:
    """The example job of that name."""
    from legroom.examples import EXAMPLES

    small = {
        "llama-1b": {"layers": 4, "dim": 128, "heads": 4, "vocab": 512, "batch": 2, "sequence": 64},
        "resnet152": {"batch": 2, "image": 64},
    }
    return EXAMPLES[model](device=device, **(small[model] if tiny else {}))


def run_case(args: argparse.Namespace) -> dict[str, object]:
    """Train some steps; time, peaks, and for legroom what was predicted."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.cap and device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(args.cap * GIB / total)
    torch.manual_seed(0)
    example = build(args.case_model, device, args.tiny)
    model = example.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    job, around = None, contextlib.nullcontext
    started = time.perf_counter()
    if args.case_tool in ("legroom", "idle"):
        import legroom

        job = legroom.fit(model, optimizer, budget=int(args.cap * GIB) if args.cap else "auto")
    else:
        around = peer_context(args.case_tool, model)
    batch = example.make_batch(0)
    seconds: list[float] = []
    without: list[float] = []
    host: list[tuple[float, float]] = []
    # "idle": every other step without legroom, for what it costs where it has nothing to do.
    every = 2 if args.case_tool == "idle" else 1
    early = 0
    for i in range(args.warm + args.steps * every):
        if i == args.warm:
            sync(device, reset=True)
            early = retries(device)
        bare = i >= args.warm and i % every == 1
        begin = time.perf_counter()
        with contextlib.nullcontext() if job is None or bare else job.step():
            with around():
                loss = example.loss_fn(model, batch)
            turned = time.perf_counter()
            loss.backward()
            ended = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        sync(device)
        took = time.perf_counter() - begin
        if i >= args.warm:
            (without if bare else seconds).append(took)
            host.append((turned - begin, ended - turned))
    row: dict[str, object] = {
        "ms": round(statistics.median(seconds) * 1e3, 2),
        "host_forward_ms": round(statistics.median(f for f, _ in host) * 1e3, 2),
        "host_backward_ms": round(statistics.median(b for _, b in host) * 1e3, 2),
        "loss": float(loss.detach()),
        "warm_s": round(time.perf_counter() - started, 1),
    }
    if device == "cuda":
        row["allocated_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 3)
        row["reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 3)
        row["retries"] = retries(device) - early
    if args.case_tool == "legroom":
        row |= legroom_row(job, args)
    if without:
        row["without_ms"] = round(statistics.median(without) * 1e3, 2)
        row["overhead_percent"] = round((row["ms"] / row["without_ms"] - 1) * 100, 2)
    return row


def legroom_row(job: object, args: argparse.Namespace) -> dict[str, object]:
    """What legroom planned and predicted."""
    both, kind = job.comparison(), job.current
    if args.keep:
        stem = f"{args.keep}/{args.case_model}-{args.cap or 'uncapped'}"
        kind.capture.step.save(f"{stem}-step.json.gz")
        kind.plan.save(f"{stem}-plan.json.gz")
        job.machine.save(f"{args.keep}/machine.json")
    return {
        "why": kind.plan.why,
        "predicted_ms": round(both.predicted.step_s * 1e3, 2),
        "predicted_gib": round(both.predicted.device_bytes / GIB, 3),
        "measured_gib": round(both.measured.device_bytes / GIB, 3),
        "replay_host_ms": round(both.measured.recompute_s * 1e3, 2),
        "stall_ms": round(both.measured.stall_s * 1e3, 2),
        "predicted_stall_ms": round(both.predicted.stall_s * 1e3, 2),
        "recompute_ms": round(both.predicted.recompute_s * 1e3, 2),
        "moved_gib": {k: round(v / GIB, 2) for k, v in both.predicted.moved_bytes.items()},
        "planning_s": round(kind.plan.planning_s, 2),
        "traced_ms": round(kind.capture.step.compute_s * 1e3, 2),
        "num_ops": len(kind.capture.step.ops),
        "deviation": job.runner.deviation,
        "all_ms": [round(m.seconds * 1e3, 1) for m in kind.measurements],
        "replans": kind.replans,
    }


def sync(device: str, reset: bool = False) -> None:
    """Wait for the device; forget earlier peaks if asked."""
    if device == "cuda":
        torch.cuda.synchronize()
        if reset:
            torch.cuda.reset_peak_memory_stats()


def retries(device: str) -> int:
    """How often the allocator gave cached memory back to go on, so far."""
    return torch.cuda.memory_stats()["num_alloc_retries"] if device == "cuda" else 0


# -- all cases -----------------------------------------------------------------------------------


def cases(args: argparse.Namespace) -> list[tuple[str, str, float]]:
    """(model, tool, cap in GiB; 0 for none) to run."""
    found = []
    for model in args.models.split(","):
        for tool in args.tools.split(","):
            caps = [float(c) for c in args.caps.split(",")] if args.caps else [*CAPS[model], 0]
            found += [(model, tool, c) for c in (caps if tool == "legroom" else [0])]
    return found


def machine_name() -> str:
    """A short name for the result file."""
    if not torch.cuda.is_available():
        return "cpu"
    return torch.cuda.get_device_name().lower().replace(" ", "-")


def child(model: str, tool: str, cap: float, args: argparse.Namespace) -> dict[str, object]:
    """Run one case in a process of its own."""
    command = [sys.executable, __file__, "--case-model", model, "--case-tool", tool]
    command += ["--cap", str(cap), "--steps", str(args.steps), "--warm", str(args.warm)]
    command += ["--tiny"] if args.tiny else []
    command += ["--keep", args.keep] if args.keep else []
    env = dict(os.environ)
    if cap and tool in PEERS:  # what wastes least under a cap; legroom sets it by itself
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=args.timeout, env=env
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {args.timeout:g} s"}
    rows = [x for x in done.stdout.splitlines() if x.startswith("{")]
    if done.returncode or not rows:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        if args.verbose:
            print(done.stderr[-3000:], file=sys.stderr)
        return {"error": last[0][:300]}
    return json.loads(rows[-1])


def main() -> None:
    """Run the cases asked for and add them to the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="llama-1b,resnet152")
    parser.add_argument("--tools", default=",".join((*PEERS, "legroom", "idle")))
    parser.add_argument("--caps", default="", help="GiB, for legroom; 0 is none")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm", type=int, default=40)
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--keep", default="", help="folder for legroom's traces and plans")
    parser.add_argument("--out", default="", help="result file")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--case-model", default="", help=argparse.SUPPRESS)
    parser.add_argument("--case-tool", default="", help=argparse.SUPPRESS)
    parser.add_argument("--cap", type=float, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case_model:
        print(json.dumps(run_case(args)), flush=True)
        return
    path = Path(args.out or RESULTS / f"eager_frontier-{machine_name()}.json")
    results = json.loads(path.read_text()) if path.exists() else {}
    results.setdefault("machine", machine_name())
    results.setdefault("torch", torch.__version__)
    rows = results.setdefault("rows", {})
    queue = cases(args)
    for model, tool, cap in queue:
        if tool == "offload_activations" and importlib.util.find_spec("trl") is None:
            print("offload_activations: trl is not installed, left out", file=sys.stderr)
            continue
        row = child(model, tool, cap, args)
        if tool in PEERS and not cap:
            low, high = row.get("allocated_gib", 0), row.get("reserved_gib", 0)
            queue += [(model, tool, c) for c in CAPS[model] if low <= c < high]
        rows[f"{model} {tool} {cap:g}"] = {"model": model, "tool": tool, "cap_gib": cap, **row}
        print(model, tool, f"{cap:g}", json.dumps(row), flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
