"""Predicted seconds of matrix products, memory passes, collectives and whole steps."""

# pyright: reportUnsupportedDunderAll=false

__all__ = ["closed_form", "costs", "rates", "shard_traffic", "sharding_costs"]
