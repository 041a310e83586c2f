"""Draw docs/memory.svg: a step's device memory over time, as it is and under a plan.

    pip install 'legroom[docs]'
    python docs/make_figure.py

The step is the demo's transformer on an L4, captured with fake tensors: no GPU is needed, and
times come from that card's rates. The picture is what the simulator predicts; nothing in it was
measured.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

import legroom
from legroom.cli.demo import SHARE, SIZES
from legroom.core.outcome import Timeline
from legroom.core.units import format_bytes
from legroom.examples import EXAMPLES
from legroom.memory.simulate import Simulator
from legroom.memory.timeline import predicted_timeline

GIB, MS = 2**30, 1e3
KINDS = {
    "weight": ("weights", "#4c566a"),
    "state": ("optimizer states", "#8a94a8"),
    "gradient": ("gradients", "#c9a227"),
    "activation": ("saved for backward", "#3b7dd8"),
    "temporary": ("temporaries", "#a9cbf5"),
}
"""From the bottom up; inputs are too small to see and count as temporaries."""


def main() -> None:
    """Trace, plan, and draw both timelines on one scale."""
    machine = legroom.find_machine("l4")
    job = EXAMPLES["transformer"](device="meta", **SIZES["cuda"]["transformer"])
    step = legroom.trace(job.model, job.make_batch(), machine=machine, loss_fn=job.loss_fn)
    simulator = Simulator(step, machine)
    plain = simulator.run([], "keep_all")
    static = sum(s.num_bytes for s in step.storages if s.birth < 0)
    budget = static + int(SHARE * (plain.device_bytes - static))
    plan = legroom.make_plan(step, machine, {"device": budget, "host": 16 * GIB})
    heads = (
        f"As it is: peak {format_bytes(plain.device_bytes)}, step {plain.step_s * MS:.0f} ms",
        f"Planned for {format_bytes(budget)}: peak {format_bytes(plan.predicted.device_bytes)}, "
        f"step {plan.predicted.step_s * MS:.0f} ms",
    )
    lines = predicted_timeline(simulator, []), predicted_timeline(simulator, plan.actions)
    plt.rcParams |= {"font.size": 10, "svg.hashsalt": "legroom", "svg.fonttype": "path"}
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.9), sharey=True, layout="constrained")
    for axes, head, line in zip(panels, heads, lines, strict=True):
        draw(axes, head, line, budget)
    panels[0].set_ylabel("device memory, GiB")
    end = max(end_of(line) for line in lines) * MS
    for axes in panels:
        axes.set_xlim(0, end)
    names, labels = panels[0].get_legend_handles_labels()
    figure.legend(names[::-1], labels[::-1], loc="outside lower center", ncols=6, frameon=False)
    path = Path(__file__).parent / "memory.svg"
    figure.savefig(path, metadata={"Date": None})
    print(f"{path}: {plan.why}")


def draw(axes: Axes, head: str, line: Timeline, budget: int) -> None:
    """One timeline as stacked areas, with the budget as a line."""
    rows = {kind: list(line.bytes_by_kind.get(kind, ())) for kind in (*KINDS, "input")}
    count = len(line.times_s)
    extra = rows.pop("input") or [0] * count
    rows = {kind: row or [0] * count for kind, row in rows.items()}
    rows["temporary"] = [a + b for a, b in zip(rows["temporary"], extra, strict=True)]
    axes.stackplot(
        [t * MS for t in (*line.times_s, end_of(line))],
        [[b / GIB for b in (*row, row[-1])] for row in rows.values()],
        labels=[KINDS[kind][0] for kind in rows],
        colors=[KINDS[kind][1] for kind in rows],
        linewidth=0,
    )
    axes.axhline(budget / GIB, color="#c0392b", linewidth=1.4, linestyle="--", label="budget")
    turn = min(span.start_s for span in line.spans if span.kind == "backward") * MS
    axes.axvline(turn, color="#777777", linewidth=0.8, linestyle=":")
    for place, word, side in ((turn - 8, "forward", "right"), (turn + 8, "backward", "left")):
        axes.text(place, 0.985, word, ha=side, va="top", color="#555555", fontsize=9,
                  transform=axes.get_xaxis_transform())  # fmt: skip
    axes.set_title(head, loc="left", fontsize=10.5)
    axes.set_xlabel("time in the step, ms")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(0, 14)


def end_of(line: Timeline) -> float:
    """When the step's last op ends."""
    return max(span.end_s for span in line.spans)


if __name__ == "__main__":
    main()
