"""What the planner's forms say of the modules that a profile has measured (``ModuleTime``): a layer's segment
ops on a described cluster, added up as the profile adds up those that it recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from plait.core.cluster.hardware import Cluster
from plait.core.cluster.profile import ModuleTime, by_module
from plait.core.model.spec import Family, ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders.overlap import Load
from plait.core.step.seconds.costs import cluster_costs
from plait.core.step.seconds.segment_costs import SegmentCosts

Seconds = NDArray[np.float64]
Shape = tuple[tuple[str, Any], ...]


def module_seconds(cluster: Cluster, modules: Sequence[ModuleTime]) -> Seconds:
    """Of each."""
    blocks = {layer_of(one) for one in modules if one.site == "block"}
    said = {
        layer: by_module(_costs(cluster, dict(layer), parallel=layer in blocks).compute)
        for layer in dict.fromkeys(map(layer_of, modules))
    }
    return np.array([said[layer_of(one)][one.site, one.phase] for one in modules])


def layer_of(module: ModuleTime) -> Shape:
    """Equal for the modules of one layer."""
    return tuple(module.model_dump(exclude={"site", "phase", "seconds"}).items())


def _costs(cluster: Cluster, layer: dict[str, Any], *, parallel: bool) -> SegmentCosts:
    model = ModelSpec(
        family=cast("Family", layer["family"]), num_layers=1, hidden=layer["hidden"], num_heads=layer["heads"],
        num_kv_heads=layer["kv_heads"], ffn_hidden=layer["ffn"], vocab=layer["vocab"], max_sequence=layer["sequence"],
        parallel_block=parallel,
    )  # fmt: skip
    load = Load(layer["batch"], layer["sequence"])
    return cluster_costs(model, Strategy(tp=layer["tp"], overlap="sync"), load, cluster, precision=layer["precision"])
