"""Arithmetic that torch has no rule for, and what fake tensors forget of an op's results."""

import pytest
import torch
from torch import nn

import legroom
from legroom.memory.ops import count_flops
from tests.torch.support import MACHINE


def flops_of(model: nn.Module, *batch: torch.Tensor) -> dict[str, float]:
    step = legroom.trace(model, batch, machine=MACHINE, optimizer="none")
    found: dict[str, float] = {}
    for op in step.ops:
        found[op.name] = found.get(op.name, 0.0) + op.flops
    return found


@pytest.mark.parametrize("ways", [1, 2])
def test_a_recurrent_layer_has_its_products_counted(ways: int) -> None:
    """Each word meets the weights for itself and for the state, four gates each; backward twice."""
    batch, words, inputs, dim = 3, 7, 5, 4
    model = nn.LSTM(inputs, dim, batch_first=True, bidirectional=ways == 2)
    found = flops_of(model, torch.randn(batch, words, inputs))
    forward = 2 * batch * words * 4 * dim * (inputs + dim) * ways
    assert found["aten.mkldnn_rnn_layer"] == forward
    assert found["aten.mkldnn_rnn_layer_backward"] == 2 * forward


def test_cudnns_recurrent_op_is_counted_alike() -> None:
    """All layers and ways in one list of weights, with biases that have no products."""
    x, weights = torch.empty(7, 3, 5), [torch.empty(16, 5), torch.empty(16, 4), torch.empty(16)]
    args = (x, weights, 4, torch.empty(160), torch.empty(1, 3, 4))
    forward = count_flops(torch.ops.aten._cudnn_rnn, args, {}, None)
    assert forward == 2 * 21 * 16 * 9
    assert count_flops(torch.ops.aten._cudnn_rnn_backward, args, {}, None) == 2 * forward


@pytest.mark.parametrize(
    ("rows", "columns", "flops"),
    [
        ((10, 3), (4, 3, 5), 2 * 10 * 3 * 5),
        ((3, 10), (10, 5), 2 * 3 * 10 * 5),
        ((4, 2, 3), (3, 5), 2 * 2 * 3 * 5),
        ((4, 2, 3), (4, 3, 5), 2 * 4 * 2 * 3 * 5),
    ],
)
def test_grouped_products_are_counted(
    rows: tuple[int, ...], columns: tuple[int, ...], flops: float
) -> None:
    """Rows that are dealt to groups meet one matrix each, whichever side the groups are on."""
    args = (torch.empty(rows), torch.empty(columns))
    assert count_flops(torch.ops.aten._grouped_mm, args, {}, None) == flops


def test_a_recurrent_layer_is_captured_the_same_each_time() -> None:
    """Its biases share a gradient, so one is copied: also when fake results come from a cache."""
    model, batch = nn.LSTM(5, 6, batch_first=True), (torch.randn(3, 7, 5),)
    one, two = (legroom.trace(model, batch, machine=MACHINE) for _ in range(2))
    assert one == two
    (copied,) = (op for op in one.ops if op.name == "aten.copy_")
    assert one.storages[copied.writes[0]].name in ("bias_ih_l0.grad", "bias_hh_l0.grad")
