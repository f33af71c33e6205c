"""Checkpoints, and weight files of other programs."""
