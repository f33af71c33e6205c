"""What is named as bad on hosts, and what is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.launch.self_check import EVERY_PAIR, rounds
from plait.launch.self_check_verdict import Limits, findings
from tests.faults.runs import ROOT

TIER = "unit"

DEFAULT = Limits()


@given(st.integers(1, 70))
def test_no_host_is_in_two_pairs_of_a_round(hosts: int) -> None:
    found = rounds(hosts)
    for one in found:
        busy = [host for pair in one for host in pair]
        assert len(busy) == len(set(busy))
    pairs = [pair for one in found for pair in one]
    assert len(pairs) == len(set(pairs))
    if hosts <= EVERY_PAIR:
        assert len(pairs) == hosts * (hosts - 1) // 2
    assert {host for pair in pairs for host in pair} == (set(range(hosts)) if hosts > 1 else set())


def report(hosts: int = 4, **changes: Any) -> dict[str, Any]:
    names = [f"n{number}" for number in range(hosts)]
    good = {"loopback": 5e9, "clock": [0.001, 0.0005], "disk": {"free": 1 << 40, "rate": 3e8}}
    links = [
        {"from": a, "to": b, "kind": "neighbours" if (i - j) % hosts in (1, hosts - 1) else "across", "rate": 1e9}
        for i, a in enumerate(names) for j, b in enumerate(names) if a != b
    ]  # fmt: skip
    told = {"hosts": {name: dict(good) for name in names}, "missing": [], "links": links,
            "all_at_once": dict.fromkeys(names, 9e8)}  # fmt: skip
    return told | changes


def named(told: dict[str, Any], limits: Limits = DEFAULT) -> list[tuple[str, tuple[str, ...]]]:
    return [(one.what, one.hosts) for one in findings(told, limits)]


def test_nothing_is_wrong() -> None:
    assert named(report()) == []
    assert named(report(1, all_at_once={})) == []


def test_what_is_slower_than_its_kind_is_named() -> None:
    told = report()
    told["links"][0]["rate"] = 2e8
    told["hosts"]["n2"]["loopback"] = 1e9
    told["all_at_once"]["n3"] = 1e8
    assert named(told) == [("loopback", ("n2",)), ("link", ("n0", "n1")), ("all at once", ("n3",))]
    told["links"][0]["rate"] = 4e8  # not yet a quarter
    assert ("link", ("n0", "n1")) not in named(told)
    assert ("link", ("n0", "n1")) in named(told, Limits(rate=5e8))


def test_a_host_all_of_whose_links_are_slow_is_named_and_not_those_whom_it_reaches() -> None:
    told = report()
    for link in told["links"]:
        if "n2" in (link["from"], link["to"]):
            link["rate"] = 5e7
    assert named(told) == [("link", ("n2",))]


@pytest.mark.parametrize(
    ("host", "what", "says"),
    [
        ({"clock": [-2.5, 0.1]}, "clock", "2.50 s behind"), ({"clock": None}, "clock", "could not be read"),
        ({"disk": {"error": "/x: Read-only file system"}}, "disk", "Read-only"),
        ({"disk": {"free": 1000, "rate": 1e9}}, "disk", "0.00 GiB free"),
        ({"disk": {"free": 1 << 40, "rate": 1e6}}, "disk", "writes 1 MB/s"), ({"disk": None}, "disk", "said nothing"),
        ({"loopback": None}, "loopback", "no answer"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_host_is_said(host: dict[str, Any], what: str, says: str) -> None:
    told = report()
    told["hosts"]["n1"] |= host
    (found,) = findings(told, Limits())
    assert (found.what, found.hosts) == (what, ("n1",))
    assert says in found.why


def test_a_clock_within_its_error_is_fine() -> None:
    told = report()
    told["hosts"]["n1"]["clock"] = [1.2, 0.3]
    assert named(told) == []


def test_missing_hosts_and_broken_links_are_named() -> None:
    told = report(missing=[4])
    told["links"][0] = {"from": "n0", "to": "n1", "kind": "neighbours", "error": "timed out"}
    found = findings(told, Limits(), [f"n{number}" for number in range(5)])
    assert [(one.what, one.hosts) for one in found] == [("missing", ("n4",)), ("link", ("n0", "n1"))]


def check(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "plait.cli.main", "check", *words], cwd=folder, capture_output=True, text=True,
        timeout=120, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.system
def test_this_machine(tmp_path: Path) -> None:
    done = check(tmp_path, "--json", "--disk", "0.001", "--size", "1")
    told = json.loads(done.stdout)
    assert done.returncode == (1 if told["bad"] else 0), done.stderr
    (host,) = told["hosts"].values()
    assert host["loopback"] > 0
    assert host["disk"]["rate"] > 0
    assert told["links"] == []
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.system
def test_a_disk_that_is_too_slow_ends_with_status_one(tmp_path: Path) -> None:
    done = check(tmp_path, "--disk", "999999999", "--size", "1")
    assert done.returncode == 1, done.stderr
    assert "BAD disk" in done.stdout
