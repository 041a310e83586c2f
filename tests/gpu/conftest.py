"""Before CUDA starts: products in a fixed order, for tests that ask. After each test: clean up."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def clean_device() -> Iterator[None]:
    """What one test leaves on the device must not count against the next one's budget."""
    yield
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)
