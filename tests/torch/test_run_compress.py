"""Compression: masks come back bit for bit; floats come back within the error of their format."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from legroom.core.errors import RecordError
from legroom.memory.actions import CODECS, Action, Compress, compressed_bytes
from legroom.memory.mechanisms.compress import decode, encode
from legroom.memory.trace import Step
from tests.torch.nets import Each, Mlp, rows, stack
from tests.torch.support import Rig, by_hand, full, movable

ERRORS = {"bf16": 2.0**-8, "fp8": 2.0**-4}
"""Largest relative error of one element: half a unit of the last place kept."""


def squeeze(codec: str) -> object:
    """A plan that compresses all that the codec takes."""

    def build(step: Step) -> list[Action]:
        fit = [s for s in movable(step) if step.storages[s].dtype in CODECS[codec].dtypes]
        return [Compress(storage=s, codec=codec) for s in fit]

    return build


def masked(self: Each, x: Tensor) -> Tensor:
    """A block that saves bool masks."""
    h = self.up(x)
    return self.down(torch.where(h > 0, h, h * 0.1).masked_fill(h < -1, 0.0))


def test_masks_as_bits_are_exact() -> None:
    """Every gradient is bit-identical, and the plan says that it is exact."""
    rig = Rig(stack(lambda: Each(masked)), rows())
    script = rig.check(squeeze("bits"))  # type: ignore[arg-type]
    assert script.plan.compressions and script.plan.exact


@pytest.mark.parametrize("codec", ["bf16", "fp8"])
def test_lossy_codecs_say_so_and_stay_close(codec: str) -> None:
    """Gradients are off by no more than a few units of the format, and not wildly."""
    rig = Rig(stack(lambda: Mlp(p=0.0)), rows())
    plain = rig.plain()
    script = rig.install(squeeze(codec)(rig.step))  # type: ignore[operator]
    assert script.plan.compressions and not script.plan.exact
    mine = rig.planned()
    rig.close()
    assert torch.equal(mine.loss, plain.loss), "the forward itself is not touched"
    for name, grad in plain.grads.items():
        other = mine.grads[name]
        assert grad is not None and other is not None
        error = float((other - grad).norm() / grad.norm())
        assert error < 2 * ERRORS[codec], f"{name} is off by {error}"


@pytest.mark.parametrize("codec", ["bf16", "fp8"])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e4, 1e30])
def test_the_error_of_one_element(codec: str, scale: float) -> None:
    """Elements near the largest keep their relative error at any scale."""
    values = (torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 0.5) * scale
    flat = values.view(torch.uint8)
    back = decode(encode(codec, flat, torch.float32), flat.numel()).view(torch.float32)
    assert float(((back - values) / values).abs().max()) <= ERRORS[codec] * 1.01


@pytest.mark.parametrize("codec", ["bf16", "fp8"])
@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan"), -0.0, 1e-45])
def test_odd_values_spoil_no_others(codec: str, value: float) -> None:
    """One odd element leaves the others as they are, up to the format's error."""
    values = torch.ones(64)
    values[3] = value
    flat = values.view(torch.uint8)
    back = decode(encode(codec, flat, torch.float32), flat.numel()).view(torch.float32)
    rest = torch.cat((back[:3], back[4:]))
    assert torch.allclose(rest, torch.ones(63), rtol=ERRORS[codec])


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1023, 1 << 12])
def test_bits_of_any_length(count: int) -> None:
    """A mask need not be a multiple of eight long, and takes one bit each."""
    mask = torch.rand(count, generator=torch.Generator().manual_seed(count)) < 0.5
    packed = encode("bits", mask.view(torch.uint8), torch.bool)
    assert packed.data.numel() == compressed_bytes("bits", count, "bool") == -(-count // 8)
    assert torch.equal(decode(packed, count).view(torch.bool), mask)


def test_half_floats_in_eight_bits() -> None:
    """bf16 and f16 are taken as well, with the same error."""
    for dtype in (torch.bfloat16, torch.float16):
        values = (torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 0.5).to(dtype)
        flat = values.view(torch.uint8)
        back = decode(encode("fp8", flat, dtype), flat.numel()).view(dtype)
        assert float(((back - values) / values).abs().max()) <= ERRORS["fp8"] * 1.1


def test_a_codec_for_another_dtype_is_refused() -> None:
    """The plan is refused by name, before anything runs."""
    rig = Rig(stack(Mlp), rows())
    with pytest.raises(RecordError, match="does not take"):
        by_hand(rig.step, [Compress(storage=movable(rig.step)[0], codec="bits")])


def test_compression_beside_replays() -> None:
    """Some blocks run again, what others saved is packed: exact with bits."""
    rig = Rig(stack(lambda: Each(masked)), rows())

    def build(step: Step) -> list[Action]:
        again = full(step)[:1]
        drops = set(step.blocks[0].variants[-1].drops)
        bits = [a for a in squeeze("bits")(step) if a.storage not in drops]  # type: ignore[operator]
        return [*again, *bits]

    assert rig.check(build).plan.compressions


def test_a_compressed_graph_is_read_twice() -> None:
    """retain_graph: the second backward unpacks the same bits again."""
    model: nn.Module = stack(lambda: Each(masked))
    rig = Rig(model, rows())

    def twice() -> list[Tensor]:
        rig.start.restore()
        loss = F.relu(rig.loss())
        loss.backward(retain_graph=True)
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]

    plain = twice()
    rig.install(squeeze("bits")(rig.step))  # type: ignore[operator]
    with rig.runner.following():
        mine = twice()
    rig.close()
    assert all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))
