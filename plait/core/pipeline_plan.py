"""A planned pipeline as data: the schedule with its transfers, the meshes, the layers of every stage, a
reshard plan for every boundary.

Planned once (``plait.plan.pipeline``), written to a file, obeyed by every rank: order and senders are never
decided at run time.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from plait.core.errors import JobError
from plait.core.files import replacing
from plait.core.layout import Mesh, SequenceCut, meshes
from plait.core.reshard_plan import ReshardPlan
from plait.core.schedule import Edge, Schedule, parse_schedule
from plait.core.sharding import Sharding
from plait.core.stages import Stage
from plait.core.strategy import slice_sizes

WHOLE_SEQUENCE = SequenceCut()


@dataclass(frozen=True)
class PipelinePlan:
    """degrees: (dp, tp) of every place, a place being what the schedule calls a rank. names: what crosses
    each edge of the schedule. reshards: by (source stage, target stage), both directions, the plan of each
    tensor, [S, B, H] of one micro-batch; none on one place. shardings: of every place, over its dp x cp;
    nothing is cut if empty. sequence: how every place's cp ranks share sequences."""

    schedule: Schedule
    degrees: tuple[tuple[int, int], ...]
    stages: tuple[Stage, ...]
    names: dict[Edge, tuple[str, ...]]
    reshards: dict[Edge, dict[str, ReshardPlan]]
    shardings: tuple[Sharding, ...] = ()
    sequence: SequenceCut = WHOLE_SEQUENCE

    def __post_init__(self) -> None:
        if len(self.degrees) != len(self.schedule.ranks) or len(self.stages) != self.schedule.num_stages:
            shape = f"{len(self.schedule.ranks)} places and {self.schedule.num_stages} stages"
            raise JobError(
                f"a schedule of {shape} with {len(self.degrees)} meshes and {len(self.stages)} ranges of layers"
            )
        for (dp, _), sharding in zip(self.degrees, self.shardings, strict=bool(self.shardings)):
            sharding.check(dp * self.sequence.cp)

    @cached_property
    def meshes(self) -> tuple[Mesh, ...]:
        """The ranks of every place."""
        return meshes(self.degrees, self.sequence.cp)

    @cached_property
    def hash(self) -> str:
        """sha256 over the content, 64 hex digits."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def place_of(self, rank: int) -> int:
        """The place that a rank belongs to."""
        return next(place for place, mesh in enumerate(self.meshes) if rank in mesh.ranks)

    def rows_of(self, rank: int, batch: int) -> slice:
        """Which sequences of a micro-batch of ``batch`` a rank computes: its data-parallel share."""
        mesh = self.meshes[self.place_of(rank)]
        sizes, at = slice_sizes(batch, mesh.dp), mesh.coordinates(rank)["dp"]
        return slice(sum(sizes[:at]), sum(sizes[: at + 1]))

    def write(self, path: Path) -> None:
        """Write atomically."""
        with replacing(path) as partial:
            partial.write_text(json.dumps(self.to_dict()) + "\n")

    @staticmethod
    def read(path: Path) -> PipelinePlan:
        """Raises JobError for a file that is no pipeline plan."""
        try:
            return PipelinePlan.from_dict(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise JobError(f"cannot be read as a pipeline plan: {error}", file=str(path)) from None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; ``from_dict`` reads them back."""
        return {
            "schedule": str(self.schedule),
            "degrees": [list(pair) for pair in self.degrees],
            "layers": [stage.num_layers for stage in self.stages],
            "names": {f"{a}>{b}": list(names) for (a, b), names in sorted(self.names.items())},
            "reshards": {
                f"{a}>{b}": {name: plan.to_dict() for name, plan in plans.items()}
                for (a, b), plans in sorted(self.reshards.items())
            },
            "shardings": [asdict(sharding) for sharding in self.shardings],
            "sequence": asdict(self.sequence),
        }

    @staticmethod
    def from_dict(values: dict[str, Any]) -> PipelinePlan:
        """A plan from plain values. Raises ScheduleError, ReshardError or JobError for what is none."""
        layers = [int(number) for number in values["layers"]]
        stages = tuple(Stage(i, len(layers), sum(layers[:i]), size) for i, size in enumerate(layers))
        names = {_edge(key): tuple(map(str, given)) for key, given in values["names"].items()}
        reshards = {
            _edge(key): {name: ReshardPlan.from_dict(plan) for name, plan in plans.items()}
            for key, plans in values["reshards"].items()
        }
        degrees = tuple((int(dp), int(tp)) for dp, tp in values["degrees"])
        shardings = tuple(
            Sharding(**{key: int(value) for key, value in given.items()}) for given in values["shardings"]
        )
        return PipelinePlan(
            parse_schedule(values["schedule"]),
            degrees,
            stages,
            names,
            reshards,
            shardings,
            SequenceCut(**values["sequence"]),
        )


def _edge(text: str) -> Edge:
    a, _, b = text.partition(">")
    return int(a), int(b)
