"""What a user asks for and what is to be done: the job, its settings, the plan."""

# pyright: reportUnsupportedDunderAll=false

__all__ = [
    "collecting",
    "communication",
    "constraint",
    "kubernetes_settings",
    "place_settings",
    "plan",
    "reference",
    "refine",
    "settings",
    "slurm_settings",
    "spec",
    "worth_timing",
]
