"""Jobs whose plan computes the loss of a language model in chunks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import legroom
import legroom.memory.workshop as workshop
from legroom.api import Job
from legroom.memory.kinds import Outfit
from legroom.memory.losshead import with_head
from legroom.memory.mechanisms import compiled
from legroom.memory.profile import StandInLoss
from legroom.memory.trace import Phase, Step
from legroom.nn import chunk_head
from tests.torch.support import MACHINE, until_measured
from tests.torch.test_chunked_head import gpt2, ids, llama

ROOMY = 1 << 30


@pytest.fixture(autouse=True)
def _cut_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setattr("legroom.memory.trial.SHARES", (1.0, 0.0))
    monkeypatch.setattr(workshop, "CHUNKS", (2, 8))
    plain = workshop._rank

    def rank(step: Step, *args: Any) -> workshop.Rank:
        here = any(block.build and block.module == "lm_head" for block in step.blocks)
        return plain(step, *args) if here else (float("inf"), 1 << 62)

    monkeypatch.setattr(workshop, "_rank", rank)


class Loop:
    """A model, its optimizer, and steps on the same batch."""

    def __init__(self, budget: int = ROOMY, model: nn.Module | None = None) -> None:
        self.model: Any = model or llama()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.job: Job = legroom.fit(
            self.model, self.optimizer, budget=budget, machine=MACHINE, compile="blocks"
        )

    def step(self, **given: Any) -> Any:
        x = ids()
        with self.job.step():
            out = self.model(input_ids=x, labels=x, **given)
            out.loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return out

    def steps(self, count: int = 7) -> list[float]:
        return [self.step().loss.item() for _ in range(count)]

    @property
    def chunks(self) -> int:
        assert self.job.current is not None
        return self.job.current.outfit.chunks


def plain_losses(count: int) -> list[float]:
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(count):
        loss = model(input_ids=ids(), labels=ids()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_job_trains_as_the_model_does() -> None:
    """The loss of every step, with chunks in place only while a step runs."""
    loop = Loop()
    assert loop.steps(9) == pytest.approx(plain_losses(9), rel=1e-5)
    assert loop.chunks in (2, 8) and not loop.job.runner.deviation
    assert "forward" not in loop.model.lm_head.__dict__
    assert "_loss_function" not in loop.model.__dict__
    assert f"loss in {loop.chunks} chunks" in loop.job.current.plan.why
    out = loop.model(input_ids=ids())
    assert isinstance(out.logits, Tensor)
    loop.job.close()


def test_the_peak_is_as_predicted() -> None:
    """No logits in full, whether or not the caller holds the model's output on."""
    loop = Loop()
    loop.job.meter.peaks = True  # type: ignore[attr-defined]
    held = [loop.step() for _ in range(8)]
    both = until_measured(loop.job, lambda: held.append(loop.step()))
    assert held and loop.chunks
    assert both.measured.device_bytes == pytest.approx(both.predicted.device_bytes, rel=0.03)
    loop.job.close()


def test_who_looks_at_logits_keeps_them() -> None:
    """Within the step, or after it: the plan leaves the loss alone."""

    class Looking(Loop):
        def step(self, **given: Any) -> Any:
            out = super().step(**given)
            out.logits.argmax(-1)
            return out

    loop = Looking()
    assert loop.steps(7) == pytest.approx(plain_losses(7), rel=1e-5)
    assert not loop.chunks
    loop.job.close()


def test_a_step_that_reads_logits_has_no_such_block() -> None:
    """Seen in the trace: an op elsewhere reads what is made on the way to the loss."""

    class Reading(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.loss = out.loss + 1e-3 * out.logits.float().logsumexp(-1).mean()
            return out

    steps = {}
    for cls in (LlamaForCausalLM, Reading):
        model = cls(llama().config)
        loop = Loop(model=model)
        loop.steps(5)
        assert loop.job.current is not None
        plain = loop.job.current.plain
        assert plain is not None
        steps[cls] = with_head(plain.step, "lm_head")
        loop.job.close()
    assert steps[Reading] is None
    marked = steps[LlamaForCausalLM]
    assert marked is not None
    block = marked.blocks[-1]
    phases = {op.phase for op in marked.ops if op.block == len(marked.blocks) - 1}
    assert (block.module, block.call) == ("lm_head", 1)
    assert phases == {Phase.FORWARD, Phase.BACKWARD}
    assert with_head(marked, "model.norm") is None


def test_a_tight_budget_takes_smaller_chunks() -> None:
    """With about the same times, the plan takes as many as the budget needs."""
    loop = Loop()
    loop.steps(6)
    peak = loop.job.comparison().predicted.device_bytes
    least = loop.job.frontier(2)[0].budget_bytes
    few = loop.chunks
    loop.job.close()
    tight = Loop(budget=max(int(peak * 0.97), int(least * 1.03)))
    tight.steps(6)
    assert tight.chunks >= few or few == 8  # the most there are, taken for being fastest by chance
    tight.job.close()


def test_a_budget_below_the_logits_begins_in_chunks() -> None:
    """No step ever makes them in full, and the loss is right from the first step on."""
    rows, words = 4 * 20, 503
    plain = Loop()
    plain.steps(1)
    assert plain.job.current is not None and plain.job.current.capture is not None
    step = plain.job.current.capture.step
    weights = sum(s.num_bytes for s in step.storages if s.birth < 0)
    plain.job.close()
    loop = Loop(budget=weights + 3 * rows * words * 4)
    losses = loop.steps(9)
    assert losses == pytest.approx(plain_losses(9), rel=1e-5)
    assert loop.chunks and not loop.job.runner.deviation
    assert loop.job.current.base.chunks  # type: ignore[union-attr]
    assert loop.job.current.outfit.shares  # type: ignore[union-attr]
    loop.job.close()


def test_logits_that_leave_nothing_to_spare_are_not_made_before_anything_was_measured() -> None:
    """A first plan that uses all of a budget may not run: chunks leave room, so it begins there."""
    x = ids()
    with pytest.raises(legroom.BudgetError) as caught:
        legroom.estimate(llama(), {"input_ids": x, "labels": x}, machine=MACHINE, budget=1 << 10)
    least = caught.value.smallest_bytes
    assert least is not None
    loop = Loop(budget=int(1.03 * least))
    losses = loop.steps(9)
    assert loop.job.current is not None and loop.job.current.base.chunks
    assert losses == pytest.approx(plain_losses(9), rel=1e-5)
    loop.job.close()


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_step_recorded_in_chunks_can_be_given_others(make: Any) -> None:
    """Gradients that the head made in forward count from backward on, whoever held them before."""
    loop = Loop(model=make())
    assert loop.job.workshop is not None
    loop.job.workshop.least = lambda: Outfit(chunks=8)  # type: ignore[method-assign]
    plan = loop.job._plan_unseen

    def refuse(*args: Any, tight: bool, **kwargs: Any) -> None:
        if not tight:
            raise legroom.BudgetError("no room to spare")
        plan(*args, tight=tight, **kwargs)

    loop.job._plan_unseen = refuse  # type: ignore[method-assign]
    loop.steps(5)
    assert loop.job.current is not None and loop.job.current.base.chunks == 8
    assert loop.chunks and not loop.job.runner.deviation
    loop.job.close()


@pytest.mark.parametrize("kind", ["pre", "forward", "backward"])
def test_hooks_on_the_head_see_what_they_always_saw(kind: str) -> None:
    """Logits in full, once a step: the plan leaves such a head alone."""
    loop, seen = Loop(), []
    head = loop.model.lm_head
    if kind == "pre":
        head.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    elif kind == "forward":
        head.register_forward_hook(lambda m, args, out: seen.append(out.dim()))
    else:
        head.register_full_backward_hook(lambda m, to, come: seen.append(come[0].dim()))
    loop.steps(7)
    assert not loop.chunks
    assert set(seen) <= {3}
    assert kind == "pre" or len(seen) == 7 + 1, "and once on fake tensors"
    loop.job.close()


def test_a_loss_of_the_users_own_is_taken_up_when_it_comes() -> None:
    """Set in mid-training: it counts from that step on, and stays after the job."""
    loop = Loop()
    loop.steps(6)
    assert loop.chunks

    def own(logits: Tensor, labels: Tensor, **others: Any) -> Tensor:
        return logits.float().square().mean()

    loop.model.loss_function = own
    losses = loop.steps(8)
    assert not loop.chunks, "recorded anew"
    out = loop.model(input_ids=ids(), labels=ids())
    assert losses[-1] == pytest.approx(out.loss.item(), rel=0.5)
    assert loop.model.loss_function is own
    loop.job.close()
    assert loop.model.loss_function is own


def test_a_forward_of_the_users_own_is_not_taken_away() -> None:
    """Put on a block in mid-training."""
    loop = Loop()
    loop.steps(6)
    layer = loop.model.model.layers[1]
    calls, plain = [], layer.forward

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return plain(*args, **kwargs)

    layer.forward = own
    loop.steps(2)
    assert len(calls) == 2 and layer.__dict__["forward"] is own
    loop.job.close()


def test_a_step_that_fails_does_not_cost_the_chunks() -> None:
    """The second visit, in which calls are sampled."""
    loop = Loop()
    loop.steps(1)
    with pytest.raises(ZeroDivisionError), loop.job.step():
        loop.model(input_ids=ids(), labels=ids())
        raise ZeroDivisionError
    loop.steps(6)
    assert loop.chunks
    loop.job.close()


def test_what_a_caller_may_hold_of_the_output_is_known_before_the_first_step() -> None:
    """Logits in full, though the model computes its loss itself; none where they are put off."""
    model, loss, later = llama(), StandInLoss(), StandInLoss()
    loss(model, ((), {"input_ids": ids(), "labels": ids()}))
    assert loss.num_bytes == 4 * 20 * 503 * 4
    chunk_head(model)
    later(model, ((), {"input_ids": ids(), "labels": ids()}))
    assert later.num_bytes == 0
