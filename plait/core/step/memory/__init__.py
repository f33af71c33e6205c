"""Predicted bytes of a step's memory, from traces of instruction lists: for one strategy, or for
arrays of strategies."""

# pyright: reportUnsupportedDunderAll=false

__all__ = ["closed_memory", "estimate", "memory_options", "pipeline_memory", "states"]
