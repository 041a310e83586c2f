"""Built-in example jobs, and the user's own by name.

The small ones run a step on two CPU cores in less than half a second; `llama-1b`, `llama-wide`,
`moe`, `gpt2`, `gpt2-large`, `resnet50`, `resnet152`, `vit-l16` and `unet-512` are sized for a GPU.
Each builder takes `device` ("meta" too: nothing is allocated then) and its sizes by keyword:

    job = EXAMPLES["transformer"](device="cpu", layers=4)
    loss = job.loss_fn(job.model, job.make_batch(seed=1))
    job = load_job("my_project/train.py:job")(device="cuda")
"""

from legroom.examples import builtin as _builtin  # noqa: F401  (fills EXAMPLES)
from legroom.examples.job import EXAMPLES, Builder, Device, Job, MakeBatch
from legroom.examples.load import load_job

__all__ = ["EXAMPLES", "Builder", "Device", "Job", "MakeBatch", "load_job"]
