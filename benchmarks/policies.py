"""Every policy on every recorded step, on four machines at five budgets: is `auto` the best?

    python benchmarks/policies.py --minutes 30        # what is missing, for so long
    python benchmarks/policies.py --steps vgg16-256,dlrm-65536 --machines h200 --fresh
    python benchmarks/policies.py --table             # print what is there as Markdown

All is simulated: the steps are those that come with legroom, timed by each machine's rates. Each
policy plans for the very machine that judges it, without the caution that a real run is planned
with. Results are added to `benchmarks/results/policies.json`, a setting at a time; what is there already is left
alone. Plans of other policies get as long as `auto`'s, if they search.
"""

import argparse
import functools
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from cases import RESULTS

from legroom.core.errors import in_short
from legroom.machine.spec import find_machine
from legroom.memory.planner import POLICIES, Problem
from legroom.memory.retime import retimed
from legroom.memory.shipped import load_shipped, shipped_names
from legroom.memory.simulate import Simulator

MACHINES = ("h200", "a100-40g", "rtx4090", "v100-ssd")
SHARES = (0.8, 0.6, 0.4, 0.25, 0.15)
"""Of what the step takes as it is."""
AS_GOOD = 1.001
"""Times that differ by less are alike."""

Row = dict[str, Any]


class Setting(NamedTuple):
    """A step on a machine in a budget."""

    step: str
    machine: str
    share: float

    @property
    def name(self) -> str:
        """Its key in the result file."""
        return f"{self.step} {self.machine} {self.share:.0%}"


@functools.lru_cache(maxsize=2)
def simulator(step: str, machine: str) -> Simulator:
    """The step with the machine's times; kept for the next policy."""
    found = find_machine(machine)
    return Simulator(retimed(load_shipped(step), found), found)


def plan(setting: Setting, policy: str) -> Row:
    """What a policy makes of a setting."""
    import legroom.memory.policies  # noqa: F401  (fills the registry)
    from legroom.ahead import machine_budget

    free = simulator(setting.step, setting.machine)
    natural = free.run([])
    limits = machine_budget("auto", free.machine)
    limits["device"] = int(setting.share * natural.device_bytes)
    row: Row = {"natural_s": natural.step_s, "device_bytes": limits["device"]}
    problem, started = Problem(free, limits), time.perf_counter()
    try:
        actions = POLICIES[policy](problem).actions
        if problem.keeps(actions):
            row["step_s"] = free.time(actions)
    except Exception as error:
        row["error"] = in_short(error)
    return row | {"planning_s": round(time.perf_counter() - started, 2)}


def fill(args: argparse.Namespace, path: Path) -> None:
    """Plan what is missing, until the time is over."""
    content = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    content["cores"], rows = os.cpu_count(), content["rows"]
    until, policies = time.monotonic() + 60 * args.minutes, sorted(POLICIES)
    with ProcessPoolExecutor(
        os.cpu_count(), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        for setting in settings(args):
            if time.monotonic() > until:
                break
            known = {} if args.fresh else rows.get(setting.name, {}).get("policies", {})
            missing = [policy for policy in policies if policy not in known]
            if not missing:
                continue
            found = list(pool.map(functools.partial(plan, setting), missing))
            natural = {k: found[0][k] for k in ("natural_s", "device_bytes")}
            fresh = [{k: v for k, v in row.items() if k not in natural} for row in found]
            known = known | dict(zip(missing, fresh, strict=True))
            rows[setting.name] = {**setting._asdict(), **natural, "policies": known}
            path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
            print(line(rows[setting.name]), flush=True)


def settings(args: argparse.Namespace) -> Iterator[Setting]:
    """All that are asked for; the large batches first."""
    steps = args.steps.split(",") if args.steps else shipped_names()[1::2] + shipped_names()[::2]
    for step in steps:
        for machine in args.machines.split(","):
            for share in SHARES:
                yield Setting(step, machine, share)


# -- tables --------------------------------------------------------------------------------------


def best_other(row: Row) -> tuple[str, float] | None:
    """The fastest of the others that fit."""
    times = {k: v["step_s"] for k, v in row["policies"].items() if k != "auto" and "step_s" in v}
    name = min(times, key=lambda k: times[k], default=None)
    return (name, times[name]) if name else None


def line(row: Row) -> str:
    """One setting as a row of a table."""
    auto, other = row["policies"]["auto"], best_other(row)
    cells = [row["step"], row["machine"], f"{row['share']:.0%}"]
    cells.append(f"{auto['step_s'] / row['natural_s']:.3f}" if "step_s" in auto else "does not fit")
    cells.append(f"{other[1] / row['natural_s']:.3f}, {other[0]}" if other else "none fits")
    cells.append(f"{auto['planning_s']:.1f} s")
    return f"| {' | '.join(cells)} |"


def table(content: Row) -> str:
    """All settings, and in how many `auto` is as good as the best."""
    rows = list(content["rows"].values())
    heads = ("step", "machine", "budget", "auto, against no limit", "best other", "planning")
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join('---' for _ in heads)} |"]
    lines += [line(row) for row in rows]
    return "\n".join([*lines, "", summary(rows)])


def summary(rows: list[Row]) -> str:
    """In how many settings `auto` is the best, and by how much it is not, at worst."""
    losses = {}
    for name, row in ((f"{r['step']} on {r['machine']} at {r['share']:.0%}", r) for r in rows):
        auto, other = row["policies"]["auto"].get("step_s"), best_other(row)
        if other:
            losses[name] = (auto / other[1] if auto else float("inf")), other[0]
    lost = {k: v for k, v in losses.items() if v[0] > AS_GOOD}
    words = (
        f"`auto` is as good as the best of {len(rows[0]['policies']) - 1} others in "
        f"{len(losses) - len(lost)} of {len(losses)} settings that any fits"
    )
    if lost:
        worst = max(lost, key=lambda k: lost[k][0])
        words += f"; at worst it takes {lost[worst][0]:.3f} times as long as {lost[worst][1]} ({worst})"
    slowest = max(rows, key=lambda r: r["policies"]["auto"]["planning_s"])
    took = slowest["policies"]["auto"]["planning_s"]
    return f"{words}. Its plans took {took:.1f} s at most ({slowest['step']})."


def main() -> None:
    """Fill the result file, or print it."""
    import legroom.memory.policies  # noqa: F401  (fills the registry)

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", default="")
    parser.add_argument("--machines", default=",".join(MACHINES))
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--out", default=str(RESULTS / "policies.json"))
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(Path(args.out).read_text())))
        return
    fill(args, Path(args.out))


if __name__ == "__main__":
    main()
