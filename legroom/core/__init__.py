"""Words every plane shares: units, errors, record files, outcomes, the clock."""
