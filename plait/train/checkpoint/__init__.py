"""Checkpoints, and what other programs read and write."""
