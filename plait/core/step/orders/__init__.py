"""Lists of segment ops: their text form, their orders, and the search for short ones."""

# pyright: reportUnsupportedDunderAll=false

__all__ = ["overlap", "segment_lists"]
