"""A training step as data: ops of segments and of the pipeline, their lists, and what follows from them."""

# pyright: reportUnsupportedDunderAll=false

__all__ = [
    "clock",
    "columns",
    "memory",
    "orders",
    "schedule",
    "schedules",
    "seconds",
    "segments",
    "stages",
    "step",
    "unit_traffic",
    "units",
]
