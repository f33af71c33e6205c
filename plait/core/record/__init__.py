"""Recordings of running ranks: ring buffers, timelines of spans, roll-ups and clocks."""

# pyright: reportUnsupportedDunderAll=false

__all__ = [
    "clocks",
    "columns",
    "exposure",
    "records",
    "ring",
    "ring_follower",
    "ring_progress",
    "ring_writer",
    "rollup",
    "timeline",
]
