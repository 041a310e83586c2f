"""Keep libraries that write to the terminal behind our back off it."""

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def silenced(*descriptors: int) -> Iterator[None]:
    """Send what is written to these file descriptors (1, 2) nowhere meanwhile."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [(fd, os.dup(fd)) for fd in descriptors]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for fd in descriptors:
            os.dup2(nowhere, fd)
        yield
    finally:
        for fd, copy in saved:
            os.dup2(copy, fd)
            os.close(copy)
        os.close(nowhere)
