"""What the benchmarks share: a case in a process of its own, timed steps, peaks, result files."""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

GIB = 2**30
RESULTS = Path(__file__).parent / "results"
TINY: dict[str, dict[str, int]] = {
    "llama-1b": {"layers": 4, "dim": 128, "heads": 4, "vocab": 512, "batch": 4, "sequence": 128},
    "llama-wide": {"layers": 2, "dim": 256, "heads": 4, "vocab": 512, "batch": 4, "sequence": 128},
    "moe": {"layers": 3, "dim": 64, "heads": 4, "vocab": 512, "batch": 4, "sequence": 128},
    "gpt2-large": {"layers": 4, "dim": 128, "heads": 4, "vocab": 512, "batch": 4, "sequence": 128},
    "vit-l16": {"layers": 4, "dim": 128, "heads": 4, "batch": 16, "image": 96},
    "resnet152": {"batch": 2, "image": 64},
    "unet-512": {"width": 8, "depth": 3, "batch": 4, "image": 64},
}
"""Sizes that run on a CPU."""

PEER_WARM = 10
"""Warm steps of a peer, at most: it has nothing to learn from more."""

Row = dict[str, Any]
GO = "go\n"
"""What a child that waits is told."""
Around = Callable[[], contextlib.AbstractContextManager[object]]


# -- one case, in its own process ----------------------------------------------------------------


def device_name() -> str:
    """The device of this process."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def machine_name() -> str:
    """A short name for the result file."""
    if not torch.cuda.is_available():
        return "cpu"
    return torch.cuda.get_device_name().lower().replace(" ", "-")


def cap_device(cap_gib: float) -> None:
    """Let the allocator refuse more than that from now on; 0 is no cap, and a CPU takes none."""
    if cap_gib and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(cap_gib * GIB / total)


def build(model: str, tiny: bool = False, batch: int = 0) -> Any:
    """The example job of that name on this process's device, ready to train; 0: its own batch."""
    from legroom.examples import EXAMPLES

    torch.manual_seed(0)
    sizes = (TINY[model] if tiny else {}) | ({"batch": batch} if batch else {})
    example = EXAMPLES[model](device=device_name(), **sizes)
    example.model.train()
    return example


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all cases."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


@dataclass
class Times:
    """Seconds of the steps of a case."""

    started: float = field(default_factory=time.perf_counter)
    warm: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    without: list[float] = field(default_factory=list)
    """Of the steps run without legroom."""
    host: list[tuple[float, float]] = field(default_factory=list)
    """Of the host alone, in forward and backward."""
    loss: float = 0.0
    retries: int = 0
    """How often the allocator gave cached memory back to go on, in the timed steps."""

    def row(self) -> Row:
        """Median times, and the peaks since the last warm step."""
        row = {
            "ms": milliseconds(self.seconds),
            "host_forward_ms": milliseconds([f for f, _ in self.host]),
            "host_backward_ms": milliseconds([b for _, b in self.host]),
            "loss": self.loss,
            "warm_s": round(time.perf_counter() - self.started, 1),
        }
        if torch.cuda.is_available():
            row["allocated_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 3)
            row["reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 3)
            row["retries"] = self.retries
        return row

    def extra_s(self) -> float:
        """What the warm steps took beyond as many settled ones: to compile, to plan."""
        return round(sum(self.warm) - len(self.warm) * statistics.median(self.seconds), 1)


def train(
    times: Times,
    example: Any,
    optimizer: torch.optim.Optimizer,
    *,
    warm: int,
    steps: int,
    around: Around = contextlib.nullcontext,
    job: Any = None,
    every: int = 1,
    tidy: bool = False,
) -> None:
    """Train some steps and note their times; of every so many, the second is without the job.

    With `tidy`, memory that only the warm steps needed is given back and does not count.
    """
    batch = example.make_batch(0)
    early = 0
    for i in range(warm + steps * every):
        if i == warm:
            sync(reset=True, tidy=tidy)
            early = retries()
        bare = i >= warm and i % every == 1
        begin = time.perf_counter()
        with contextlib.nullcontext() if job is None or bare else job.step():
            with around():
                loss = example.loss_fn(example.model, batch)
            turned = time.perf_counter()
            loss.backward()
            ended = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        sync()
        took = time.perf_counter() - begin
        if i < warm:
            times.warm.append(took)
            continue
        (times.without if bare else times.seconds).append(took)
        times.host.append((turned - begin, ended - turned))
    times.loss = float(loss.detach())
    times.retries = retries() - early


def sync(reset: bool = False, tidy: bool = False) -> None:
    """Wait for the device; give cached memory back and forget earlier peaks if asked."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        if tidy:
            torch.cuda.empty_cache()
        if reset:
            torch.cuda.reset_peak_memory_stats()


def retries() -> int:
    """How often the allocator gave cached memory back to go on, so far."""
    return torch.cuda.memory_stats()["num_alloc_retries"] if torch.cuda.is_available() else 0


def milliseconds(seconds: Sequence[float]) -> float:
    """The median, for a row."""
    return round(statistics.median(seconds) * 1e3, 2)


def legroom_row(job: Any, keep: str = "", stem: str = "") -> Row:
    """What legroom planned and predicted; trace and plan are saved in the folder `keep`."""
    both, kind = job.comparison(), job.current
    if keep:
        kind.capture.step.save(f"{keep}/{stem}-step.json.gz")
        kind.plan.save(f"{keep}/{stem}-plan.json.gz")
        job.machine.save(f"{keep}/machine.json")
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
        "stretches": len(kind.placement.stretches),
        "host_budget_gib": round(kind.plan.budget.get("host", 0) / GIB, 1),
        "traced_ms": round(kind.capture.step.compute_s * 1e3, 2),
        "num_ops": len(kind.capture.step.ops),
        "deviation": job.runner.deviation,
        "all_ms": [round(m.seconds * 1e3, 1) for m in kind.measurements],
        "replans": kind.replans,
        "verdicts_ms": [(round(p * 1e3, 1), round(m * 1e3, 1)) for p, m in kind.verdicts],
        "contention": round(job.machine.contention, 4),
    }


# -- many cases ----------------------------------------------------------------------------------


CHILDREN: "weakref.WeakSet[Child]" = weakref.WeakSet()


class Child:
    """A process for one case: it loads what it needs at once, and runs when it is asked for."""

    def __init__(
        self, script: str, options: Sequence[str], env: Mapping[str, str] | None = None
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, script, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
            start_new_session=True,  # so that compilers it started end with it
        )
        CHILDREN.add(self)

    def row(self, timeout: float, verbose: bool = False) -> Row:
        """Run the case: the row it prints, or what went wrong."""
        try:
            output, errors = self._process.communicate(GO, timeout=timeout)
        except BaseException as error:
            self.end()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return {"error": f"not done after {timeout:g} s"}
        rows = [x for x in output.splitlines() if x.startswith("{")]
        last = errors.strip().splitlines()[-1:] or ["no output"]
        failed = self._process.returncode or not rows
        row: Row = {"error": last[0][:300]} if failed else json.loads(rows[-1])
        if verbose and "error" in row:
            print(errors[-3000:], file=sys.stderr)
        return row

    def end(self) -> None:
        """End the process and all it started."""
        self.kill()
        self._process.communicate()

    def kill(self) -> None:
        """The same, without waiting for it."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def end_children_with_this() -> None:
    """Where this process is asked to end, what it started ends too; else it would run on."""

    def end(*_: object) -> None:
        for child in CHILDREN:
            child.kill()
        sys.exit("asked to end")

    signal.signal(signal.SIGTERM, end)


def await_turn() -> None:
    """In a child: load the libraries, then wait until the case is asked for."""
    import transformers.modeling_utils  # noqa: F401

    import legroom.examples  # noqa: F401

    if torch.cuda.is_available():
        torch.cuda.init()
    if not sys.stdin.readline():
        sys.exit("nobody asked for this case")


class Results:
    """A result file that fills over several runs."""

    def __init__(self, path: Path, machine: str = "") -> None:
        self.path = path
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        if machine:
            self.content.setdefault("machine", machine)
            self.content.setdefault("torch", torch.__version__)
        self.rows: dict[str, Row] = self.content.setdefault("rows", {})

    def save(self) -> None:
        """Write all of it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What both benchmarks take: how long to run, where to write, and which case a child is."""
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
