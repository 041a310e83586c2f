"""Host memory for moved bytes: one slab registered once, and who lies where in it.

`Slab` is the memory, `layout` places lifetimes that are known, `FreeList` those that are not.
"""

import mmap
import os
import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import psutil  # type: ignore[import-untyped, unused-ignore]
import torch

from legroom.core.errors import InputError, TierError
from legroom.core.units import format_bytes

PAGE_BYTES = 4096
ALIGN_BYTES = 512
"""What device copies want; places on disk are aligned to PAGE_BYTES instead."""
PIECE_BYTES = 256 << 20
"""Registered at a time: about 0.2 s, so that a pause or an interrupt is never far."""

Interval = tuple[int, int, int]
Progress = Callable[[int, int], None]


def round_up(num_bytes: int, align: int = PAGE_BYTES) -> int:
    """The next multiple of `align`."""
    return -(-num_bytes // align) * align


class Slab:
    """Page-aligned host memory of an exact size in whole pages, registered with CUDA if pinned.

    May be made in a background thread: `progress(done_bytes, num_bytes)` is called after each
    piece, and what it raises stops the work and gives everything back. Raises TierError when
    the host is short of memory or the driver refuses. A `whole` one is registered at once: tensors
    in it can be copied by anyone, in one go.
    """

    def __init__(
        self,
        num_bytes: int,
        *,
        pin: bool,
        progress: Progress | None = None,
        whole: bool = False,
    ) -> None:
        if num_bytes <= 0:
            raise InputError(f"a slab needs at least one byte, not {num_bytes}")
        self.num_bytes = round_up(num_bytes)
        self.pinned = pin
        self.piece_bytes = self.num_bytes if whole else PIECE_BYTES
        _check_available(self.num_bytes)
        self._bytes: torch.Tensor | None = torch.frombuffer(
            _map(self.num_bytes, pin), dtype=torch.uint8
        )
        registered: list[int] = []
        self._unregister = weakref.finalize(self, _unregister, registered, os.getpid())
        try:
            if pin:
                self._register(registered, progress)
            elif progress is not None:
                progress(self.num_bytes, self.num_bytes)
        except BaseException:
            self.close()
            raise

    def _register(self, registered: list[int], progress: Progress | None) -> None:
        """Pin piece by piece, adding the address of each to `registered` once it is pinned."""
        cudart, address = torch.cuda.cudart(), self.view(0, 1).data_ptr()  # type: ignore[no-untyped-call]
        for start in range(0, self.num_bytes, self.piece_bytes):
            size = min(self.piece_bytes, self.num_bytes - start)
            code = int(cudart.cudaHostRegister(address + start, size, 0))
            if code != 0:
                _forget_error()
                raise TierError(
                    f"CUDA cannot pin host memory: error {code} after {format_bytes(start)} of "
                    f"{format_bytes(self.num_bytes)}; give the pinned tier a smaller budget"
                )
            registered.append(address + start)
            if progress is not None:
                progress(start + size, self.num_bytes)

    def view(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Bytes of the slab as a tensor: no copy, valid as long as it is held."""
        assert self._bytes is not None, "the slab is closed"
        assert offset >= 0 and offset + num_bytes <= self.num_bytes, "outside of the slab"
        return self._bytes.narrow(0, offset, num_bytes)

    def cuts(self, offset: int, num_bytes: int) -> list[tuple[int, int]]:
        """A range cut where registration was: the driver refuses one copy across two pieces."""
        cuts, end = [], offset + num_bytes
        while offset < end:
            stop = min(end, (offset // self.piece_bytes + 1) * self.piece_bytes)
            cuts.append((offset, stop - offset))
            offset = stop
        return cuts

    def close(self) -> None:
        """Unregister and unmap; a view still held keeps its pages, unregistered, until it dies."""
        self._unregister()
        self._bytes = None


def _check_available(num_bytes: int) -> None:
    available = psutil.virtual_memory().available
    if num_bytes > available:
        raise TierError(
            f"host memory is short by {format_bytes(num_bytes - available)}: a slab of "
            f"{format_bytes(num_bytes)} was asked for and {format_bytes(available)} is available; "
            "give the host tier a smaller budget or move fewer bytes"
        )


def _map(num_bytes: int, pin: bool) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise TierError(f"cannot map {format_bytes(num_bytes)} of host memory: {error}") from error
    with suppress(OSError):
        # Huge pages are registered in half the time.
        memory.madvise(mmap.MADV_HUGEPAGE)
    if pin:
        with suppress(OSError):
            # A fork (the workers of a data loader) would copy every page that is registered.
            memory.madvise(mmap.MADV_DONTFORK)
    return memory


def _unregister(registered: list[int], owner: int) -> None:
    # A forked child has no CUDA context of its own: the registration is its parent's.
    if not registered or os.getpid() != owner:
        return
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    codes = [int(cudart.cudaHostUnregister(registered.pop())) for _ in range(len(registered))]
    # No failure helps anyone here: at exit the driver may have let go of it all before us.
    if any(codes):
        _forget_error()


def _forget_error() -> None:
    """Take back the error CUDA remembers, or the next kernel of the user would be blamed."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")


def layout(intervals: Sequence[Interval], *, align: int = ALIGN_BYTES) -> tuple[list[int], int]:
    """Offsets for (num_bytes, start, end) lifetimes, and the bytes they need together.

    A lifetime covers the positions start <= p < end. Largest first, each into the smallest gap
    that takes it (the lowest of equals), so the answer is always the same.
    """
    for row, (num_bytes, start, end) in enumerate(intervals):
        if num_bytes < 0 or end <= start:
            raise InputError(f"lifetime {row} is not one: {num_bytes} bytes from {start} to {end}")
    order = sorted(range(len(intervals)), key=lambda i: (-intervals[i][0], intervals[i][1], i))
    offsets = [0] * len(intervals)
    # Columns of what is placed: first position, end position, first byte, end byte.
    placed = np.zeros((4, len(intervals)), dtype=np.int64)
    for count, row in enumerate(order):
        num_bytes, start, end = intervals[row]
        beside = (placed[0, :count] < end) & (placed[1, :count] > start)
        offsets[row] = _best_gap(placed[2:, :count][:, beside], round_up(num_bytes, align))
        placed[:, count] = (start, end, offsets[row], offsets[row] + round_up(num_bytes, align))
    total = max((o + i[0] for o, i in zip(offsets, intervals, strict=True)), default=0)
    return offsets, total


def _best_gap(taken: "np.ndarray[tuple[int, int], np.dtype[np.int64]]", num_bytes: int) -> int:
    """The start of the smallest gap that takes `num_bytes`; above all of them if none does."""
    if taken.shape[1] == 0:
        return 0
    first, end = taken[:, np.argsort(taken[0], kind="stable")]
    # Where room begins: at zero, and after the highest end so far.
    begins = np.concatenate(([0], np.maximum.accumulate(end)))
    rooms = first - begins[:-1]
    fits = np.flatnonzero(rooms >= num_bytes)
    best = fits[np.argmin(rooms[fits])] if fits.size else -1
    return int(begins[best])


def check_layout(
    intervals: Sequence[Interval],
    offsets: Sequence[int],
    total: int,
    *,
    align: int = ALIGN_BYTES,
) -> None:
    """Raise AssertionError, naming the rows, if two lifetimes share a byte at some position."""
    for row, (offset, (num_bytes, start, end)) in enumerate(zip(offsets, intervals, strict=True)):
        assert offset % align == 0, f"lifetime {row} is not aligned: {offset}"
        assert offset >= 0 and offset + num_bytes <= total, f"lifetime {row} is outside"
        for other in range(row):
            size, since, until = intervals[other]
            apart = end <= since or until <= start
            below = offset + num_bytes <= offsets[other] or offsets[other] + size <= offset
            assert apart or below, f"lifetimes {other} and {row} share bytes"


class FreeList:
    """Room for moves decided online: first fit, neighbours joined when given back."""

    def __init__(self, num_bytes: int, *, align: int = ALIGN_BYTES) -> None:
        self.num_bytes = num_bytes // align * align
        self._align = align
        self._taken: dict[int, int] = {}
        # Holes by offset: two columns, so that bisect can search the first.
        self._offsets = [0] if self.num_bytes else []
        self._sizes = [self.num_bytes] if self.num_bytes else []

    @property
    def free_bytes(self) -> int:
        """Bytes in all holes together."""
        return sum(self._sizes)

    def take(self, num_bytes: int) -> int | None:
        """The offset of a range of at least `num_bytes`, or None when no hole takes it."""
        need = round_up(max(num_bytes, 1), self._align)
        for hole, size in enumerate(self._sizes):
            if size >= need:
                offset = self._offsets[hole]
                self._shrink(hole, need)
                self._taken[offset] = need
                return offset
        return None

    def give(self, offset: int) -> None:
        """Give back what `take` returned."""
        assert offset in self._taken, f"nothing is taken at {offset}"
        size = self._taken.pop(offset)
        hole = bisect_left(self._offsets, offset)
        self._offsets.insert(hole, offset)
        self._sizes.insert(hole, size)
        self._join(hole)
        if hole > 0:
            self._join(hole - 1)

    def _shrink(self, hole: int, num_bytes: int) -> None:
        self._offsets[hole] += num_bytes
        self._sizes[hole] -= num_bytes
        if self._sizes[hole] == 0:
            del self._offsets[hole], self._sizes[hole]

    def _join(self, hole: int) -> None:
        """Join a hole with the next if they touch."""
        end = self._offsets[hole] + self._sizes[hole]
        if hole + 1 < len(self._offsets) and self._offsets[hole + 1] == end:
            self._sizes[hole] += self._sizes.pop(hole + 1)
            del self._offsets[hole + 1]
