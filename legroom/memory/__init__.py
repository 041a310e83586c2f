"""The plane of tensors: trace, plan, simulate and run one training step under a budget."""
