"""Model FLOPs utilisation (MFU), defined here for runs, plans, pages and benchmarks alike.

    MFU = the model's FLOPs in a step / (its seconds x its devices x the dense peak of a device)

The model's FLOPs are ``ModelSpec.causal_step_flops``: forward and backward once, with the causal
half of attention's scores; recomputation does not count. The dense peak is the device maker's
figure without sparsity, in the job's precision. Without a known peak there is no MFU.

A line of ``metrics.jsonl`` has ``mfu`` and ``device``, a table with the name and kind of rank 0's
device, ``peak_flops`` (null where it is unknown) and ``matmul_rate_share``. Earlier versions wrote
an ``mfu`` without ``device``: a share of the rate that matrix products reached on the spot, which
is no MFU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from plait.core.base.env import specs_folder
from plait.core.base.errors import JobError
from plait.core.cluster.hardware import Cluster, Device
from plait.core.model.precision import Precision
from plait.core.model.spec import ModelSpec


def mfu(
    model: ModelSpec, *, sequence: int, batch: int, seconds: float, devices: float, peak: float | None
) -> float | None:
    """Return the utilisation of a step of ``batch`` sequences of ``sequence`` tokens.

    peak: FLOP/s of one device: ``run.peak_flops``, or the result of ``dense_peak``. The result is
    None if the peak is unknown, or if the utilisation would exceed 1: then the peak is not the
    device's.
    """
    found = model.causal_step_flops(sequence, batch) / (seconds * devices * peak) if peak else None
    return found if found is not None and found <= 1 else None


def dense_peak(device: Device | None, precision: Precision, *, tf32: bool = False) -> float | None:
    """Return the peak FLOP/s of dense products in ``precision``; None if it is unknown.

    device: None if it is unknown. A CPU has no datasheet peak, and neither has a device with
    measured rates only. tf32: True if products of fp32 numbers are rounded to TF32.

    >>> h100 = Cluster.preset("h100").device
    >>> dense_peak(h100, "bf16-mixed"), dense_peak(h100, "fp8"), dense_peak(h100, "fp32", tf32=True)
    (989400000000000.0, 1978900000000000.0, 494700000000000.0)
    >>> dense_peak(Cluster.preset("lab").device, "fp32")
    """
    if device is None or device.kind == "cpu" or device.measured:
        return None
    found = device.tf32 if tf32 and precision == "fp32" else device.peak.get(precision)
    return found.value if found else None


def known_device(name: str, file: str | None = None) -> Device | None:
    """Return the device that a driver reports as ``name``, or None.

    file: a cluster's file, which is searched before the shipped clusters; a file that cannot be
    read is skipped.
    """
    files = sorted((specs_folder() / "clusters").glob("*.toml"))
    for one in ([Path(file)] if file else []) + files:
        with suppress(JobError):
            device = Cluster.read(one).device
            if name in (device.name, *device.driver_names):
                return device
    return None


# ---- in the metrics of a run ----

DEVICE = "device"
"""Name of the table on rank 0's device in a line of ``metrics.jsonl``."""


def device_of(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the table on rank 0's device in a line; empty if the line has none.

    >>> device_of({"step": 1, "device": {"name": "NVIDIA H200"}}), device_of({"step": 1, "mfu": 0.6})
    ({'name': 'NVIDIA H200'}, {})
    """
    found: Any = line.get(DEVICE)
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}


def mfu_of(line: Mapping[str, Any]) -> Any:
    """Return the MFU of a line; None if the line does not have the peak behind it.

    >>> mfu_of({"mfu": 0.44, "device": {"peak_flops": 989.4e12}}), mfu_of({"mfu": 0.59})
    (0.44, None)
    """
    return line.get("mfu") if device_of(line).get("peak_flops") else None


def on_gpu(metrics: Iterable[Mapping[str, Any]]) -> bool:
    """Return True if the last line with a kind of device is from a run on GPUs."""
    kinds = [kind for line in metrics if (kind := device_of(line).get("kind"))]
    return bool(kinds) and kinds[-1] == "cuda"
