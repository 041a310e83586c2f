"""What the hardware can do: specs as plain numbers, presets, and the probe."""
