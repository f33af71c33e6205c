"""Groups of jobs: those of one number of GPUs, of one cluster, of both; and their mean durations.

A group's mean is shrunk towards that of the group around it, by so many jobs as it would take to believe it:
most groups have few. Of the last ended jobs (``features``) the same, towards the mean of all time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait.place.conformal import Labels
from plait.place.features import WINDOW, Features

Floats = NDArray[np.float64]
SHRINK = 20.0
"""Jobs that the mean around a group counts as."""


def labels_of(known: Features, categories: Mapping[str, tuple[str, ...]]) -> Labels:
    """Of every job, by the kinds of its running statistics, the general one first. "": no cluster."""
    gpus = [f"{count:g}" for count in (known.column("gpus").tolist() if "gpus" in known.names else ())]
    gpus = gpus or [""] * len(known.matrix)
    labels = {"all": [""] * len(gpus), "all_gpus": gpus}
    if "group" in known.names:
        names = categories["group"]
        own = ["" if np.isnan(code) else names[int(code)] for code in known.column("group").tolist()]
        labels |= {"group": own, "group_gpus": [f"{name} {count}" for name, count in zip(own, gpus, strict=True)]}
    return labels


@dataclass(frozen=True, kw_only=True)
class GroupMeans:
    """Mean log seconds by kind and group."""

    means: Mapping[str, Mapping[str, float]]

    @classmethod
    def fit(cls, labels: Labels, logs: Floats) -> GroupMeans:
        """Of ended jobs."""
        around, found = np.full(len(logs), float(logs.mean())), dict[str, dict[str, float]]()
        for kind in _chain(labels):
            groups, where = np.unique(np.asarray(labels[kind], str), return_inverse=True)
            moved = np.bincount(where, logs - around) / (np.bincount(where) + (SHRINK if found else 0.0))
            around = around + moved[where]
            means = np.bincount(where, around) / np.bincount(where)
            found[kind] = dict(zip(groups.tolist(), means.tolist(), strict=True))
        return cls(means=found)

    def predict(self, labels: Labels, known: Features) -> Floats:
        """Half by the mean of all time, half by that of the last ended jobs."""
        found = np.array([self._of(labels, job) for job in range(len(known.matrix))], float)
        kind = _chain(labels)[-1]
        if f"{kind}:mean" not in known.names:
            return found
        count = np.minimum(known.column(f"{kind}:count"), WINDOW)
        recent = np.where(count > 0, known.column(f"{kind}:mean"), found)
        return (found + (count * recent + SHRINK * found) / (count + SHRINK)) / 2

    def _of(self, labels: Labels, job: int) -> float:
        """Of the most particular group that is known."""
        for kind in reversed(_chain(labels)):
            if (mean := self.means.get(kind, {}).get(labels[kind][job])) is not None:
                return mean
        return self.means["all"][""]


def _chain(labels: Labels) -> tuple[str, ...]:
    """Each group is in the one before it."""
    return ("all", "group", "group_gpus") if "group" in labels else ("all", "all_gpus")
