"""The law of traces and plans: a hand-made one keeps it, and each breach names its row."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from legroom.core.errors import InputError, RecordError
from legroom.core.outcome import Outcome
from legroom.memory.actions import Action, Compress, Move, Recompute
from legroom.memory.handmade import chain, natural_peak
from legroom.memory.plan import Plan, held_inputs, replay_position
from legroom.memory.trace import Kind, Phase, Step

STEP = chain(2, 10, output_bytes=3)
"""Ops 0..9: f0.0 f0.1 f1.0 f1.1 loss loss' b1.1 b1.0 b0.1 b0.0; values x0 s0.0 x1 s1.0 x2."""


def with_row(step: Step, field: str, index: int, **changes: Any) -> Step:
    """The step with one row of one field changed."""
    rows = list(getattr(step, field))
    rows[index] = replace(rows[index], **changes)
    return replace(step, **{field: tuple(rows)})


def plan(*actions: Action, **fields: Any) -> Plan:
    """A plan with these actions; its prediction is of no interest."""
    predicted = Outcome(source="predicted", peak_bytes={"device": 0}, step_s=0.0)
    given = {"budget": {"device": 100}, **fields}
    return Plan(
        policy="hand", machine="m", model="chain", predicted=predicted, actions=actions, **given
    )


def move(storage: int = 1, positions: tuple[int, int, int, int] = (2, 3, 7, 8)) -> Move:
    """Storage 1 (s0.0) is saved at position 1, let go after op 1 and needed by op 8."""
    out_start, out_wait, in_start, in_wait = positions
    return Move(
        storage=storage,
        tier="host",
        out_start=out_start,
        out_wait=out_wait,
        in_start=in_start,
        in_wait=in_wait,
    )


# -- the hand-made chain -------------------------------------------------------------------------


def test_the_chain_runs_forward_and_back() -> None:
    """Each op is undone in reverse order, the loss between."""
    names = " ".join(op.name for op in STEP.ops)
    assert names == "f0.0 f0.1 f1.0 f1.1 loss loss' b1.1 b1.0 b0.1 b0.0"
    assert STEP.turn == 5
    assert [op.phase for op in STEP.ops] == [Phase.FORWARD] * 5 + [Phase.BACKWARD] * 5


def test_values_live_from_birth_to_their_backward() -> None:
    """Value v: born in op v - 1, let go after op v, dies with the op that undoes op v."""
    lives = {s.name: (s.birth, s.release, s.death) for s in STEP.storages}
    assert lives == {
        "x0": (-1, 10, 10),
        "s0.0": (0, 1, 8),
        "x1": (1, 2, 7),
        "s1.0": (2, 3, 6),
        "x2": (3, 4, 5),
        "s0.0'": (8, 9, 9),
        "x1'": (7, 8, 8),
        "s1.0'": (6, 7, 7),
        "x2'": (5, 6, 6),
    }


def test_what_is_saved_is_asked_for_once() -> None:
    """Op i saves value i just before it runs and is undone by op 2F + 1 - i."""
    rows = [(r.storage, r.block, r.ordinal, r.packed, r.unpacked) for r in STEP.saved]
    assert rows == [
        (0, 0, 0, 0, (9,)),
        (1, 0, 1, 1, (8,)),
        (2, 1, 0, 2, (7,)),
        (3, 1, 1, 3, (6,)),
        (4, -1, 0, 4, (5,)),
    ]
    assert STEP.ticks == tuple(range(11))


def test_a_block_drops_what_it_made_and_keeps_its_input() -> None:
    one = STEP.blocks[1]
    assert (one.name, one.first, one.last, one.inputs) == ("blocks.1", 2, 3, (2,))
    (full,) = one.variants
    assert (full.name, full.drops, full.replays, full.last) == ("full", (3,), (2,), 2)
    assert (full.dropped_bytes, full.replay_s, full.replay_peak_bytes) == (10, 1.0, 10)
    assert replay_position(STEP, full) == 6


def test_the_natural_peak_is_a_sum_of_named_parts() -> None:
    """It is in the first backward op of the last block, where two gradients are alive."""
    x0, x1, s0, s1, grad_x2, grad_s1 = 3, 3, 10, 10, 3, 10
    assert natural_peak(STEP) == x0 + x1 + s0 + s1 + grad_x2 + grad_s1


def test_weights_bring_gradients_and_an_update() -> None:
    step = chain(2, 10, weight_bytes=7)
    assert (step.ops[-1].name, step.ops[-1].phase) == ("update", Phase.UPDATE)
    weights = [s for s in step.storages if s.kind == Kind.WEIGHT]
    gradients = [s for s in step.storages if s.kind == Kind.GRADIENT]
    assert [(w.name, w.birth, w.death) for w in weights] == [("w0", -1, 11), ("w1", -1, 11)]
    assert [(g.name, g.birth, g.death) for g in gradients] == [("w0'", 9, 10), ("w1'", 7, 10)]


def test_sizes_and_times_may_differ_by_block() -> None:
    """Blocks alike in size and time are of one group."""
    step = chain(3, [10, 20, 10], time_s=[1.0, 2.0, 1.0], backward_ratio=3.0)
    assert [b.group for b in step.blocks] == [0, 1, 0]
    assert [b.variants[0].dropped_bytes for b in step.blocks] == [10, 20, 10]
    assert step.compute_s == 2 * (1 + 3) * (1.0 + 2.0 + 1.0)


@given(
    num_blocks=st.integers(1, 6),
    num_saved=st.integers(1, 4),
    weight_bytes=st.sampled_from([0, 7]),
)
def test_every_chain_keeps_the_law(num_blocks: int, num_saved: int, weight_bytes: int) -> None:
    """A chain passes its own check, and a plan that recomputes every block fits it."""
    step = chain(num_blocks, 10, num_saved=num_saved, output_bytes=3, weight_bytes=weight_bytes)
    assert sum(b.variants[0].dropped_bytes for b in step.blocks) == num_blocks * num_saved * 10
    plan(*(Recompute(block=k, variant="full") for k in range(num_blocks))).check_against(step)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_blocks": 0, "saved_bytes": 1}, "at least one block"),
        ({"num_blocks": 1, "saved_bytes": 1, "num_saved": 0}, "one saved storage"),
        ({"num_blocks": 2, "saved_bytes": [1]}, "saved_bytes lists 1 blocks, the chain has 2"),
        ({"num_blocks": 1, "saved_bytes": 1, "time_s": [1.0, 2.0]}, "time_s lists 2 blocks"),
    ],
)
def test_a_chain_that_cannot_be_is_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        chain(**arguments)


# -- the law of a step ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "index", "changes", "says"),
    [
        ("ops", 2, {"reads": (99,)}, r"op 2 \(f1\.0\) touches storage 99, which is not there"),
        ("ops", 2, {"writes": (-1,)}, r"op 2 \(f1\.0\) touches storage -1"),
        (
            "ops",
            0,
            {"reads": (2,)},
            r"op 0 \(f0\.0\) touches storage 2 \(x1\) outside its life 1\.\.7",
        ),
        ("ops", 9, {"reads": (3,)}, r"op 9 \(b0\.0\) touches storage 3 \(s1\.0\) outside"),
        ("storages", 1, {"num_bytes": -1}, r"storage 1 \(s0\.0\): lifetime or size"),
        ("storages", 0, {"birth": -2}, r"storage 0 \(x0\): lifetime or size"),
        ("storages", 0, {"death": 11}, r"storage 0 \(x0\): lifetime or size"),
        ("storages", 1, {"release": 9}, r"storage 1 \(s0\.0\): release outside"),
        ("storages", 3, {"release": 0}, r"storage 3 \(s1\.0\): release outside"),
        ("saved", 3, {"storage": 9}, "saved row 3: no such storage or block"),
        ("saved", 3, {"block": 2}, "saved row 3: no such storage or block"),
        ("saved", 2, {"unpacked": (1,)}, "saved row 2: asked for before it was saved"),
        ("saved", 2, {"unpacked": (11,)}, "saved row 2: asked for"),
        ("blocks", 1, {"first": 1}, r"block 1 \(blocks\.1\): op range"),
        ("blocks", 1, {"last": 10}, r"block 1 \(blocks\.1\): op range"),
        ("blocks", 0, {"last": -1}, r"block 0 \(blocks\.0\): op range"),
    ],
)
def test_a_breach_names_the_row(field: str, index: int, changes: Any, says: str) -> None:
    """A step that breaks its law is refused, and the row at fault is in the message."""
    with pytest.raises(RecordError, match=says):
        with_row(STEP, field, index, **changes).check()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"replays": (0,)}, "block 1 variant full: replays a foreign op"),
        ({"drops": (5,)}, "block 1 variant full: drops what is not saved"),
    ],
)
def test_a_breach_in_a_variant_names_block_and_variant(changes: Any, says: str) -> None:
    variant = replace(STEP.blocks[1].variants[0], **changes)
    with pytest.raises(RecordError, match=says):
        with_row(STEP, "blocks", 1, variants=(variant,)).check()


def test_a_second_call_of_a_module_has_its_own_name() -> None:
    assert replace(STEP.blocks[1], call=1).name == "blocks.1 (call 2)"


# -- the law of a plan ---------------------------------------------------------------------------


def test_a_plan_that_fits_is_returned() -> None:
    good = plan(move(), Recompute(block=1, variant="full"))
    assert good.check_against(STEP) is good
    assert good.exact


@pytest.mark.parametrize(
    ("actions", "says"),
    [
        ((move(), move()), "plan action 1: storage 1 is acted on twice"),
        (
            (Compress(storage=1, codec="bf16"), move()),
            "plan action 1: storage 1 is acted on twice",
        ),
        (
            (Recompute(block=0, variant="full"), Recompute(block=0, variant="full")),
            "plan action 1: block 0 is acted on twice",
        ),
        ((move(positions=(3, 2, 7, 8)),), "plan action 0: the four positions"),
        ((move(positions=(2, 7, 3, 8)),), "plan action 0: the four positions"),
        ((move(positions=(2, 3, 8, 7)),), "plan action 0: the four positions"),
        ((Compress(storage=1, codec="zip"),), "plan action 0: unknown codec 'zip'"),
    ],
)
def test_a_breach_names_the_action(actions: tuple[Action, ...], says: str) -> None:
    """What is wrong with a plan by itself is found without its trace."""
    with pytest.raises(RecordError, match=says):
        plan(*actions).check()


def test_numbers_below_zero_are_refused() -> None:
    """In an outcome, in a plan's budget, in the ops of a step."""
    with pytest.raises(RecordError, match="below zero"):
        Outcome(source="measured", peak_bytes={"device": 1}, step_s=-3.0).check()
    with pytest.raises(RecordError, match="name the device"):
        Outcome(source="measured", peak_bytes={}, step_s=3.0).check()
    with pytest.raises(RecordError, match="host is below zero"):
        plan(budget={"device": 1, "host": -7}).check()
    with pytest.raises(RecordError, match="op 1 .f0.1.: a time or size is below zero"):
        with_row(STEP, "ops", 1, time_s=-1.0).check()


def test_the_budget_names_the_device() -> None:
    with pytest.raises(RecordError, match="must name the device tier"):
        plan(budget={"host": 5}).check()


@pytest.mark.parametrize(
    ("actions", "says"),
    [
        ((Recompute(block=2, variant="full"),), "recomputes block 2, which the step does not have"),
        ((Recompute(block=-1, variant="full"),), "recomputes block -1"),
        ((Recompute(block=0, variant="half"),), "block blocks.0 has no variant 'half'"),
        ((move(99),), "moves storage 99, which the step does not have"),
        ((move(5),), "moves s0.0', which nothing saves for backward"),
        ((move(positions=(2, 3, 8, 9)),), "fetches s0.0 after its first use"),
        (
            (Recompute(block=0, variant="full"), move()),
            "moves s0.0, which a recomputed block drops",
        ),
        (
            (Recompute(block=0, variant="full"), Compress(storage=1, codec="bf16")),
            "compresses s0.0, which is not kept",
        ),
        ((Compress(storage=5, codec="bf16"),), "compresses s0.0', which is not kept"),
        ((Compress(storage=1, codec="bits"),), "codec bits does not take s0.0 of float32"),
    ],
)
def test_an_action_that_does_not_fit_names_its_target(
    actions: tuple[Action, ...], says: str
) -> None:
    """Against its trace, a plan names the block or storage by its full name."""
    with pytest.raises(RecordError) as caught:
        plan(*actions).check_against(STEP)
    assert says in str(caught.value)


def test_a_barred_block_says_why() -> None:
    step = with_row(STEP, "blocks", 0, barred="it changes its input in place")
    with pytest.raises(RecordError, match="blocks.0 cannot be recomputed: it changes its input"):
        plan(Recompute(block=0, variant="full")).check_against(step)


def test_a_recomputed_block_holds_its_input_until_autograd_lets_go() -> None:
    """Input x1 of block 1 is needed where s1.0 comes back, and may go when that does."""
    recompute = Recompute(block=1, variant="full")
    assert held_inputs(STEP, [recompute]) == {2: (6, 7)}
    plan(recompute, move(2, (3, 4, 5, 6))).check_against(STEP)
    with pytest.raises(RecordError, match="fetches x1 after its first use"):
        plan(recompute, move(2, (3, 4, 5, 7))).check_against(STEP)


def test_a_lossy_codec_makes_a_plan_inexact() -> None:
    assert not plan(Compress(storage=1, codec="bf16")).exact


def test_a_plan_comes_back_from_its_file(tmp_path: Any) -> None:
    """Actions keep their kinds through the file."""
    kept = plan(move(), Recompute(block=1, variant="full"), Compress(storage=2, codec="bf16"))
    assert Plan.load(kept.save(tmp_path / "plan.json")) == kept
