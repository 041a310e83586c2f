#!/usr/bin/env python
"""Record the steps that come with legroom, and write them with their index and README.

    python scripts/make_traces.py              # all of them, into legroom/traces
    python scripts/make_traces.py vgg16 dlrm   # only those of these examples; the rest stays

Nothing is run: tensors are fake, times are the machine's rates. Needs transformers, and a torch
without CUDA, whose kernels the ops are. The same versions write the same bytes.
"""

import importlib.metadata
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from torch.utils._pytree import tree_leaves

from legroom.cli.jobs import build, trace_job
from legroom.machine.spec import find_machine
from legroom.memory.shipped import INDEX, SUFFIX, Shipped, ShippedSteps
from legroom.memory.simulate import Simulator

FOLDER = Path(__file__).parents[1] / "legroom" / "traces"
MACHINE = "a100-40g"
COMMAND = "python scripts/make_traces.py"
AUTOCAST, HALF, FULL = "bfloat16 autocast", "bfloat16", "float32"


class Case(NamedTuple):
    """An example, recorded once for each batch."""

    job: str
    batches: tuple[int, ...]
    optimizer: str
    precision: str


CASES = (
    Case("vgg16", (128, 256), "sgd-momentum", AUTOCAST),
    Case("resnet50", (256, 512), "sgd-momentum", AUTOCAST),
    Case("resnet152", (128, 256), "sgd-momentum", AUTOCAST),
    Case("resnet200", (128, 256), "sgd-momentum", AUTOCAST),
    Case("inception", (256, 512), "sgd-momentum", AUTOCAST),
    Case("densenet", (256, 512), "sgd-momentum", AUTOCAST),
    Case("unet-512", (8, 16), "sgd-momentum", AUTOCAST),
    Case("vit-l16", (64, 128), "adamw", AUTOCAST),
    Case("bert-base", (32, 64), "adamw", HALF),
    Case("bert-large", (16, 32), "adamw", HALF),
    Case("gpt2-medium", (8, 16), "adamw", HALF),
    Case("gpt2-xl", (4, 8), "adamw", HALF),
    Case("moe", (8, 16), "adamw", HALF),
    Case("seq2seq", (128, 256), "adam", FULL),
    Case("dlrm", (16384, 65536), "sgd", FULL),
)

README = """\
# Recorded steps

Training steps of well-known models, to try policies on without a model, a GPU or a torch that runs
them. `legroom show traces` lists them, `legroom show {first}` prints one, and

    legroom compare {first} --machine v100-16g --budget 5GiB

plans one with every policy. In Python: `legroom.memory.shipped.load_shipped("{first}")`.

- The models are the built-in examples of the same names, with random weights, in the shapes below.
  Every step is a forward, a backward and an update.
- Nothing was run. Each was captured with fake tensors (`legroom.trace`) on torch {torch} and
  transformers {transformers}. Sizes and lifetimes are those of that torch: it has no CUDA, so ops
  are those of a CPU. Attention of `vit`, `gpt2` and `moe` is one fused kernel; that of `bert` is
  written out. An LSTM layer is one op that keeps what the CPU's kernel keeps. Dropout keeps a
  mask of the tensor's own dtype. No op has scratch: what a kernel takes for a moment, fake tensors
  do not know.
- Times are a roofline with the rates of the preset `{machine}`: nobody measured them. For another
  `--machine` they are computed anew, as a capture for it would have (`legroom.memory.retime`).
- `moe` sorts its tokens by expert and runs all experts in one grouped product; so its shapes do
  not depend on where the tokens go.
- `peak` and `step` are the simulator's for the step as it is.

Made by `{command}`, which writes this file as well. The same versions of torch and
transformers write the same bytes.

| name | model | batch | numbers | optimizer | machine | ops | peak | step |
|---|---|---|---|---|---|---|---|---|
{rows}
"""


def main(wanted: list[str]) -> None:
    """Record what is asked for, and write the index and the README anew."""
    unknown = set(wanted) - {case.job for case in CASES}
    if unknown:
        raise SystemExit(f"no such case: {', '.join(sorted(unknown))}")
    rows = {row.name: row for row in _known()} if wanted else {}
    for case in CASES:
        for batch in case.batches if not wanted or case.job in wanted else ():
            row = _record(case, batch)
            rows[row.name] = row
    names = [f"{case.job}-{batch}" for case in CASES for batch in case.batches]
    index = ShippedSteps(
        machine=MACHINE,
        torch=importlib.metadata.version("torch"),
        transformers=importlib.metadata.version("transformers"),
        command=COMMAND,
        steps=tuple(rows[name] for name in names),
    )
    index.check().save(FOLDER / INDEX)
    (FOLDER / "README.md").write_text(_readme(index))
    print(f"all together {sum(f.stat().st_size for f in FOLDER.iterdir()):,} bytes")


def _known() -> tuple[Shipped, ...]:
    return ShippedSteps.load(FOLDER / INDEX).steps


def _record(case: Case, batch: int) -> Shipped:
    """Capture one and save it; where it comes from."""
    name, sizes, machine = f"{case.job}-{batch}", {"batch": batch}, find_machine(MACHINE)
    job = build(case.job, "meta", sizes)
    step = trace_job(job, machine, case.optimizer)
    step = msgspec.structs.replace(step, signature=f"{case.job} batch={batch}, {case.optimizer}")
    path = step.check().save(FOLDER / f"{name}{SUFFIX}")
    outcome = Simulator(step, machine).run([], "keep_all")
    print(f"{name}: {len(step.ops)} ops, {path.stat().st_size:,} bytes", flush=True)
    return Shipped(
        name=name,
        job=case.job,
        sizes=sizes,
        shapes=_shapes(job.make_batch(seed=0)),
        precision=case.precision,
        optimizer=case.optimizer,
        model=step.model,
        num_ops=len(step.ops),
        peak_bytes=outcome.device_bytes,
        step_s=outcome.step_s,
    )


def _shapes(batch: Any) -> str:
    found = ("x".join(map(str, tensor.shape)) for tensor in tree_leaves(batch))
    return ", ".join(dict.fromkeys(found))


def _readme(index: ShippedSteps) -> str:
    rows = (
        f"| `{row.name}` | {row.model} | {row.shapes} | {row.precision} | {row.optimizer} "
        f"| {index.machine} | {row.num_ops:,} | {row.peak_bytes / 2**30:.1f} GiB "
        f"| {row.step_s * 1e3:.0f} ms |"
        for row in index.steps
    )
    return README.format(
        first=index.steps[0].name,
        torch=index.torch,
        transformers=index.transformers,
        machine=index.machine,
        command=index.command,
        rows="\n".join(rows),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
