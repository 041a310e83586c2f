"""legroom makes a PyTorch training job fit the machine it has, and run fast there."""
