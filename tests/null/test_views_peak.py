"""What the peak is made of equals what was simulated; machines and blocks in cells."""

import msgspec
import pytest

from legroom.machine.spec import Link, Machine, Tier
from legroom.memory.actions import Action, Compress, Move, Recompute
from legroom.memory.handmade import chain
from legroom.memory.plan import Plan
from legroom.memory.simulate import Simulator
from legroom.memory.trace import Step
from legroom.views.blocks import block_rows, block_states
from legroom.views.peak import find_peak
from legroom.views.table import machine_table


def make_machine() -> Machine:
    return Machine(
        name="box",
        device="cuda",
        origin="by hand",
        tiers=(
            Tier(name="device", num_bytes=16 * 2**30, reserve_bytes=2**30),
            Tier(name="host", num_bytes=64 * 2**30),
        ),
        links=(
            Link(source="device", target="host", bytes_per_s=25e9, latency_s=1e-5, root="pcie"),
            Link(source="host", target="device", bytes_per_s=25e9, root="pcie"),
        ),
        duplex={"pcie": 40e9},
        matrix_flops={"float32": 20e12, "bfloat16": 300e12},
        vector_flops=20e12,
        memory_bytes_per_s=900e9,
        launch_s=5e-6,
        pin_s_per_byte=0.5 / 2**30,
    ).check()


def make_plan(step: Step, actions: list[Action]) -> Plan:
    return Plan(
        policy="by hand",
        machine="box",
        model=step.model,
        budget={"device": 1000},
        actions=tuple(actions),
        predicted=Simulator(step, make_machine()).run(actions),
    ).check_against(step)


def test_machine_cells() -> None:
    """Tiers, links and rates, each with its unit; zeros are left out."""
    table = machine_table(make_machine())
    rows = zip(*(column.cells for column in table.columns), strict=True)
    assert (str(table.title), str(table.caption)) == ("box (cuda)", "source: by hand")
    assert [[str(cell) for cell in row] for row in rows] == [
        ["device bytes", "16.0 GiB, 1.00 GiB reserved"],
        ["host bytes", "64.0 GiB"],
        ["device->host", "25.0 GB/s, 10.0 us delay, shares pcie"],
        ["host->device", "25.0 GB/s, shares pcie"],
        ["pcie, all together", "40.0 GB/s"],
        ["matrix, float32", "20.0 TFLOP/s"],
        ["matrix, bfloat16", "300 TFLOP/s"],
        ["vector", "20.0 TFLOP/s"],
        ["device memory", "900 GB/s"],
        ["least time of an op", "5.00 us"],
        ["pinning", "500.0 ms per GiB"],
    ]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_peak_equals_the_simulated_one(every: int) -> None:
    """Whatever is recomputed, shrunk or moved, the parts add up to the predicted peak."""
    step = chain(6, 40, num_saved=2, output_bytes=16, weight_bytes=12)
    blocks = range(0, 6, every)
    actions: list[Action] = [Recompute(block=b, variant="full") for b in blocks]
    kept = [s for b in range(6) if b not in blocks for s in step.blocks[b].variants[0].drops]
    actions += [Compress(storage=s, codec="fp8") for s in kept[::2]]
    actions += [move(step, s) for s in kept[1::2]]
    plan = make_plan(step, actions)
    peak = find_peak(step, plan)
    assert peak.num_bytes == plan.predicted.device_bytes
    assert peak.where == plan.predicted.peak_at


def test_what_autograd_holds_to_the_end_is_part_of_the_peak() -> None:
    """A dropped tensor whose node is never let go: its block's arguments stay as long."""
    step = chain(3, 40, num_saved=2, output_bytes=16, weight_bytes=12)
    end = len(step.ops)
    long = {s for block in step.blocks for s in block.variants[0].drops}
    storages = tuple(
        msgspec.structs.replace(row, death=end, done=row.death) if s in long else row
        for s, row in enumerate(step.storages)
    )
    step = msgspec.structs.replace(step, storages=storages).check()
    plan = make_plan(step, [Recompute(block=b, variant="full") for b in range(3)])
    assert find_peak(step, plan).num_bytes == plan.predicted.device_bytes


def move(step: Step, storage: int) -> Move:
    out, back = step.packed(storage), step.first_use(storage)
    return Move(
        storage=storage,
        tier="host",
        out_start=out,
        out_wait=out + 2,
        in_start=back - 1,
        in_wait=back,
    )


def test_peak_of_a_replay_has_its_parts() -> None:
    """A replay with 500 bytes of temporaries is the peak, with its input and what it brings."""
    step = chain(1, 100, num_saved=2, output_bytes=10)
    variant = msgspec.structs.replace(step.blocks[0].variants[0], replay_peak_bytes=700)
    block = msgspec.structs.replace(step.blocks[0], variants=(variant,))
    step = msgspec.structs.replace(step, blocks=(block,))
    plan = make_plan(step, [Recompute(block=0, variant="full")])
    peak = find_peak(step, plan)
    assert peak.where == plan.predicted.peak_at == "recomputing blocks.0"
    assert {h.name: h.num_bytes for h in peak.holdings} == {
        "temporaries of recomputing blocks.0": 500,
        "s0.0": 100,
        "s0.1": 100,
        "x0": 10,
        "x1'": 10,
    }
    assert peak.num_bytes == plan.predicted.device_bytes


WHY = "1.00 s for 1.00 MiB less"


def test_blocks_that_run_alike_share_a_row() -> None:
    """Neighbours with one treatment are one row, with their number."""
    step = chain(4, 2**20)
    plan = make_plan(step, [Recompute(block=b, variant="full") for b in (1, 2)])
    assert block_states(step, plan) == ["kept", "recomputed", "recomputed", "kept"]
    assert block_rows(step, plan) == [
        ("blocks.0", "1", "keep", "-", "-", "-", "there is room"),
        (
            "blocks.1 to blocks.2",
            "2",
            "full",
            "1.00 MiB",
            "1.00 s",
            "-",
            "1.00 s for 1.00 MiB less",
        ),
        ("blocks.3", "1", "keep", "-", "-", "-", "there is room"),
    ]
