"""Files in a run's folder, and messages between the processes of a run."""

# pyright: reportUnsupportedDunderAll=false

__all__ = [
    "attempts",
    "channel",
    "evidence",
    "folder",
    "history",
    "host_memory",
    "lock",
    "memory_peaks",
    "progress",
    "rank_reports",
]
