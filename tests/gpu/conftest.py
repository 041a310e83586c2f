"""Before CUDA starts: products in a fixed order, where a test asks for it."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
