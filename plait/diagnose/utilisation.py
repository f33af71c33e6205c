"""How much of a device a run's steps used: MFU, and the share of what matrix products alone reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from plait.core.base.numbers import is_number
from plait.core.cluster.mfu import device_of, mfu_of


class Utilisation(NamedTuple):
    """The median step on rank 0's device. mfu: None where no peak of it is known. peak_flops: of the device,
    in FLOP/s. matmul_rate_share: of the rate at which matrix products alone ran when the run began."""

    device: str
    mfu: float | None
    peak_flops: float | None
    matmul_rate_share: float | None

    @property
    def told(self) -> str:
        """One sentence."""
        share = self.matmul_rate_share
        if share is None:
            rate = ""
        elif share > 1:
            rate = "the device was busy when the rate of matrix products alone was measured"
        else:
            rate = f"{share:.0%} of the rate that matrix products alone reached when the run began"
        used = "" if self.mfu is None else f"MFU {self.mfu:.1%}"
        used += f", of {(self.peak_flops or 0) / 1e12:,.4g} TFLOP/s ({self.device})" if used else ""
        return "; ".join(filter(None, (used, rate if used or not rate else f"the model's FLOPs: {rate}"))) + "."


def utilisation_of(metrics: Sequence[Mapping[str, Any]], median: float) -> Utilisation | None:
    """Return that of a step of ``median`` seconds; None where no line tells.

    metrics: lines of metrics.jsonl of steps of one size.
    """
    lines = [line for line in metrics if device_of(line) and is_number(line.get("seconds"))]
    if not lines or median <= 0:
        return None

    def at_median(values: Sequence[Any]) -> float | None:
        """A share is inverse to the seconds of its step."""
        pairs = zip(values, lines, strict=True)
        known = [value * line["seconds"] for value, line in pairs if is_number(value)]
        return float(np.median(known)) / median if known else None

    device = device_of(lines[-1])
    return Utilisation(
        str(device.get("name", "")), at_median([mfu_of(line) for line in lines]), device.get("peak_flops"),
        at_median([device_of(line).get("matmul_rate_share") for line in lines]),
    )  # fmt: skip
