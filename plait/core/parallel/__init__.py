"""How a model is divided: strategies, the layout of ranks, sharding."""

# pyright: reportUnsupportedDunderAll=false

__all__ = ["layout", "matrices", "optimizers", "sharding", "strategy"]
