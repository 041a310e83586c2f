"""Disk for moved bytes: one unlinked scratch file, written and read past the page cache."""

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from legroom.core.errors import TierError
from legroom.core.units import format_bytes
from legroom.memory.mechanisms.pool import PAGE_BYTES, round_up

BOUNCE_BYTES = 4 << 20

Transfer = Callable[[memoryview, int], int]


class DiskFile:
    """A scratch file of a fixed size that vanishes with the process, however that ends.

    Offsets are multiples of 4096; lengths are free, but a write owns its last 4096 bytes whole.
    Any number of threads may read and write at a time. Raises TierError when the directory
    cannot take the file, and when a read or write fails.
    """

    def __init__(self, directory: str | os.PathLike[str], num_bytes: int) -> None:
        self.directory = Path(directory)
        self.num_bytes = round_up(num_bytes)
        self._bounce = threading.local()
        self._closed = False
        self._fd = self._open()
        try:
            self._reserve()
            self.direct = self._go_direct()
        except BaseException:
            self.close()
            raise

    def write(self, offset: int, view: memoryview) -> None:
        """Write all of `view` at `offset`."""
        self._check(offset, len(view))
        self._each(offset, view, self._push, self._push_bounced)

    def read(self, offset: int, view: memoryview) -> None:
        """Fill all of `view` from `offset`."""
        self._check(offset, len(view))
        self._each(offset, view, self._pull, self._pull_bounced)

    def close(self) -> None:
        """Close the file, which gives its bytes back to the disk."""
        if not self._closed:
            self._closed = True
            os.close(self._fd)

    def __del__(self) -> None:
        # An open that failed has no file to close.
        if hasattr(self, "_fd"):
            self.close()

    def _open(self) -> int:
        try:
            try:
                return os.open(self.directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError:
                # Some network and overlay file systems know no nameless files.
                fd, name = tempfile.mkstemp(prefix="legroom-", dir=self.directory)
                os.unlink(name)
                return fd
        except OSError as error:
            raise TierError(
                f"cannot make a file of {format_bytes(self.num_bytes)} in {self.directory}: "
                f"{error.strerror}; give the disk tier a directory that can be written"
            ) from error

    def _reserve(self) -> None:
        if self.num_bytes == 0:
            return
        try:
            os.posix_fallocate(self._fd, 0, self.num_bytes)
        except OSError as error:
            # What a refused reserve took is ours until the file is closed.
            os.ftruncate(self._fd, 0)
            missing = max(self.num_bytes - shutil.disk_usage(self.directory).free, 0)
            raise TierError(
                f"cannot reserve {format_bytes(self.num_bytes)} in {self.directory}: "
                f"{error.strerror}, {missing} bytes ({format_bytes(missing)}) are missing; "
                "give the disk tier a smaller budget or another directory"
            ) from error

    def _go_direct(self) -> bool:
        """Switch the page cache off if the file system takes it, which only a write can tell."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            if self.num_bytes:
                os.pwrite(self._fd, mmap.mmap(-1, PAGE_BYTES), 0)
            return True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise self._failed("write", 0, error) from error
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            return False

    def _check(self, offset: int, num_bytes: int) -> None:
        assert not self._closed, "the file is closed"
        assert offset % PAGE_BYTES == 0, f"an offset on disk is not aligned: {offset}"
        assert offset >= 0 and offset + num_bytes <= self.num_bytes, "outside of the file"

    def _each(self, offset: int, view: memoryview, plain: Transfer, bounced: Transfer) -> None:
        """Transfer a view, in place as far as the file allows and the rest by a bounce buffer."""
        place = 0
        whole = len(view)
        if self.direct:
            whole = len(view) // PAGE_BYTES * PAGE_BYTES if _is_aligned(view) else 0
        while place < whole:
            place += self._advance(plain(view[place:whole], offset + place))
        while place < len(view):
            place += bounced(view[place : place + BOUNCE_BYTES], offset + place)

    def _advance(self, num_bytes: int) -> int:
        """How far a transfer got: direct ones must go on from a whole page."""
        return num_bytes // PAGE_BYTES * PAGE_BYTES if self.direct else num_bytes

    def _push(self, view: memoryview, offset: int) -> int:
        try:
            return self._moved("write", offset, os.pwrite(self._fd, view, offset))
        except OSError as error:
            raise self._failed("write", offset, error) from error

    def _pull(self, view: memoryview, offset: int) -> int:
        try:
            return self._moved("read", offset, os.preadv(self._fd, [view], offset))
        except OSError as error:
            raise self._failed("read", offset, error) from error

    def _push_bounced(self, view: memoryview, offset: int) -> int:
        bounce = self._buffer(len(view))
        bounce[: len(view)] = view
        return self._through(self._push, bounce, offset, len(view))

    def _pull_bounced(self, view: memoryview, offset: int) -> int:
        bounce = self._buffer(len(view))
        done = self._through(self._pull, bounce, offset, len(view))
        view[:] = bounce[: len(view)]
        return done

    def _through(self, plain: Transfer, bounce: memoryview, offset: int, num_bytes: int) -> int:
        place = 0
        while place < len(bounce):
            place += self._advance(plain(bounce[place:], offset + place))
        return num_bytes

    def _buffer(self, num_bytes: int) -> memoryview:
        """This thread's bounce buffer, as much of it as whole pages for `num_bytes` take."""
        if not hasattr(self._bounce, "buffer"):
            self._bounce.buffer = memoryview(mmap.mmap(-1, BOUNCE_BYTES))
        whole: memoryview = self._bounce.buffer
        return whole[: round_up(num_bytes)]

    def _moved(self, verb: str, offset: int, num_bytes: int) -> int:
        # Less than a page cannot be gone on from, and nothing at all would be tried for ever.
        if self._advance(num_bytes) == 0:
            raise TierError(f"{verb} at {offset} in {self.directory} moved {num_bytes} bytes")
        return num_bytes

    def _failed(self, verb: str, offset: int, error: OSError) -> TierError:
        return TierError(f"{verb} at {offset} in {self.directory} failed: {error.strerror}")


def _is_aligned(view: memoryview) -> bool:
    address: int = np.frombuffer(view, dtype=np.uint8).ctypes.data
    return address % PAGE_BYTES == 0
