"""Hardware: what a cluster has, and what was measured of it."""

# pyright: reportUnsupportedDunderAll=false

__all__ = ["efficiency", "hardware", "mfu", "network", "overhead", "placement_profile", "plausible", "profile"]
