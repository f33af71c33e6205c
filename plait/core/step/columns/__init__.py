"""A set of candidate strategies as arrays, and models of which only shapes are known."""

# pyright: reportUnsupportedDunderAll=false

__all__ = ["points", "shapes"]
