"""Constants of a cluster, refitted to runs that were recorded on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.base.text import Column, Part, Shown, Table

if TYPE_CHECKING:
    from plait.plan.recorded import Recorded, Refitted


@dataclass(frozen=True)
class Calibration(Shown):
    """A cluster whose constants were refitted. file: where it is written."""

    runs: Sequence[Recorded]
    refitted: Refitted
    file: Path

    def to_dict(self) -> dict[str, Any]:
        """Seconds of a step of every run, predicted before and after, and constants that moved."""
        header = (Column("run"), Column("measured"), Column("before"), Column("after"))
        rows = [(run.folder, run.seconds, before, after) for run, before, after in self._seconds()]
        moved = dict(self.refitted.moved)
        return {"cluster": str(self.file), "runs": Table("", header, rows).records(), "moved": moved}

    def parts(self) -> Iterator[Part]:
        """Predicted seconds of a step against measured ones, and constants that moved."""
        off = Column("", "+.1%")
        header = ("run", Column("measured", ".4g"), Column("predicted before", ".4g"), off, Column("after", ".4g"), off)
        rows = [
            (run.folder, run.seconds, before, before / run.seconds - 1, after, after / run.seconds - 1)
            for run, before, after in self._seconds()
        ]
        yield Table("Seconds of a step", header, rows)
        moved = [(name, *values) for name, values in self.refitted.moved.items()]
        yield Table("Constants that moved", ("constant", Column("was", ".4g"), Column("is", ".4g")), moved)
        yield f"The cluster is in {self.file}; plans use it with cluster.file={self.file}."

    def _seconds(self) -> Iterator[tuple[Recorded, float, float]]:
        found = self.refitted
        return zip(self.runs, found.before.tolist(), found.after.tolist(), strict=True)


def calibrate_cluster(runs: Sequence[Path], out: Path, cluster: str | None = None) -> Calibration:
    """Refit the constants of a cluster to recorded runs, and write it to ``out`` (TOML).

    cluster: a preset or a file to begin with; None: the first run's. Raises JobError, DataError, LaunchError.
    """
    from datetime import UTC, datetime

    from plait.core.base.codec.toml_text import to_toml
    from plait.core.base.files import check_target, explained, replacing
    from plait.core.cluster.hardware import Cluster
    from plait.plan.recorded import Recorded, refit
    from plait.plan.where import find_cluster

    fix = "Choose another with --out"
    check_target(out, fix=fix)
    recorded = [Recorded.read(folder) for folder in runs]
    if cluster is None:
        first = recorded[0].plan.job
        assert first is not None
        begin = find_cluster(first)
    else:
        begin = Cluster.read(Path(cluster)) if Path(cluster).is_file() else Cluster.preset(cluster)
    found = refit(begin, recorded, date=datetime.now(UTC).date().isoformat())
    with explained(f"{out} cannot be written", fix=fix), replacing(out) as partial:
        partial.write_text(to_toml(found.cluster.model_dump(mode="json", exclude_none=True)))
    return Calibration(recorded, found, out)
