"""Built-in example jobs, and the user's own by name.

The small ones (`transformer`, `llama-tiny`, `lstm`, `mlp`, `convnet`, `unet`) run a step on two
CPU cores in less than half a second. Sized for a GPU are

- `vgg16`, `resnet50`, `resnet152`, `resnet200`, `inception`, `densenet`, `unet-512`, `vit-l16`;
- `llama-1b`, `llama-wide`, `moe`, `gpt2`, `gpt2-medium`, `gpt2-large`, `gpt2-xl`, `bert-base`,
  `bert-large` of transformers;
- `seq2seq` and `dlrm`.

Each builder takes `device` ("meta" too: nothing is allocated then) and its sizes by keyword:

    job = EXAMPLES["transformer"](device="cpu", layers=4)
    loss = job.loss_fn(job.model, job.make_batch(seed=1))
    job = load_job("my_project/train.py:job")(device="cuda")
"""

from legroom.examples import builtin as _builtin  # noqa: F401  (fills EXAMPLES)
from legroom.examples import hub as _hub  # noqa: F401  (the same)
from legroom.examples.job import EXAMPLES, Builder, Device, Job, MakeBatch
from legroom.examples.load import load_job

__all__ = ["EXAMPLES", "Builder", "Device", "Job", "MakeBatch", "load_job"]
