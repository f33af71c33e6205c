"""Seconds of products, passes, collectives and whole steps."""

# pyright: reportUnsupportedDunderAll=false

__all__ = ["closed_form", "costs", "experts_time", "rates", "segment_costs"]
