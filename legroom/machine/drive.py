"""Measure a drive: one scratch file, several threads, past the file cache where allowed."""

import errno
import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

from legroom.core.errors import TierError
from legroom.core.units import format_bytes

MIB = 2**20
PAGE_BYTES = 4096
NUM_THREADS = 8
CHUNK_BYTES = 16 * MIB


class PairRates(NamedTuple):
    """Bytes per second between two tiers: away, back, and both ways at once."""

    there: float
    back: float
    both: float
    latency_s: float
    """Least time of a transfer, however small."""


def drive_rates(directory: str, num_bytes: int) -> PairRates:
    """Measure the drive under `directory` with a scratch file of `num_bytes`.

    Raises TierError when the directory cannot be written or lacks the room.
    """
    try:
        with _scratch(directory) as handle, ThreadPoolExecutor(NUM_THREADS) as pool:
            return _Drive(handle, num_bytes, pool).rates()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            size = format_bytes(num_bytes)
            raise TierError(f"the probe needs {size} free at {directory}") from None
        raise disk_error(directory, error) from None


def disk_error(directory: str, error: OSError) -> TierError:
    """The error for a directory that cannot serve as disk tier."""
    reason = error.strerror or str(error)
    return TierError(f"cannot use {directory} as disk tier: {reason}; choose another directory")


@contextmanager
def _scratch(directory: str) -> Iterator[int]:
    """A file without a name, gone when closed."""
    handle, path = tempfile.mkstemp(prefix="legroom-probe-", dir=directory)
    try:
        os.unlink(path)
        yield handle
    finally:
        os.close(handle)


class _Drive:
    """Streams one file by several threads, past the file cache where that is allowed."""

    def __init__(self, handle: int, num_bytes: int, pool: ThreadPoolExecutor) -> None:
        self.handle, self.num_bytes, self.pool = handle, num_bytes, pool
        self.direct = _go_direct(handle)
        self.chunk = min(CHUNK_BYTES, num_bytes // NUM_THREADS)
        # Not zeros: some drives and file systems store those for nothing.
        noise = os.urandom(MIB) * (self.chunk // MIB)
        self.slabs = [_slab(self.chunk, noise) for _ in range(NUM_THREADS)]

    def rates(self) -> PairRates:
        """Write, read and mixed rate in bytes per second, and the time of one page."""
        writes, reads = ["write"] * NUM_THREADS, ["read"] * NUM_THREADS
        self._pass(writes)  # the first pass finds blocks for the file
        write, read = self._rate(writes), self._rate(reads)
        both = self._rate(["write", "read"] * (NUM_THREADS // 2))
        return PairRates(write, read, max(both, write, read), self._latency_s())

    def _rate(self, verbs: Sequence[str]) -> float:
        return self.num_bytes / median(self._pass(verbs) for _ in range(3))

    def _pass(self, verbs: Sequence[str]) -> float:
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.handle, 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        list(self.pool.map(self._stream, range(NUM_THREADS), verbs))
        if not self.direct:
            os.fsync(self.handle)
        return time.perf_counter() - start

    def _stream(self, turn: int, verb: str) -> None:
        slab = self.slabs[turn]
        for offset in range(turn * self.chunk, self.num_bytes, NUM_THREADS * self.chunk):
            if verb == "write":
                moved = os.pwrite(self.handle, slab, offset)
            else:
                moved = os.preadv(self.handle, [slab], offset)
            if moved != self.chunk:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _latency_s(self) -> float:
        page = _slab(PAGE_BYTES)
        times = []
        for offset in range(0, self.num_bytes, self.num_bytes // 8):
            start = time.perf_counter()
            os.preadv(self.handle, [page], offset)
            times.append(time.perf_counter() - start)
        return median(times)


def _slab(num_bytes: int, content: bytes = b"") -> mmap.mmap:
    """Page-aligned memory, as direct I/O wants it."""
    slab = mmap.mmap(-1, num_bytes)
    slab[: len(content)] = content
    return slab


def _go_direct(handle: int) -> bool:
    """Switch the file to direct I/O; False where its file system refuses."""
    flag = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | flag)
        os.pwrite(handle, _slab(PAGE_BYTES), 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        fcntl.fcntl(handle, fcntl.F_SETFL, flags)
        return False
    return bool(flag)
