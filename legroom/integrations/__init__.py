"""Ways in from other tools: each file needs its tool, and this room needs none of them.

from legroom.integrations.huggingface import LegroomCallback    # transformers.Trainer
from legroom.integrations.lightning import LegroomCallback      # lightning.Trainer
"""
