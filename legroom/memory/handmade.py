"""Hand-made traces with exact numbers, for tests of simulators and policies.

[Note: chain] The chain of `chain()` is a row of values: op i reads value i, saves it for backward
and makes value i + 1. Value 0 is the input, and the loss reads the last. A block is `num_saved`
+ 1 ops in a row, so it saves its input and the `num_saved` values inside it:

    op         0       1       2       3     loss   | backward, mirrored
    value  x0 --> s0.0 --> x1 --> s1.0 --> x2 -->   |
    block  [----- 0 -----] [----- 1 -----]          |

With F forward ops before the loss, op i is undone by op 2F + 1 - i. Value v is born in op v - 1,
let go by forward after op v, and dies with the op that undoes op v; its gradient is born there and
dies one op later. The loss itself is too small to count.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from legroom.core.errors import InputError
from legroom.memory.trace import Block, Kind, Op, Phase, Saved, Step, Storage, Variant

N = TypeVar("N", int, float)


def chain(
    num_blocks: int,
    saved_bytes: int | Sequence[int],
    *,
    num_saved: int = 1,
    output_bytes: int = 0,
    weight_bytes: int = 0,
    time_s: float | Sequence[float] = 1.0,
    backward_ratio: float = 2.0,
) -> Step:
    """A linear chain of blocks, forward and backward, each with a "full" variant.

    `saved_bytes` is the size of each of the `num_saved` storages inside a block, `output_bytes` of
    the input and of each block's output, `time_s` of each forward op; the first and the last may be
    given per block. A backward op takes `backward_ratio` times its forward op; loss and update take
    no time. With `weight_bytes` each block has a weight and a gradient, and an update ends the
    step. See [Note: chain].

    Raises InputError for a chain without blocks, or a list of the wrong length.
    """
    if num_blocks < 1 or num_saved < 1:
        raise InputError("a chain needs at least one block, and one saved storage in each")
    row = _Chain(
        saved_bytes=_per_block(saved_bytes, num_blocks, "saved_bytes"),
        time_s=_per_block(time_s, num_blocks, "time_s"),
        length=num_saved + 1,
        output_bytes=output_bytes,
        weight_bytes=weight_bytes,
        backward_ratio=backward_ratio,
    )
    return row.step().check()


def natural_peak(step: Step) -> int:
    """Most bytes alive during one op of the unplanned step, workspace included."""
    changes = [0] * (len(step.ops) + 2)
    for storage in step.storages:
        changes[max(storage.birth, 0)] += storage.num_bytes
        changes[storage.death + 1] -= storage.num_bytes
    alive = peak = 0
    for op, change in zip(step.ops, changes, strict=False):
        alive += change
        peak = max(peak, alive + op.workspace_bytes)
    return peak


def _per_block(value: N | Sequence[N], num_blocks: int, what: str) -> list[N]:
    if not isinstance(value, Sequence):
        return [value] * num_blocks
    if len(value) != num_blocks:
        raise InputError(f"{what} lists {len(value)} blocks, the chain has {num_blocks}")
    return list(value)


@dataclass(frozen=True, kw_only=True)
class _Chain:
    """The arithmetic of [Note: chain]; storages are values, gradients, weights, in that order."""

    saved_bytes: list[int]
    time_s: list[float]
    length: int
    output_bytes: int
    weight_bytes: int
    backward_ratio: float

    @property
    def num_blocks(self) -> int:
        return len(self.saved_bytes)

    @property
    def num_forward(self) -> int:
        """F of the note: forward ops before the loss, which is also the last value."""
        return self.num_blocks * self.length

    @property
    def num_ops(self) -> int:
        return 2 * self.num_forward + 2 + bool(self.weight_bytes)

    def step(self) -> Step:
        return Step(
            model="chain",
            signature=f"{self.num_blocks} blocks",
            machine="by hand",
            capture="fake",
            ops=(*self._forward(), *self._backward(), *self._update()),
            storages=(*self._values(), *self._gradients(), *self._weights()),
            saved=tuple(self._saved()),
            blocks=tuple(self._block(k) for k in range(self.num_blocks)),
        )

    def _undo(self, i: int) -> int:
        """The backward op of op i."""
        return 2 * self.num_forward + 1 - i

    def _gradient(self, v: int) -> tuple[int, ...]:
        """The storage of value v's gradient; the input and the loss have none."""
        return (self.num_forward + v,) if 1 <= v <= self.num_forward else ()

    def _weight(self, i: int) -> tuple[int, ...]:
        """The weight that op i reads: the first op of a block reads the block's."""
        if not self.weight_bytes or i % self.length or i == self.num_forward:
            return ()
        return (2 * self.num_forward + 1 + i // self.length,)

    def _weight_gradient(self, i: int) -> tuple[int, ...]:
        return tuple(w + self.num_blocks for w in self._weight(i))

    def _forward(self) -> Iterator[Op]:
        for i in range(self.num_forward):
            k, reads = i // self.length, (i, *self._weight(i))
            name, module = f"f{k}.{i % self.length}", f"blocks.{k}"
            yield Op(name, module, Phase.FORWARD, k, self.time_s[k], reads, (i + 1,))
        yield Op("loss", "", Phase.FORWARD, -1, 0.0, (self.num_forward,), ())

    def _backward(self) -> Iterator[Op]:
        last = self.num_forward
        yield Op("loss'", "", Phase.BACKWARD, -1, 0.0, (last,), self._gradient(last))
        for i in reversed(range(last)):
            k, time_s = i // self.length, self.time_s[i // self.length] * self.backward_ratio
            reads = (i, *self._gradient(i + 1), *self._weight(i))
            writes = (*self._gradient(i), *self._weight_gradient(i))
            name, module = f"b{k}.{i % self.length}", f"blocks.{k}"
            yield Op(name, module, Phase.BACKWARD, k, time_s, reads, writes)

    def _update(self) -> Iterator[Op]:
        weights = tuple(w for i in range(self.num_forward) for w in self._weight(i))
        if weights:
            gradients = tuple(w + self.num_blocks for w in weights)
            yield Op("update", "", Phase.UPDATE, -1, 0.0, (*weights, *gradients), weights)

    def _values(self) -> Iterator[Storage]:
        end = self.num_ops
        yield Storage("x0", self.output_bytes, Kind.INPUT, -1, end, end, "float32")
        for v in range(1, self.num_forward + 1):
            k, j = divmod(v, self.length)
            name = f"s{k}.{j - 1}" if j else f"x{k}"
            num_bytes = self.saved_bytes[k] if j else self.output_bytes
            yield Storage(name, num_bytes, Kind.ACTIVATION, v - 1, v, self._undo(v), "float32")

    def _gradients(self) -> Iterator[Storage]:
        for value in list(self._values())[1:]:
            birth, death = value.death, value.death + 1
            name = f"{value.name}'"
            yield Storage(name, value.num_bytes, Kind.TEMPORARY, birth, death, death, "float32")

    def _weights(self) -> Iterator[Storage]:
        if not self.weight_bytes:
            return
        size, end = self.weight_bytes, self.num_ops
        for k in range(self.num_blocks):
            yield Storage(f"w{k}", size, Kind.WEIGHT, -1, end, end, "float32")
        for k in range(self.num_blocks):
            birth = self._undo(k * self.length)
            yield Storage(f"w{k}'", size, Kind.GRADIENT, birth, end - 1, end - 1, "float32")

    def _saved(self) -> Iterator[Saved]:
        for v in range(self.num_forward):
            yield Saved(v, *divmod(v, self.length), v, (self._undo(v),))
        last = self.num_forward
        yield Saved(last, -1, 0, last, (self._undo(last),))

    def _block(self, k: int) -> Block:
        first = k * self.length
        last = first + self.length - 1
        sizes = list(zip(self.saved_bytes, self.time_s, strict=True))
        return Block(
            module=f"blocks.{k}",
            group=list(dict.fromkeys(sizes)).index(sizes[k]),
            first=first,
            last=last,
            inputs=(first,),
            variants=(self._full(k, first, last),),
        )

    def _full(self, k: int, first: int, last: int) -> Variant:
        """Drop all that was made inside; the last op makes only the output, and is not replayed."""
        num_saved = self.length - 1
        return Variant(
            name="full",
            drops=tuple(range(first + 1, last + 1)),
            replays=tuple(range(first, last)),
            last=last - 1,
            dropped_bytes=num_saved * self.saved_bytes[k],
            replay_s=num_saved * self.time_s[k],
            replay_peak_bytes=num_saved * self.saved_bytes[k],
        )
