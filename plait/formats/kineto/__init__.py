"""Readers of the PyTorch profiler's traces."""
