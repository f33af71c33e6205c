"""Nodes before ranks are started on them: what is seen of them, who is named, what is only said."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from plait.core.base.errors import LaunchError
from plait.launch.health import nodes
from plait.launch.health.nodes import (
    SPARE_FILES,
    UNKNOWN,
    NodeReport,
    judge,
    look,
    make_room,
    nearly_full,
    raise_limits,
    visible_gpus,
)
from plait.launch.local.local import local_start, run_ranks
from tests.support.ports import own_port

TIER = "unit"


@pytest.fixture
def good(monkeypatch: pytest.MonkeyPatch) -> NodeReport:
    one = NodeReport(asked=8, gpus=8, shared=100 << 30, clock=1000.0, plait="1.0", torch="2.9")
    monkeypatch.setattr(nodes, "look", lambda: one)
    return one


def test_this_machine_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_GPUS", "")
    monkeypatch.delenv("PLAIT_GPUS")
    one = look()
    assert one.plait and one.torch and one.shared > 0 and one.clock > 1e9
    assert (one.asked, one.gpus) == (0, UNKNOWN)  # nobody asked, so that nobody looks


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"gpus": 7}, "only 7 of 8 requested GPUs are visible (nvidia-smi -L)"),
        ({"gpus": 0}, "only 0 of 8 requested GPUs are visible (nvidia-smi -L)"),
        ({"gpus": UNKNOWN}, ""),  # as on AMD's
        ({"asked": 0, "gpus": UNKNOWN}, ""),
        ({"torch": "2.8"}, "it has Plait 1.0 and PyTorch 2.8, and the launcher 1.0 and 2.9"),
        ({"plait": "0.9", "torch": ""}, "it has Plait 0.9 and PyTorch none, and the launcher 1.0 and 2.9"),
        ({"plait": ""}, ""),  # it says nothing
    ],
)
def test_a_node_that_cannot_run_ranks_is_named(good: NodeReport, other: dict[str, object], why: str) -> None:
    found = judge({"n1": good, "n2": replace(good, **other)}, {"n1": 1000.0, "n2": 1000.0})  # type: ignore[arg-type]
    assert found.unfit == ({"n2": why} if why else {})
    assert not found.remarks


@pytest.mark.parametrize(
    ("other", "remark"),
    [
        ({"clock": 1100.0}, "the clock of n2 is 100 s ahead"),
        ({"clock": 900.0}, "the clock of n2 is 100 s behind"),
        ({"shared": 64 << 20}, "/dev/shm of n2 has 64 MiB free; NCCL wants 1 GiB"),
        ({"locked": 64 << 10}, "n2 lets processes lock 64 KiB (ulimit -Hl), too little for RDMA"),
        ({"locked": UNKNOWN}, ""),  # there is no limit
        ({"locked": 64 << 10, "shared": 0, "asked": 0}, ""),  # ranks without GPUs need neither
    ],
)
def test_what_may_be_slow_or_fail_later_is_said(good: NodeReport, other: dict[str, object], remark: str) -> None:
    found = judge({"n1": good, "n2": replace(good, **other)}, {"n1": 1000.0, "n2": 1000.0})  # type: ignore[arg-type]
    assert found.remarks == ((remark,) if remark else ()) and not found.unfit


def test_ranks_in_a_container_have_its_pytorch_and_not_the_launchers(good: NodeReport) -> None:
    inside = replace(good, torch="2.9+cu128")
    came: dict[str, float] = dict.fromkeys(("n1", "n2", "n3"), 1000.0)
    assert not judge({"n1": inside, "n2": inside}, came).unfit
    found = judge({"n1": inside, "n2": good, "n3": inside}, came)
    assert found.unfit == {"n2": "it has Plait 1.0 and PyTorch 2.9, and others 1.0 and 2.9+cu128"}


@pytest.mark.parametrize(
    ("script", "seen"),
    [
        ("echo 'GPU 0: NVIDIA H100 (UUID: GPU-x)'; echo 'GPU 1: NVIDIA H100 (UUID: GPU-y)'", 2),
        ("echo 'GPU 0: A100'; echo '  MIG 1g.10gb Device 0: (UUID: MIG-x)'", 1),
        ("printf 'GPU 0: A100\\n  MIG 1g Device 0: (x)\\n  MIG 1g Device 1: (y)\\nGPU 1: A100\\n'", 3),
        ("echo 'NVIDIA-SMI has failed'; exit 9", 0),
        (None, UNKNOWN),
    ],
)
@pytest.mark.system
def test_gpus_are_those_that_the_driver_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, seen: int
) -> None:
    if script:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    if script:
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert visible_gpus(str(tmp_path)) == seen


def test_limits_are_raised_as_far_as_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to = dict[int, tuple[int, int]]()
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (10, 20))

    def refuse_one(limit: int, values: tuple[int, int]) -> None:
        if limit == resource.RLIMIT_NPROC:
            raise ValueError("not allowed")
        set_to[limit] = values

    monkeypatch.setattr(resource, "setrlimit", refuse_one)
    raise_limits()
    assert set_to == {resource.RLIMIT_NOFILE: (20, 20), resource.RLIMIT_MEMLOCK: (20, 20)}


def test_a_disk_that_is_nearly_full_is_said(tmp_path: Path) -> None:
    assert nearly_full(tmp_path, needed=0) == "" == nearly_full(tmp_path / "none")
    assert nearly_full(tmp_path, needed=1 << 62).startswith(f"the disk of {tmp_path} has ")


# ---- open files ----

ENDS = [sys.executable, "-I", "-S", "-c", ""]


@pytest.fixture
def limit() -> Iterator[int]:
    """Few more than are open now; the limit that was there comes back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    yield few
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.system
def test_more_ranks_than_the_soft_limit_has_files_for_are_run(limit: int, tmp_path: Path) -> None:
    assert run_ranks(local_start(ENDS, 12, own_port()), 12, tmp_path / "logs", timeout=60) == 0
    assert len(list((tmp_path / "logs").glob("rank-*.log"))) == 12
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > limit


def test_above_the_hard_limit_is_one_paragraph_and_nothing_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (128, 256))
    with pytest.raises(
        LaunchError, match=r"^500 ranks take this process 1\d\d\d open files, .* allows it 256 \(ulimit"
    ):
        run_ranks(local_start(ENDS, 500, own_port()), 500, tmp_path / "logs", timeout=60)
    assert not (tmp_path / "logs").exists()


FILES = 100 + 3 + SPARE_FILES


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (64, 4096, [(FILES, 4096)]),
        (FILES, 4096, []),  # there is room
        (64, FILES, [(FILES, FILES)]),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, []),
        (64, resource.RLIM_INFINITY, [(FILES, resource.RLIM_INFINITY)]),
    ],
)
def test_the_limit_is_raised_by_what_is_needed_beside_what_is_open(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: list[tuple[int, int]]
) -> None:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: found.append(limits))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(os, "listdir", lambda path: ["0", "1", "2"])
    make_room(100, "Ranks")
    assert found == raised


def test_where_the_system_does_not_say_what_is_open_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(path: str) -> list[str]:
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr(os, "listdir", listed)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 99 + SPARE_FILES))
    match = rf"Ranks take this process {100 + SPARE_FILES} open files.*it {99 + SPARE_FILES} \("
    with pytest.raises(LaunchError, match=match):
        make_room(100, "Ranks")
