"""Before CUDA starts: products in a fixed order, for tests that ask. After each test: clean up."""

import gc
import os
import sys
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def clean_device() -> Iterator[None]:
    """What one test leaves on the device must not count against the next one's budget."""
    yield
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)  # frames of a test that failed, and all they hold
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)
