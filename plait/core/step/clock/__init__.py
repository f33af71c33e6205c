"""A step in virtual time: ranks with their streams, places with their transfers."""

# pyright: reportUnsupportedDunderAll=false

__all__ = ["crowd", "dry_run", "pipeline", "placed_prices", "prices"]
