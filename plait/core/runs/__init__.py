"""What lies in a run's folder, and what those who take part in a run say to each other."""

# pyright: reportUnsupportedDunderAll=false

__all__ = [
    "attempts",
    "channel",
    "epoch",
    "evidence",
    "history",
    "host_memory",
    "lock",
    "memory_peaks",
    "missing",
    "parts",
    "progress",
    "ring_calls",
]
