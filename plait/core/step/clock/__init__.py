"""A step in simulated time: ranks with their streams, pp ranks with their transfers."""

# pyright: reportUnsupportedDunderAll=false

__all__ = ["pipeline", "pipeline_clock", "pipeline_ranks", "prices"]
