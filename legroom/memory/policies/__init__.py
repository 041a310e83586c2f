"""Control: one choice per file. Importing this room fills the registry."""

from legroom.memory.policies import auto, every_nth, keep_all, recompute_all, swap_all

__all__ = ["auto", "every_nth", "keep_all", "recompute_all", "swap_all"]
