"""Hardware of clusters, and measurements of it."""

# pyright: reportUnsupportedDunderAll=false

__all__ = ["efficiency", "hardware", "mfu", "network", "plausible", "profile"]
