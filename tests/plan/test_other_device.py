"""A profile of one device for a cluster of others, a format for another: said in a line, and only
then."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.core.cluster.hardware import Cluster
from plait.core.cluster.profile import Curve, Group, Machine, Point, Profile
from plait.core.job.spec import Job
from plait.plan.explain.job_cluster import describe_device_mismatch, describe_substitute


@pytest.mark.parametrize(
    ("measured", "preset", "warned"),
    [
        ("NVIDIA H100", "a100-80", True),
        ("NVIDIA H100 80GB HBM3", "h100", False),
        ("NVIDIA A100-SXM4-80GB", "a100-40", False),
        ("Tesla V100-SXM2-32GB", "v100", False),
        ("NVIDIA H200", "h100", True),
        ("", "h100", False),
    ],
)
def test_another_device_is_said(tmp_path: Path, measured: str, preset: str, warned: bool) -> None:
    file = tmp_path / "profile.json"
    inside = Curve(kind="send", group=Group(ranks=2, per_node=2, nodes=1), points=(Point(bytes=8, seconds=1e-6),))
    machine = Machine(device=measured, kind="cuda", memory=1 << 36, ranks=2, ranks_per_node=2, backend="nccl")
    Profile(machine=machine, date="2026-01-01", collectives=(inside,)).write(file)
    values = {"model": {"preset": "gpt3-125m"}, "cluster": {"preset": preset, "profile": str(file)}}
    told = describe_device_mismatch(Job.from_dict(values), Cluster.preset(preset))
    assert bool(told) == warned
    assert not warned or (measured in told and str(file) in told)


@pytest.mark.parametrize(
    ("preset", "precision", "told"),
    [
        ("v100", "bf16-mixed", "V100-SXM2-32GB has no bf16: train.precision=bf16-mixed is priced as fp16"),
        ("v100", "fp32", ""),
        ("a100-80", "bf16-mixed", ""),
    ],
)
def test_a_format_that_stands_for_another_is_said(preset: str, precision: str, told: str) -> None:
    job = Job.from_dict({"model": {"preset": "gpt3-125m"}, "train": {"precision": precision}})
    assert describe_substitute(job, Cluster.preset(preset)) == told
