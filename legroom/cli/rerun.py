"""Run the plans of several policies for real, each by `legroom fit` in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from legroom.core.errors import LegroomError
from legroom.core.outcome import Comparison

CALL = "from legroom.cli import main; main()"
TIMEOUT_S = 600.0


def run_policy(policy: str, given: Sequence[str]) -> Comparison | LegroomError:
    """Train some steps under a policy: predicted beside measured, or why that failed.

    `given` is what `legroom fit` is called with besides. Nothing that one run leaves in memory or
    in caches flatters the next.
    """
    call = [sys.executable, "-c", CALL, "fit", *given, "--policy", policy, "--json"]
    try:
        done = subprocess.run(call, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return LegroomError(f"not done after {TIMEOUT_S:.0f} s")
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        return LegroomError(f"failed: {lines[-1]}")
    if "comparison" not in found:
        return LegroomError(str(found.get("error", "failed")))
    return msgspec.convert(found["comparison"], Comparison)
