"""A training step as data: ops of segments and of the pipeline, their lists and orders."""

# pyright: reportUnsupportedDunderAll=false

__all__ = [
    "dry_run",
    "overlap",
    "schedule",
    "schedule_text",
    "schedules",
    "segment_costs",
    "segment_lists",
    "segments",
    "sends",
    "stages",
    "step",
    "units",
]
