"""The chunked loss: the numbers of the plain one, in the memory of one chunk."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import legroom.nn
from legroom.core.errors import InputError
from legroom.memory.timers import memory_reports, reports_peak
from legroom.nn import chunked_cross_entropy
from tests.torch.nets import Mlp, stack
from tests.torch.support import PLANS, Rig

HALVES = (torch.bfloat16, torch.float16)
LOSS_ERROR = {torch.float64: 1e-12, torch.float32: 2e-6, **dict.fromkeys(HALVES, 2e-6)}
GRAD_ERROR = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest difference from the plain loss, as a share of the norm of what went into it."""
HALF_SCALE = 256.0
"""A loss scale that keeps the plain loss's own float16 gradients alive."""

Loss = Callable[..., Tensor]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Problems this small only lose time where threads share busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Case(NamedTuple):
    """Leaves of a small problem."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    labels: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weight, self.bias

    def loss(self, fn: Loss = chunked_cross_entropy, **options: Any) -> Tensor:
        return fn(self.hidden, self.weight, self.labels, bias=self.bias, **options)

    def grads(self, loss: Tensor, outer: Tensor | float = 1.0, **how: Any) -> list[Tensor]:
        outer = torch.as_tensor(outer, dtype=loss.dtype).expand_as(loss)
        return list(torch.autograd.grad(loss, self.leaves, outer, **how))

    def to(self, dtype: torch.dtype) -> "Case":
        hidden, weight, bias = (t.detach().to(dtype).requires_grad_() for t in self.leaves)
        return Case(hidden, weight, bias, self.labels)


def case(
    *shape: int, dim: int = 8, vocab: int = 11, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Case:
    """Random leaves, a fifth of the labels ignored."""
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, dim, generator=draw)
    weight = torch.randn(vocab, dim, generator=draw)
    bias = torch.randn(vocab, generator=draw)
    labels = torch.randint(0, vocab, shape, generator=draw)
    labels[torch.rand(shape, generator=draw) < 0.2] = -100
    return Case(hidden, weight, bias, labels).to(dtype)


def plain(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, **terms: Any
) -> Tensor:
    """The same loss from all the logits."""
    return of_logits(F.linear(hidden, weight, bias), labels, **terms)


def of_logits(
    logits: Tensor, labels: Tensor, *, softcap: float | None = None, **terms: Any
) -> Tensor:
    """Cross entropy in float32 at least, of logits that may be capped."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits.reshape(-1, logits.shape[-1])
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, labels.reshape(-1), **terms)


def error(mine: Tensor, true: Tensor, size: Tensor | None = None) -> float:
    """The difference as a share of a norm."""
    assert mine.shape == true.shape
    size = true.double() if size is None else size
    return float((mine.double() - true.double()).norm() / size.norm().clamp_min(1e-30))


def sizes(given: Case, outer: Tensor, **terms: Any) -> list[Tensor]:
    """What goes into each gradient, all counted as positive: sums may cancel, errors do not.

    No slope is taken for smaller than what float32 leaves of one less a number close to one.
    """
    hidden, weight, bias = (t.detach().double() for t in given.leaves)
    rows = hidden.reshape(-1, hidden.shape[-1])
    logits = F.linear(rows, weight, bias).requires_grad_()
    loss = of_logits(logits, given.labels, **terms)
    (slopes,) = torch.autograd.grad(loss, logits, outer.double().expand_as(loss))
    slopes = slopes.abs().clamp_min(1e-3 * float(outer.abs().max()))
    return [slopes @ weight.abs(), slopes.t() @ rows.abs(), slopes.sum(0)]


def assert_close(
    given: Case, outer: Tensor | float = 1.0, *, chunks: int = 3, **terms: Any
) -> None:
    """Loss and gradients of the chunked loss are those of the plain one, dtypes included."""
    ours, theirs = given.loss(chunks=chunks, **terms), given.loss(plain, **terms)
    dtype = given.hidden.dtype
    assert ours.dtype == theirs.dtype
    assert error(ours.detach(), theirs.detach(), 0.1 + theirs.detach()) < LOSS_ERROR[dtype]
    for one, two, size in zip(
        given.grads(ours, outer),
        given.grads(theirs, outer),
        sizes(given, torch.as_tensor(outer), **terms),
        strict=True,
    ):
        assert one.dtype == two.dtype
        assert error(one, two, size) < GRAD_ERROR[dtype]


def peak_of(step: Callable[[], object]) -> int:
    """Most bytes that torch's CPU allocator handed out at once."""
    step()
    gc.collect()
    reports: list[tuple[int, int]] = []
    with memory_reports(reports):
        step()
    return reports_peak(reports)


# -- the same numbers ----------------------------------------------------------------------------


TERMS = st.fixed_dictionaries(
    {
        "chunks": st.integers(1, 12),
        "ignore_index": st.sampled_from([-100, -1, 0]),
        "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
        "reduction": st.sampled_from(["sum", "none", "mean"]),
        "softcap": st.sampled_from([None, 1.0, 30.0]),
    }
)
SIZES = st.fixed_dictionaries({"dim": st.integers(1, 9), "vocab": st.integers(2, 40)})


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(1, 6), max_size=3),
    sizes=SIZES,
    terms=TERMS,
    dtype=st.sampled_from(list(GRAD_ERROR)),
    seed=st.integers(0, 1000),
)
def test_as_the_plain_loss(
    shape: list[int], sizes: dict[str, int], terms: dict[str, Any], dtype: torch.dtype, seed: int
) -> None:
    """Whatever the shapes, terms and dtype, loss and gradients agree to its precision."""
    given = case(*shape, **sizes, dtype=dtype, seed=seed)
    labels = given.labels.masked_fill(given.labels == -100, terms["ignore_index"])
    if (labels == terms["ignore_index"]).all():
        labels = labels.fill_(1)
    scale = HALF_SCALE if dtype == torch.float16 else 1.0
    outer = torch.tensor(-1.5 * scale)
    if terms["reduction"] == "none":
        outer = outer * torch.randn(labels.numel(), generator=torch.Generator().manual_seed(seed))
    assert_close(given._replace(labels=labels), outer, **terms)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_by_differences(reduction: str, softcap: float | None) -> None:
    """The gradients are those of the loss itself, by finite differences in float64."""
    given = case(5, dim=3, vocab=4, dtype=torch.float64)
    options = {"reduction": reduction, "softcap": softcap, "label_smoothing": 0.1, "chunks": 2}
    assert torch.autograd.gradcheck(
        lambda *leaves: Case(*leaves, given.labels).loss(**options), given.leaves
    )


@pytest.mark.parametrize("chunks", [1, 2, 7, 8, 100])
def test_any_number_of_chunks(chunks: int) -> None:
    """Rows that do not divide, and more chunks than rows."""
    assert_close(case(7), chunks=chunks)


def test_tensors_laid_out_otherwise() -> None:
    """Transposed and cut hidden states, weights and labels need not be contiguous."""
    given = case(6, 5)
    hidden = given.hidden.detach().transpose(0, 1)[1:].requires_grad_()
    weight = given.weight.detach().t().contiguous().t().requires_grad_()
    odd = Case(hidden, weight, given.bias, given.labels.t()[1:])
    assert not any(t.is_contiguous() for t in (odd.hidden, odd.weight, odd.labels))
    assert_close(odd)


def test_labels_of_any_integer_dtype() -> None:
    """Labels need not be int64."""
    given = case(6)
    assert torch.equal(given._replace(labels=given.labels.int()).loss(), given.loss())


@pytest.mark.parametrize("num_items", [40, torch.tensor(40), torch.tensor([40.0])])
def test_a_count_given_from_outside(num_items: Tensor | int) -> None:
    """The mean is taken over the count of a larger batch, as trainers that accumulate want."""
    given = case(4, 3)
    mine, true = given.loss(num_items=num_items), given.loss(plain, reduction="sum") / 40
    assert mine.shape == () and error(mine.detach(), true.detach()) < 1e-6
    for one, two in zip(given.grads(mine), given.grads(true), strict=True):
        assert error(one, two) < 1e-5


@pytest.mark.parametrize("num_items", [None, 0])
def test_nothing_but_ignored_labels(num_items: int | None) -> None:
    """The mean over nothing is nan, and its gradients are zero, as torch has it."""
    given = case(6)
    given = given._replace(labels=torch.full((6,), -100))
    for fn, options in ((plain, {}), (chunked_cross_entropy, {"num_items": num_items})):
        loss = given.loss(fn, **options)
        assert loss.isnan()
        assert all(not grad.any() for grad in given.grads(loss))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_rows_at_all(reduction: str) -> None:
    """An empty batch gives what torch gives."""
    given = case(0, 4)
    mine, true = given.loss(reduction=reduction), given.loss(plain, reduction=reduction)
    assert torch.equal(mine.isnan(), true.isnan()) and mine.shape == true.shape
    assert torch.equal(mine.nan_to_num(), true.nan_to_num())
    hidden, *rest = given.grads(mine.sum())
    assert hidden.shape == given.hidden.shape and all(not grad.any() for grad in rest)


def test_large_logits_keep_their_digits() -> None:
    """Logits in the thousands neither overflow nor cost the loss its small differences."""
    given = case(6)
    assert_close(given._replace(hidden=(given.hidden.detach() * 3000).requires_grad_()))


# -- precision -----------------------------------------------------------------------------------


def test_many_chunks_lose_no_bits_of_a_bfloat16_weight() -> None:
    """Its gradient is summed in float32: many chunks are as good as one."""
    given = case(600, vocab=5, dtype=torch.bfloat16)
    true = given.to(torch.float64)
    exact = true.grads(true.loss(plain))[1]
    errors = [error(given.grads(given.loss(chunks=n))[1], exact) for n in (1, 600)]
    assert errors[1] < 1.2 * errors[0] + 1e-3


def test_float16_gradients_wait_for_their_scale() -> None:
    """Gradients below all float16 numbers are there once the loss is scaled."""
    given = case(40, vocab=50, dtype=torch.float16)
    true = given.to(torch.float64)
    items, scale = 10**10, 2.0**30
    mine, exact = given.loss(num_items=items), true.loss(plain, reduction="sum") / items
    assert all(not grad.any() for grad in given.grads(mine, retain_graph=True)), "too small as is"
    for one, two in zip(given.grads(mine, scale), true.grads(exact, scale), strict=True):
        assert error(one, two) < 2e-3


def test_float16_keeps_words_that_are_hardly_likely() -> None:
    """Probabilities below all float16 numbers still reach the gradients of their words."""
    given = case(40, dtype=torch.float16)
    given.bias.data[5:] -= 20.0
    given = given._replace(labels=given.labels % 5)
    true = given.to(torch.float64)
    mine, exact = (given.grads(given.loss(), 2.0**24), true.grads(true.loss(plain), 2.0**24))
    assert error(mine[1][5:], exact[1][5:]) < 5e-2, "its logits are off by one in a hundred"


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_float16_sums_do_not_overflow(reduction: str) -> None:
    """Sums over many rows pass the largest float16 number on their way to a mean."""
    given = case(4096, dim=2, vocab=2, dtype=torch.float16)
    hidden = torch.full_like(given.hidden, 60.0).detach().requires_grad_()
    given = given._replace(hidden=hidden, labels=torch.zeros_like(given.labels))
    true = given.to(torch.float64)
    mine, exact = given.loss(chunks=1, reduction=reduction).mean(), true.loss(plain)
    for one, two in zip(given.grads(mine), true.grads(exact), strict=True):
        assert error(one, two) < 2e-3


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", HALVES)
def test_under_autocast(dtype: torch.dtype, reduction: str) -> None:
    """The product is in the dtype of the region, the gradients in that of the inputs."""
    given = case(6, 7)
    with torch.autocast("cpu", dtype=dtype):
        mine, true = (given.loss(fn, reduction=reduction) for fn in (chunked_cross_entropy, plain))
    assert mine.dtype == torch.float32
    assert error(mine.detach(), true.detach()) < LOSS_ERROR[dtype]
    assert not torch.equal(mine, given.loss(reduction=reduction)), "it was in float32"
    ours, theirs = (given.grads(loss, HALF_SCALE) for loss in (mine, true))
    for one, two in zip(ours, theirs, strict=True):
        assert one.dtype == two.dtype == torch.float32
        assert error(one, two) < GRAD_ERROR[dtype]


def test_backward_inside_autocast() -> None:
    """Chunks made again are as they were in forward, whatever region backward is called in."""
    given = case(6)
    outside = given.grads(given.loss(reduction="none"))
    loss = given.loss(reduction="none")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = given.grads(loss)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


# -- memory --------------------------------------------------------------------------------------

ROWS, DIM, VOCAB = 256, 32, 2048
SMALL = 1 << 16
"""Labels, losses and a number per row."""


@pytest.mark.parametrize(
    ("dtype", "softcap", "per_logit"),
    [
        (torch.float32, None, 4),
        (torch.float32, 5.0, 4 + 4),
        (torch.bfloat16, None, 4 + 2),
        (torch.bfloat16, 5.0, 4 + 2 + 0.5),
        (torch.float16, None, 4 + 2),
    ],
)
def test_the_peak_is_one_chunk(dtype: torch.dtype, softcap: float | None, per_logit: float) -> None:
    """Gradients that wait, a chunk of logits in float32, and one in the product's dtype.

    In float32 they are the same chunk, but for a cap; in bfloat16 the cap adds an eighth of one.
    """
    given = case(ROWS, dim=DIM, vocab=VOCAB, dtype=dtype)
    waiting = 4 * (ROWS * DIM + VOCAB * DIM + VOCAB)
    for chunks in (1, 4, 16):
        peak = peak_of(lambda n=chunks: given.loss(chunks=n, softcap=softcap).backward())  # type: ignore[misc]
        logits = ROWS * VOCAB * per_logit / chunks
        assert logits < peak < logits + waiting + 4 * ROWS * DIM / chunks + SMALL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_head_costs_no_buffer(dtype: torch.dtype) -> None:
    """Where only hidden states want a gradient, nothing of the weight's size is made."""
    given = case(8, dim=256, vocab=VOCAB, dtype=dtype)
    weight = given.weight.detach()
    step = lambda: chunked_cross_entropy(given.hidden, weight, given.labels).backward()  # noqa: E731
    assert peak_of(step) < 0.4 * weight.nbytes
    assert given.hidden.grad is not None and given.weight.grad is None


def test_without_gradients_only_the_loss_is_made() -> None:
    """Under no_grad, or with all frozen, the peak is a chunk, and nothing is saved."""
    given = case(ROWS, dim=DIM, vocab=VOCAB)
    frozen = Case(*(t.detach() for t in given.leaves), given.labels)

    def off() -> None:
        with torch.no_grad():
            given.loss()

    for step in (off, frozen.loss):
        assert peak_of(step) < 4 * ROWS * VOCAB / 8 + SMALL


@pytest.mark.parametrize(
    ("frozen", "reduction", "shapes"),
    [
        ("weight", "mean", [(6, 8)]),
        ("hidden", "mean", [(11, 8)]),
        ("weight", "none", [(6, 8), (11, 8), (6,)]),
    ],
)
def test_only_what_is_needed_is_saved(frozen: str, reduction: str, shapes: list[Any]) -> None:
    """The gradients asked for wait for backward; with reduction none, the inputs do."""
    given = case(6)._asdict()
    given.update({"bias": None, frozen: given[frozen].detach()})
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(tuple(t.shape)) or t, lambda t: t
    ):
        chunked_cross_entropy(**given, reduction=reduction).sum().backward()
    assert saved == shapes
    assert given[frozen].grad is None


# -- autograd and its users ----------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_backward_more_than_once(dtype: torch.dtype, reduction: str) -> None:
    """A kept graph gives the same again, whatever came in before; the last time too."""
    given = case(6, dtype=dtype)
    fresh = [given.grads(given.loss(reduction=reduction), outer) for outer in (3.0, 1.0)]
    loss = given.loss(reduction=reduction)
    for outer, keep, grads in (
        (3.0, True, fresh[0]),
        (1.0, True, fresh[1]),
        (3.0, False, fresh[0]),
    ):
        again = given.grads(loss, outer, retain_graph=keep)
        assert all(torch.equal(a, b) for a, b in zip(again, grads, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        given.grads(loss)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_are_refused(reduction: str) -> None:
    """A penalty on gradients raises, and does not quietly count as nothing."""
    given = case(6)
    loss = given.loss(reduction=reduction).sum()
    grads = given.grads(loss, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        (loss + grads[0].square().sum()).backward()


class Headed(nn.Module):
    """Two blocks and a head whose weight is also what goes in."""

    def __init__(self, vocab: int = 50) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, 64)
        self.blocks = stack(Mlp, 2)

    def forward(self, ids: Tensor, labels: Tensor, fn: Loss = chunked_cross_entropy) -> Tensor:
        return 2 * fn(self.blocks(self.words(ids)), self.words.weight, labels)


def texts() -> tuple[Tensor, Tensor]:
    """Words, and the next ones."""
    ids = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


def grads_of(model: nn.Module, *args: Any) -> list[Tensor]:
    """Gradients of a step from a fixed random state."""
    torch.manual_seed(3)
    model.zero_grad()
    model(*args).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_a_tied_weight() -> None:
    """A weight used in two places gets the sum of both gradients."""
    model = Headed()
    for one, two in zip(grads_of(model, *texts()), grads_of(model, *texts(), plain), strict=True):
        assert error(one, two) < 1e-5


@pytest.mark.parametrize("plan", PLANS)
def test_under_a_plan_of_legroom(plan: str) -> None:
    """Gradients that wait may be moved and blocks run again: every bit is the same."""
    assert Rig(Headed(), texts()).check(PLANS[plan])


def test_under_ddp(tmp_path: Path) -> None:
    """Gradients reach the reducer's buckets as those of any other op."""
    dist = torch.distributed
    model = Headed()
    alone = grads_of(model, *texts())
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        shared = grads_of(nn.parallel.DistributedDataParallel(model), *texts())
    finally:
        dist.destroy_process_group()
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))


def test_under_checkpoint() -> None:
    """A head that is run again in backward gives the same gradients."""
    given = case(6)
    again = torch.utils.checkpoint.checkpoint(given.loss, use_reentrant=False)
    for one, two in zip(given.grads(again), given.grads(given.loss()), strict=True):
        assert torch.equal(one, two)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_inside_and_beside_compiled_code() -> None:
    """A compiled region breaks there and goes on; the memory stays that of one chunk."""
    given = case(ROWS, dim=DIM, vocab=VOCAB)
    layer = nn.Linear(DIM, DIM)

    def step(x: Tensor) -> Tensor:
        hidden = layer(x).tanh()
        return chunked_cross_entropy(hidden, given.weight, given.labels, softcap=9.0) * 2

    def run(fn: Callable[[Tensor], Tensor]) -> list[Tensor]:
        loss = fn(given.hidden)
        return [loss.detach(), *torch.autograd.grad(loss, (given.hidden, given.weight))]

    inside = torch.compile(step, backend="aot_eager")
    for one, two in zip(run(inside), run(step), strict=True):
        assert error(one, two) < 1e-6
    assert peak_of(lambda: run(inside)) < 1.1 * peak_of(lambda: run(step))
    beside = torch.compile(lambda x: layer(x).tanh(), backend="aot_eager")
    assert chunked_cross_entropy(beside(given.hidden), given.weight, given.labels).isfinite()


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"hidden": torch.zeros(6, 7)}, ValueError, r"hidden \(6, 7\), weight \(11, 8\)"),
        ({"hidden": torch.zeros(6, 8).long()}, TypeError, "hidden is torch.int64"),
        ({"hidden": torch.zeros(6, 8).double()}, TypeError, "weight is torch.float32"),
        ({"weight": torch.zeros(11, 8, 1)}, ValueError, r"weight \(11, 8, 1\)"),
        ({"weight": torch.zeros(11, 8, device="meta")}, ValueError, "weight on meta"),
        ({"labels": torch.zeros(5).long()}, ValueError, r"labels \(5,\) do not match"),
        ({"labels": torch.zeros(6)}, TypeError, "labels are torch.float32"),
        ({"labels": torch.zeros(6) > 0}, TypeError, "labels are torch.bool"),
        ({"bias": torch.zeros(8)}, ValueError, r"bias \(8,\) does not match"),
        ({"chunks": 0}, InputError, "chunks is 0"),
        ({"reduction": "avg"}, InputError, "unknown reduction 'avg'.*mean, none, sum"),
        ({"label_smoothing": 1.5}, InputError, "label_smoothing is 1.5"),
        ({"softcap": 0.0}, InputError, "softcap is 0.0"),
        ({"num_items": 3, "reduction": "sum"}, InputError, "num_items goes with reduction 'mean'"),
        ({"num_items": torch.ones(2)}, InputError, r"num_items is one number, not of shape \(2,\)"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_bad_input_is_named(change: dict[str, Any], kind: type[Exception], words: str) -> None:
    """The message says which tensor or term is wrong, and how."""
    given = case(6)._asdict()
    with pytest.raises(kind, match=words):
        chunked_cross_entropy(**{**given, **change})


@pytest.mark.parametrize("label", [11, -1, -101])
@pytest.mark.parametrize("grad", [True, False])
def test_a_label_outside_the_vocabulary(label: int, grad: bool) -> None:
    """Torch's own error, and no loss."""
    given = case(6)
    given.labels[3] = label
    with pytest.raises(IndexError, match="out of bounds"), torch.set_grad_enabled(grad):
        given.loss()


def test_public_names() -> None:
    """What users are to see."""
    assert legroom.nn.__all__ == ["Head", "chunk_head", "chunked_cross_entropy"]


# -- on a device ---------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_cuda(dtype: torch.dtype, softcap: float | None, reduction: str) -> None:
    """Against float64 on the CPU, as near as the dtype allows; the peak falls with chunks."""
    given = case(ROWS, dim=DIM, vocab=VOCAB, dtype=dtype)
    true = given.to(torch.float64)
    there = Case(*(t.detach().cuda().requires_grad_() for t in given.leaves), given.labels.cuda())
    options: dict[str, Any] = {"reduction": reduction, "softcap": softcap}
    exact = true.grads(true.loss(plain, **options), HALF_SCALE)
    peaks = []
    for chunks in (1, 8):
        torch.cuda.reset_peak_memory_stats()
        loss = there.loss(chunks=chunks, **options)
        grads = torch.autograd.grad(loss.sum() * HALF_SCALE, there.leaves)
        peaks.append(torch.cuda.max_memory_allocated())
        for one, two in zip(grads, exact, strict=True):
            assert error(one.cpu(), two) < 2 * GRAD_ERROR[dtype]
    assert peaks[1] < peaks[0] - 4 * ROWS * VOCAB // 2
