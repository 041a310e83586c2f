"""The data plane of memory: each file carries out one kind of action and decides nothing."""
