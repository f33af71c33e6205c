"""Measurements before training: slices, overlap of sharding's communication, slack."""
