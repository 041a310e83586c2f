"""The command, one file per verb; `legroom --help` says what each one answers."""

import os
import sys


def main() -> None:
    """Run the command: exit code 0 fits, 1 does not fit, 2 bad input, 3 something broke."""
    # Torch's allocator has notes for its developers; the user's own setting holds.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from legroom.cli.app import app

    _keep_stdout()
    app()


def _keep_stdout() -> None:
    """Send to stderr what libraries print past Python: stdout is for answers alone."""
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=encoding, errors=errors)
    os.dup2(2, 1)
