"""Division of a model over ranks: strategies, the layout of ranks, sharding."""

# pyright: reportUnsupportedDunderAll=false

__all__ = ["layout", "sharding", "strategy"]
