"""A space of strategies as columns, and models of which only shapes are known."""

# pyright: reportUnsupportedDunderAll=false

__all__ = ["distinct", "points"]
