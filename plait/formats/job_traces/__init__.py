"""Readers of cluster job traces."""
