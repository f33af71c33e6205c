"""Alibaba's openb (Weng et al., ATC'23; clusterdata, cluster-trace-gpu-v2023): pods that share GPUs.

Pods that never were scheduled never ran; pods deleted at the very end of the trace ran on after it. Both are
left out and counted. Best-effort pods (``BE``) may be preempted.

===========  =====================================================================================
known        the columns of ``COLUMNS``, gpu_spec; ``num_gpu`` counts GPUs, ``gpu_milli`` the share
             of one that a pod asks for
passed over  pods that never started or are still there at the end, by reason; other columns
refused      nothing more than ``read`` refuses
===========  =====================================================================================
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from plait.place.traces.table import Trace, build
from plait.place.traces.times import pandas, seconds

COLUMNS = frozenset(("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "qos", "creation_time", "deletion_time",
                     "scheduled_time"))  # fmt: skip


def read(frame: Any, path: Path) -> Trace:
    """The pods of a table of this form. Their quality of service stands for a group."""
    ended = seconds(frame["deletion_time"]).values
    asked, milli = (pandas().to_numeric(frame[name], errors="coerce") for name in ("num_gpu", "gpu_milli"))
    over = ended == np.nanmax(ended) if np.isfinite(ended).any() else np.zeros(len(frame), bool)
    return build(
        frame,
        name=path.name,
        schema="alibaba-openb",
        submit="creation_time",
        start="scheduled_time",
        end="deletion_time",
        gpus=asked.where((asked != 1) | (milli <= 0) | (milli >= 1000), milli / 1000),
        id="name",
        numbers={"cpus": "cpu_milli", "memory": "memory_mib", "gpu_share": "gpu_milli"},
        categories={"group": "qos", "type": "gpu_spec"},
        preemptible=(frame["qos"] == "BE").to_numpy(),
        never={"never started": frame["scheduled_time"].isna(), "still there at the end": over},
    )
