"""Jobs: the job file, its settings, its checks, and the plan that is made from it."""

# pyright: reportUnsupportedDunderAll=false

__all__ = [
    "cluster_settings",
    "collecting",
    "communication",
    "constraint",
    "plan",
    "reference",
    "refine",
    "settings",
    "spec",
    "texts",
]
