"""Parts of a model written to need less memory."""

from legroom.nn.head import Head, chunk_head
from legroom.nn.loss import chunked_cross_entropy

__all__ = ["Head", "chunk_head", "chunked_cross_entropy"]
