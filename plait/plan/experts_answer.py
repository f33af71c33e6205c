"""Prediction of one strategy of what segment lists do not have, as experts, quantised products and other
frameworks' runs: level 1 alone. Nothing is simulated, and no list walked for memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.points import Points
from plait.core.step.memory.closed_memory import step_memory, usable
from plait.core.step.memory.estimate import Memory, PlaceEstimate
from plait.core.step.memory.memory_options import MemoryOptions
from plait.core.step.seconds.closed_form import Seconds
from plait.plan.asking import margin_of
from plait.plan.memory_report import MemoryReport, PlaceMemory

AXES = {
    "compute": ("linear", "attention", "elementwise", "host", "head"),
    "tp": ("tp",),
    "cp": ("cp",),
    "ep": ("ep",),
    "dp": ("sharding", "sync"),
    "pp": ("transfers",),
    "optimizer": ("optimizer",),
    "idle": ("bubble", "straggler"),
    "beside": ("fixed",),
}
"""Parts of level 1 by what an answer calls them."""


def closed_parts(seconds: Seconds) -> dict[str, float]:
    """Of one point: seconds by axis, which add up to the step."""
    return {axis: float(sum(getattr(seconds, name)[0] for name in names)) for axis, names in AXES.items()}


def closed_report(
    model: ModelSpec, point: Mapping[str, int], cluster: Cluster, job: Job, options: MemoryOptions
) -> MemoryReport:
    """Of the fullest place: no other is known. options: of the runtime. What is sent is not counted."""
    found = step_memory(
        model, Points.of([point]), sequence=job.data.sequence_length, precision=job.train.precision,
        options=options, overhead=cluster.overhead,
    )  # fmt: skip

    def size(kind: str) -> int:
        whole = getattr(found, kind)[0]
        return int(whole) if np.isfinite(whole) else 1 << 62

    kinds = ("parameters", "gradients", "optimizer", "buffers", "activations")
    memory = Memory(**{kind: size(kind) for kind in kinds}, when="the fullest moment", alive=1)
    index, each = int(found.place[0]), point["dp"] * point["cp"] * point["tp"]
    place = PlaceEstimate(
        index=index, ranks=(index * each, (index + 1) * each - 1), dp=point["dp"], cp=point["cp"], tp=point["tp"],
        layers={index: -(-model.num_layers // point["pp"])}, share=point["micro"], memory=memory, sent={},
    )  # fmt: skip
    filled = PlaceMemory.of(place, size("overhead"), cluster.overhead, size("doubted"))
    return MemoryReport((filled,), int(usable(cluster.device, cluster.overhead)), margin_of(job, cluster))
