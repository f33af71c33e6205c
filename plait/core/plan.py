"""Plan: everything a run obeys, complete, in one versioned JSON file with a content hash.

The hash is stamped on checkpoints and timelines. The runtime never amends a plan: where it cannot do what the
plan says, it stops.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from plait.core.errors import JobError
from plait.core.files import replacing
from plait.core.layout import Layout
from plait.core.model import ModelSpec
from plait.core.segment_costs import SegmentCosts
from plait.core.strategy import Strategy

VERSION = 2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """job: as in ``Job.to_dict``. layout: None where the meshes of a pipeline differ. pipeline: as in
    ``PipelinePlan.to_dict``.

    costs: what the order of segment ops is derived from, the same on every rank.
    """

    job: dict[str, Any]
    job_fingerprint: str
    model: ModelSpec
    strategy: Strategy
    layout: Layout | None
    costs: SegmentCosts | None = None
    pipeline: dict[str, Any] | None = None
    notes: dict[str, str] = field(default_factory=dict[str, str])
    """For people: how slices were chosen, on what device; not part of the hash."""

    @property
    def hash(self) -> str:
        """sha256 over the content, 64 hex digits."""
        return hashlib.sha256(json.dumps(self._content(), sort_keys=True).encode()).hexdigest()

    def write(self, path: Path) -> None:
        """Write atomically: a reader sees the old plan or the new one."""
        with replacing(path) as partial:
            partial.write_text(
                json.dumps({"version": VERSION, "hash": self.hash, **self._content(), "notes": self.notes}, indent=2)
                + "\n"
            )

    @staticmethod
    def read(path: Path) -> Plan:
        """Raises JobError for a file that is no plan, of another version, or edited by hand."""
        try:
            parsed = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise JobError(f"cannot be read as a plan: {error}", file=str(path)) from None
        values = cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else {}
        if values.get("version") != VERSION:
            problem = f"{values.get('version')!r} is not a plan version this Plait reads"
            raise JobError(problem, file=str(path), key="version", fix=f"It reads version {VERSION}")
        try:
            plan = _from_values(values)
        except (KeyError, TypeError, AttributeError, AssertionError) as error:
            raise JobError(f"is not a complete plan: {error}", file=str(path)) from None
        except JobError as error:
            raise error.in_file(str(path)) from None
        if values.get("hash") != plan.hash:
            problem = "does not match the content: the plan was edited or damaged"
            raise JobError(problem, file=str(path), key="hash", fix="Change the job file instead and plan again")
        return plan

    @staticmethod
    def of_job(path: Path, job_fingerprint: str) -> Plan:
        """The plan that an earlier start of this job has left. Raises JobError as ``read`` does, and for
        another job's."""
        plan = Plan.read(path)
        if plan.job_fingerprint != job_fingerprint:
            raise JobError(
                "holds a run of another job (model, data or training settings differ)",
                file=str(path.parent),
                fix="Give this run another name with run.name=NAME, or remove the folder",
            )
        return plan

    def _content(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "job_fingerprint": self.job_fingerprint,
            "model": self.model.to_dict(),
            "strategy": self.strategy.to_dict(),
            "layout": asdict(self.layout) if self.layout else None,
            "costs": asdict(self.costs) if self.costs else None,
            "pipeline": self.pipeline,
        }


def _from_values(values: dict[str, Any]) -> Plan:
    costs = values["costs"]
    return Plan(
        job=values["job"],
        job_fingerprint=values["job_fingerprint"],
        model=ModelSpec.from_dict(values["model"]),
        strategy=Strategy.from_dict(values["strategy"]),
        layout=Layout(**values["layout"]) if values["layout"] else None,
        costs=SegmentCosts(**costs) if costs else None,
        pipeline=values["pipeline"],
        notes=values.get("notes", {}),
    )
