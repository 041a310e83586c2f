"""How many simulations of a step of 1,000 ops a second, under plans of several policies.

    python benchmarks/simulator_speed.py

`time` is what searches call in their loop, `shape` the peak alone, `run` a whole outcome with what
each action bought and cost. Writes `benchmarks/results/simulator_speed-<cores>c.json`.
"""

import json
import os
import time
from collections.abc import Callable

from cases import RESULTS

from legroom.machine.spec import find_machine
from legroom.memory.handmade import chain
from legroom.memory.planner import make_plan
from legroom.memory.simulate import Simulator

MIB = 1 << 20
POLICIES = ("keep_all", "recompute_all", "every_nth", "swap_all", "auto")
LEAST_S = 1.0


def rate(call: Callable[[], object]) -> float:
    """Calls a second: the best of three stretches."""
    found = []
    for _ in range(3):
        count, started = 0, time.perf_counter()
        while time.perf_counter() - started < LEAST_S / 3:
            call()
            count += 1
        found.append(count / (time.perf_counter() - started))
    return round(max(found), 1)


def main() -> None:
    """Measure, print a table, and write the result file."""
    machine = find_machine("a100-40g")
    step = chain(250, 64 * MIB, output_bytes=8 * MIB, time_s=1e-3)
    simulator = Simulator(step, machine)
    natural = simulator.shape([]).peak
    rows = {}
    for policy in POLICIES:
        share = 1.0 if policy == "keep_all" else 0.5
        budget = {"device": int(share * natural), "host": 2000 << 30}
        actions = make_plan(step, machine, budget, policy).actions
        calls: dict[str, Callable[[], object]] = {
            "time": lambda actions=actions: simulator.time(actions),
            "shape": lambda actions=actions: simulator.shape(actions),
            "run": lambda actions=actions, policy=policy: simulator.run(actions, policy),
        }
        rows[policy] = {"actions": len(actions)} | {k: rate(call) for k, call in calls.items()}
        print(policy, json.dumps(rows[policy]))
    content = {"cores": os.cpu_count(), "num_ops": len(step.ops), "per_second": rows}
    path = RESULTS / f"simulator_speed-{os.cpu_count()}c.json"
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
