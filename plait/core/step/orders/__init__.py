"""Instruction lists of segment ops: their text form, their orders, and the search for fast
orders."""

# pyright: reportUnsupportedDunderAll=false

__all__ = ["overlap", "segment_costs"]
