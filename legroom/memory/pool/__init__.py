"""Addresses: where allocators put a plan's blocks, and what a pool loses to gaps.

Importing this room fills the registry.
"""

from legroom.memory.pool import best_fit, buddy, size_class, smartpool, two_ended

__all__ = ["best_fit", "buddy", "size_class", "smartpool", "two_ended"]
