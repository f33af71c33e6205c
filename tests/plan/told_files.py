"""Configurations of other frameworks, written to files and read."""

from __future__ import annotations

from pathlib import Path

from plait.core.cluster.hardware import Cluster
from plait.formats.base.parsed_config import ParsedConfig
from plait.plan.answer import Planner
from plait.plan.read_config import read_configuration


def told(folder: Path, name: str, text: str) -> ParsedConfig:
    file = folder / name.partition(":")[0]
    file.write_text(text)
    found = read_configuration(folder / name)
    assert found
    return found


def point(one: ParsedConfig, *more: str) -> dict[str, int]:
    """As the framework runs it, on H100."""
    job = one.job(["cluster.preset=h100", *more])
    planner = Planner(job, Cluster.preset("h100"), job.model_spec(1).vocab, configured_framework=one.runs)
    return dict(planner.predict(job).point)
