"""What ranks record while they run: rings, spans, sums, clocks."""

# pyright: reportUnsupportedDunderAll=false

__all__ = [
    "clocks",
    "columns",
    "exposure",
    "records",
    "ring",
    "ring_follower",
    "ring_hosts",
    "ring_progress",
    "ring_writer",
    "rollup",
    "timeline",
]
