"""Whatever a block does, its gradients under a plan are those of the unplanned step."""

import contextlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from legroom.memory.actions import Action
from legroom.memory.mechanisms import hooks
from legroom.memory.run import Runner
from legroom.memory.trace import FULL, Step
from tests.torch.nets import WIDTH, Attention, ConvNorm, Each, Mlp, images, rows, stack, texts
from tests.torch.support import (
    LIVE,
    PLANS,
    Rig,
    assert_same,
    full,
    live_check,
    movable,
    moves,
    result_of,
    selective,
    weigh,
)

EVERY = pytest.mark.parametrize("plan", PLANS)


class Loop(nn.Module):
    """Blocks called one after another by a function of the test's."""

    def __init__(self, blocks: nn.Module, call: Any) -> None:
        super().__init__()
        self.blocks, self.call = blocks, call

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:  # type: ignore[attr-defined]
            x = self.call(block, x)
        return x


def check(model: nn.Module, batch: Any, plan: str, **given: Any) -> Rig:
    rig = Rig(model, batch, **given)
    script = rig.check(PLANS[plan])
    barred = all(block.barred for block in rig.step.blocks)
    assert script.plan.actions or barred, "the plan does nothing: the test is void"
    return rig


@EVERY
def test_perceptrons(plan: str) -> None:
    """Norm, dropout, residual."""
    check(stack(Mlp), rows(), plan)


@EVERY
def test_attention_saves_views_of_one_storage(plan: str) -> None:
    check(stack(Attention), texts(), plan)


@EVERY
def test_convolutions_with_batch_norm(plan: str) -> None:
    check(stack(ConvNorm), images(), plan)


@EVERY
def test_ops_in_place_inside_a_block(plan: str) -> None:
    """relu_ and add_ on what the block made itself."""

    def fn(self: Each, x: Tensor) -> Tensor:
        h = self.up(x)
        h.add_(1.0).relu_()
        y = self.down(h).mul_(0.5)
        return y.add_(x)

    check(stack(lambda: Each(fn)), rows(), plan)


@EVERY
def test_a_block_that_changes_its_input_is_barred(plan: str) -> None:
    """A second run would start from the changed input: such a block has no variants."""

    def fn(self: Each, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return self.down(F.gelu(self.up(x)))

    model = nn.Sequential(nn.Linear(64, 64), *stack(lambda: Each(fn)))
    rig = Rig(model, rows(), blocks=["1", "2", "3"])
    assert all(b.barred and not b.variants for b in rig.step.blocks)
    rig.check(PLANS[plan])


@EVERY
def test_keyword_arguments(plan: str) -> None:
    class Block(Mlp):
        def forward(self, *, x: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
            y = super().forward(x) * scale
            return y if mask is None else y * mask

    mask = rows(seed=5)
    check(Loop(stack(Block), lambda b, x: b(x=x, scale=0.5, mask=mask)), rows(), plan)


@EVERY
def test_tuples_dicts_and_plain_values_in_and_out(plan: str) -> None:
    """A block may take and give containers, None and numbers."""

    def fn(self: Each, given: dict[str, Any]) -> dict[str, Any]:
        a, (b, times) = given["a"], given["rest"]
        h = torch.tanh(self.up(a)) * b * times
        return {"a": self.down(h), "rest": (b + h, times + 1), "none": None, "name": "x"}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = stack(lambda: Each(fn))

        def forward(self, x: Tensor) -> Tensor:
            y = self.blocks({"a": x, "rest": (x * 2, 1)})
            return y["a"] + y["rest"][0]

    check(Model(), rows(), plan)


@EVERY
def test_inputs_that_need_no_gradient(plan: str) -> None:
    """Masks, indices and detached tensors are held as they were."""

    def fn(self: Each, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, mask, index = given
        h = self.up(x).masked_fill(mask, 0.0).index_select(0, index)
        return self.down(F.silu(h)), ~mask, index.flip(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = stack(lambda: Each(fn))

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks((x, x.detach() > 0, torch.arange(x.shape[0] - 1, -1, -1)))[0]

    check(Model(), rows(), plan)


class Self(nn.Module):
    """Attention to itself: torch's module looks at whether its arguments are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.MultiheadAttention(32, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x, x, x, need_weights=False)[0]
        return x


@EVERY
def test_one_tensor_given_as_several_arguments(plan: str) -> None:
    """A block that runs again finds them to be one, as in its first run."""
    check(Self(), torch.randn(12, 8, 32), plan)


@EVERY
def test_frozen_parameters(plan: str) -> None:
    """A frozen parameter gets no gradient, with and without a plan."""
    model = stack(Mlp, 4)
    model[1].requires_grad_(False)
    model[2].up.weight.requires_grad_(False)
    check(model, rows(), plan)


@EVERY
def test_tied_weights(plan: str) -> None:
    """One weight in two blocks, and one block called twice."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = stack(Mlp)
            self.blocks[2].up.weight = self.blocks[0].up.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0](self.blocks(self.blocks[0](x)))

    check(Model(), rows(), plan)


class Clip(torch.autograd.Function):
    """Saves an input, an intermediate and its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        inner = x * y + 1
        out = inner.tanh()
        ctx.save_for_backward(x, y, inner, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y, inner, out = ctx.saved_tensors
        slope = grad * (1 - out * out) + 0 * inner
        return slope * y, slope * x


@EVERY
def test_custom_autograd_functions(plan: str) -> None:
    """save_for_backward of inputs, intermediates and outputs goes through the hooks alike."""
    model = stack(lambda: Each(lambda m, x: m.down(Clip.apply(m.up(x), x))))
    check(model, rows(), plan)


@EVERY
def test_views_transposes_and_slices(plan: str) -> None:
    """Several views of one storage are saved, at other strides, offsets and dtypes."""

    def fn(self: Each, x: Tensor) -> Tensor:
        h = self.up(x)
        left, right = h.chunk(2, dim=1)
        y = (left * right).repeat(1, 2) + (h.t().contiguous() * h.t()).t()
        return self.down(y * h.view(-1, 32).flip(0).view_as(h))

    rig = check(stack(lambda: Each(fn)), rows(), plan)
    assert any(len(r) > 2 for r in rig.step.saves.values())


@EVERY
@pytest.mark.parametrize("kind", ["conj", "imag"])
def test_conjugated_views(plan: str, kind: str) -> None:
    """A saved lazy conjugate comes back conjugated; a negated view comes back negated."""

    def fn(self: Each, x: Tensor) -> Tensor:
        z = torch.complex(self.up(x), self.down(x)) * 1.5
        if kind == "conj":
            return (z.conj() * torch.complex(x, x + 1)).abs() + (z.conj() * z.conj()).real
        return torch.tanh(z.conj().imag * z.real) + torch.sigmoid(z.conj().imag)

    check(stack(lambda: Each(fn)), rows(), plan)


@EVERY
def test_a_recurrent_block(plan: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(64, 64, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.lstm(x)[0]

    # Fake tensors take another path through the layer: what differs from the trace is kept.
    Rig(stack(Block), texts()).check(PLANS[plan], follows=False)


@EVERY
def test_checkpoint_of_the_users_own_inside_a_block(plan: str) -> None:
    """torch.utils.checkpoint within a planned block keeps working."""

    class Block(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(self.up, self.norm(x), use_reentrant=False)
            return x + self.drop(self.down(F.gelu(y)))

    check(stack(Block), rows(), plan)


@EVERY
def test_no_grad_before_the_blocks(plan: str) -> None:
    """Blocks called without gradients first are the same blocks when called with them."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = stack(Mlp)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.blocks(x)
            return self.blocks(x) * target

    check(Model(), rows(), plan)


@EVERY
def test_an_input_changed_after_the_block_by_its_caller(plan: str) -> None:
    """Autograd allows it where the block saves no input; so must a plan."""

    def fn(self: Each, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(torch.relu(x))))

    def call(block: nn.Module, x: Tensor) -> Tensor:
        x = x * 1.0
        y = block(x)
        x += y
        return x

    check(Loop(stack(lambda: Each(fn)), call), rows(), plan)


@dataclass
class Carrier:
    """An argument pytrees know nothing of."""

    x: Tensor


@EVERY
def test_an_argument_object_changed_by_the_block(plan: str) -> None:
    """A block that writes to a field of its argument must not be run again from the new value."""

    def fn(self: Each, carrier: Carrier) -> Carrier:
        carrier.x = self.down(F.gelu(self.up(carrier.x)))
        return carrier

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = stack(lambda: Each(fn))

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(Carrier(x)).x

    check(Model(), rows(), plan)


@EVERY
def test_an_attribute_that_the_caller_sets_for_each_block(plan: str) -> None:
    """A block may read a tensor that did not come as its argument, and that is another later."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared: Tensor | None = None
            self.blocks = stack(
                lambda: Each(lambda m, x: m.down(F.gelu(m.up(x) * self.shared)))  # type: ignore
            )

        def forward(self, x: Tensor) -> Tensor:
            for i, block in enumerate(self.blocks):
                self.shared = torch.full_like(x, 1.0 + i)
                x = block(x)
            return x

    check(Model(), rows(), plan)


def test_sparse_arguments() -> None:
    """A sparse matrix as an argument of a block (graph networks) is held like any other."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(64, 64)

        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            return torch.relu(self.lin(torch.sparse.mm(adjacency, x))) * 0.5

    adjacency = torch.eye(32).to_sparse()
    model = Loop(stack(Block), lambda b, x: b(x, adjacency))
    live_check(model, "test_full", lambda: weigh(model(rows())))


@pytest.mark.parametrize("policy", LIVE)
def test_a_live_job_with_all_of_it(policy: str) -> None:
    """Fake plan, recorded step, and plan from the recording: each step as the unplanned one."""
    model = nn.Sequential(nn.Linear(64, 64), *stack(Mlp), Attention(), Mlp(inplace=True))
    x = texts()
    live_check(model, policy, lambda: weigh(model(x)))


@pytest.mark.parametrize("make", [Mlp, Attention, ConvNorm])
def test_selective_replays_run_as_traced(make: Any) -> None:
    """A selective replay meets the ops of the trace, and no block falls back to a whole one."""
    batch = {Mlp: rows, Attention: texts, ConvNorm: images}[make]()
    rig = Rig(stack(make), batch)
    actions = selective(rig.step)
    assert any(a.variant != FULL for a in actions)  # type: ignore[union-attr]
    plain, calls = rig.plain(), []
    for block in rig.model:  # type: ignore[attr-defined]
        first = next(block.children())
        first.register_forward_pre_hook(lambda module, _: calls.append(module))
    rig.install(actions)
    assert_same(rig.planned(), plain)
    assert not rig.runner.replayer.whole
    rig.close()
    assert len(calls) == len(actions), "a replay ran a module again"


def test_saved_tensors_of_a_branch_that_goes_nowhere() -> None:
    """What nobody will ask for is not brought back: a replay ends with what is still needed."""

    def fn(self: Each, x: Tensor) -> Tensor:
        h = self.up(x)
        torch.sigmoid(torch.tanh(h) * x)
        return self.down(F.gelu(h))

    Rig(stack(lambda: Each(fn)), rows()).check(full)


# -- blocks that a plan leaves alone --------------------------------------------------------------


class Stemmed(nn.Module):
    """Layers before and after the blocks, which save tensors as well."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.body = stack(Mlp, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(F.gelu(self.stem(x))))


def move_the_first_outside(step: Step) -> list[Action]:
    """A move of what the stem saves."""
    outside = [s for s in movable(step) if all(row.block < 0 for row in step.saves[s])]
    return list(moves(step, outside[:1]))


def test_blocks_a_plan_leaves_alone_save_without_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where something outside of them is moved: a call for each saved tensor is slow."""
    packed, pack = [], Runner._pack
    monkeypatch.setattr(Runner, "_pack", lambda me, x: packed.append(1) or pack(me, x))
    rig = Rig(Stemmed(), rows())
    script = rig.check(move_the_first_outside)
    assert -1 in script.watched and len(script.watched) < 5
    watched = sum(len(rig.step.saved_in(b)) for b in script.watched)
    assert 0 < len(packed) / 3 < len(rig.step.saved) / 2 + watched
    assert len(packed) / 3 < 4 * watched, "weights are saved, too"


@pytest.mark.parametrize("where, least", [("step", 0), ("model", 40), ("block", 2)])
def test_hooks_of_the_users_own_for_saved_tensors_stay(where: str, least: int) -> None:
    """In a block that the plan leaves alone, or around them: those see what is saved there.

    Those around a step see nothing, as before: the innermost hooks are the ones that count.
    """
    model, seen = Stemmed(), []
    rig = Rig(model, rows())

    def note(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda x: x)
    plain = rig.plain()
    rig.install(move_the_first_outside(rig.step))
    try:
        rig.start.restore()
        if where == "block":
            forward = model.body[4].down.forward

            def hooked(x: Tensor) -> Tensor:
                with hooks:
                    return forward(x)

            model.body[4].down.forward = hooked  # type: ignore[method-assign]
        here = {where: hooks}
        nothing = contextlib.nullcontext()
        with here.get("step", nothing), rig.runner.following(), here.get("model", nothing):
            loss = rig.loss()
        with rig.runner.following():
            loss.backward()
        assert_same(result_of(model, loss), plain)
        assert len(seen) >= least and bool(seen) == bool(least)
    finally:
        rig.close()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_hooks_are_as_before_after_a_block_that_raised(error: type[BaseException]) -> None:
    """One that the plan leaves alone, while hooks are off; torch's own miss an interrupt."""
    model = Stemmed()

    def fail(x: Tensor) -> Tensor:
        raise error

    rig = Rig(model, rows())
    plain = rig.plain()
    rig.install(move_the_first_outside(rig.step))
    try:
        forward = model.body[4].forward
        model.body[4].forward = fail  # type: ignore[method-assign]
        with pytest.raises(error), rig.runner.following():
            rig.loss()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        model.body[4].forward = forward  # type: ignore[method-assign]
        assert_same(rig.planned(), plain)
    finally:
        rig.close()


def test_an_interrupt_while_hooks_are_taken_off_puts_them_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may come between any two instructions, also right after they went."""
    real: Any = torch._C._autograd

    def interrupted() -> None:
        real._pop_saved_tensors_default_hooks()
        raise KeyboardInterrupt

    def pack(tensor: Tensor) -> Tensor:
        return tensor

    push = real._push_saved_tensors_default_hooks
    fake = SimpleNamespace(
        _pop_saved_tensors_default_hooks=interrupted, _push_saved_tensors_default_hooks=push
    )
    monkeypatch.setattr(hooks, "_autograd", fake)
    with saved_tensors_hooks(pack, pack):
        with pytest.raises(KeyboardInterrupt), contextlib.ExitStack() as stack:
            hooks.lift(pack, pack, stack)
        assert real._top_saved_tensors_default_hooks(False)[0] is pack
