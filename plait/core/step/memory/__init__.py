"""Bytes that a step holds: walked over lists, for one strategy or for columns of strategies."""

# pyright: reportUnsupportedDunderAll=false

__all__ = ["closed_memory", "estimate", "experts_memory", "memory_options", "pipeline_memory"]
