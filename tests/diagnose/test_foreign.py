"""What readers of other tools' recordings share."""

from __future__ import annotations

from plait.diagnose.foreign import axis_of


def test_axes_by_what_groups_are_called() -> None:
    labels = {
        "TENSOR_MODEL_PARALLEL_GROUP": "tp", "PIPELINE_MODEL_PARALLEL_GROUP": "pp", "DATA_PARALLEL_GROUP": "dp",
        "CONTEXT_PARALLEL_GROUP": "cp", "mesh_tp": "tp", "mesh_pp": "pp", "mesh_dp_replicate": "dp", "mesh_cp": "cp",
        "default_pg": "dp", "undefined": "other", "": "other",
    }  # fmt: skip
    assert {label: axis_of(label) for label in labels} == labels
