"""Measuring before training: slices, what of sharding is hidden, slack."""
