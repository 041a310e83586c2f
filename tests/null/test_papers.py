"""Figures of papers beside ours: each measure's law, on hand-made steps with exact numbers."""

from typing import Any

import pytest

import legroom.memory.policies  # noqa: F401  (fills the registry)
from legroom.core.errors import InputError
from legroom.machine.spec import find_machine
from legroom.memory.handmade import chain, natural_peak
from legroom.memory.headlines import CLAIMS
from legroom.memory.papers import CLOSE, Bench, Claim, Measure, Ours
from legroom.memory.planner import POLICIES
from legroom.memory.retime import at_batch
from legroom.memory.trace import Step
from tests.null.test_policies import machine


def step_at(batch: int) -> Step:
    """Four blocks that each save their input and two storages, a byte per sample."""
    return chain(4, saved_bytes=batch, num_saved=2, output_bytes=batch, time_s=1.0)


def ours(limit: int = 1 << 40, **more: Any) -> Ours:
    given = {"name": "x", "source": "y", "machine": "z", "job": "chain", "batch": 100, "figure": 1}
    claim = Claim(**{**given, "policy": "recompute_all", **more})
    return Bench(claim, machine(), {"device": limit}, step_at).ours()


def test_memory_is_the_peak_of_the_step_as_it_is_in_gb() -> None:
    assert ours(measure=Measure.MEMORY).figure == natural_peak(step_at(100)) / 1e9


def test_step_time_is_over_that_with_no_limit() -> None:
    """12 ops forward at 1 s, 24 s backward; all of the 12 but the last of each block run again."""
    found = ours(measure=Measure.TIME, policy="recompute_all")
    assert found.kept and found.figure == pytest.approx((36 + 12 - 4) / 36)


def test_a_budget_that_is_missed_is_said_and_not_set_beside_theirs() -> None:
    missed = ours(measure=Measure.TIME, policy="every_nth", share=0.01)
    assert not missed.kept and ", not " in missed.note
    least = ours(measure=Measure.TIME, policy="every_nth", share=0.0)
    assert least.kept and least.figure == missed.figure


def test_memory_saved_is_what_a_plan_takes_less() -> None:
    natural = natural_peak(step_at(100))
    found = ours(measure=Measure.SAVED, policy="every_nth")
    smallest = ours(measure=Measure.TIME, policy="every_nth", share=0.0)
    assert found.figure is not None and smallest.figure is not None
    assert 0.3 < found.figure < 1 - 100 / natural
    assert ours(measure=Measure.SAVED, policy="every_nth", free=True).figure == 0.0


def test_the_largest_batch_is_that_of_the_budget() -> None:
    """Bytes are linear in the batch, so the largest is the budget over those of a sample."""
    per_sample = natural_peak(step_at(100)) / 100
    for batch in (37, 100, 250, 1000):
        limit = int(per_sample * batch)
        found = ours(limit, measure=Measure.BATCH, policy="keep_all").figure
        assert found is not None and batch * (1 - 2 * CLOSE) - 1 <= found <= batch


def test_the_gain_of_a_policy_that_does_nothing_is_one() -> None:
    limit = 5 * natural_peak(step_at(100))
    assert ours(limit, measure=Measure.GAIN, policy="keep_all").figure == 1.0
    more = ours(limit, measure=Measure.GAIN, policy="recompute_all").figure
    assert more is not None and more > 1.3


def test_the_pace_over_a_rival_is_the_rivals_time_over_ones_own() -> None:
    found = ours(measure=Measure.PACE, policy="keep_all", rival="recompute_all")
    assert found.kept and found.figure == pytest.approx(44 / 36)


def test_a_step_between_two_batches_is_the_captured_one() -> None:
    """Sizes are linear, and so is what comes of them; other ops are refused."""
    small, large = step_at(10), step_at(30)
    between = at_batch(small, large, (10, 30), 25, machine())
    assert between.storages == step_at(25).storages
    assert natural_peak(between) == natural_peak(step_at(25))
    with pytest.raises(InputError, match="other ops"):
        at_batch(small, chain(2, saved_bytes=1), (10, 30), 25, machine())


def test_claims_name_what_is_there() -> None:
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        _ = POLICIES[claim.policy], find_machine(claim.machine)
        assert claim.figure > 0 and bool(claim.rival) == (claim.measure == Measure.PACE)
