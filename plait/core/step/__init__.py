"""A training step as data: ops of segments and of the pipeline, their instruction lists, and what
is computed from them."""

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
    "traffic",
]
