"""Profiles: the file, and what is wrong with wrong ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import JobError
from plait.core.cluster.profile import Curve, Group, Machine, Point, Product, Profile, by_module, joined, wire_share

PAIR = Group(ranks=2, per_node=2, nodes=1)
MACHINE = Machine(device="X1", kind="cuda", memory=80 << 30, ranks=2, ranks_per_node=2, backend="nccl")


def curve(*seconds: float, kind: str = "all_reduce", group: Group = PAIR) -> Curve:
    points = tuple(Point(bytes=4 << 10 * at, seconds=each, spread=0.1) for at, each in enumerate(seconds))
    return Curve.model_validate({"kind": kind, "group": group, "points": points})


def profile(*curves: Curve, date: str = "2026-01-02") -> Profile:
    product = Product(m=8, k=16, n=32, precision="fp32", seconds=1e-3)
    return Profile(machine=MACHINE, date=date, versions={"torch": "2"}, collectives=curves, products=(product,))


@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=4), st.sampled_from(["all_gather", "send"]))
def test_what_is_written_is_read(seconds: list[float], kind: str) -> None:
    written = profile(curve(*seconds, kind=kind))
    assert Profile.from_json(written.to_json(), "p.json") == written


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.json"
    profile(curve(1e-3, 2e-3)).write(path)
    assert Profile.read(path) == profile(curve(1e-3, 2e-3))


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    values = json.loads(profile(curve(1e-3, 2e-3), curve(1e-3, kind="send")).to_json())
    change(values)
    return json.dumps(values)


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str, str]] = {
    "missing": (
        lambda v: v["collectives"][1]["points"][0].pop("seconds"),
        "collectives[1].points[0].seconds",
        "missing",
    ),
    "no machine": (lambda v: v.pop("machine"), "machine", "is missing"),
    "negative": (
        lambda v: v["collectives"][0]["points"][1].update(seconds=-1.0),
        "points[1].seconds",
        "at least 1e-12",
    ),
    "zero": (lambda v: v["products"][0].update(seconds=0), "products[0].seconds", "at least 1e-12"),
    "nan": (
        lambda v: v["collectives"][0]["points"][0].update(seconds=float("nan")),
        "",
        "NaN is no number of JSON",
    ),
    "infinite": (lambda v: v["products"][0].update(seconds=float("inf")), "", "Infinity is no number of JSON"),
    "text": (lambda v: v["products"][0].update(m="8"), "products[0].m", "a whole number"),
    "a kind": (lambda v: v["collectives"][0].update(kind="gossip"), "collectives[0].kind", '"all_reduce"'),
    "unknown": (lambda v: v["machine"].update(colour="red"), "machine.colour", "unknown key"),
    "no points": (lambda v: v["collectives"][0].update(points=[]), "collectives[0].points", "not allowed"),
    "order": (lambda v: v["collectives"][0]["points"].reverse(), "collectives[0].points.bytes", "do not grow"),
    "nowhere": (lambda v: v["collectives"][0]["group"].update(nodes=3), "collectives[0].group", "must lie between"),
    "version": (lambda v: v.update(version=2), "version", "reads version 1"),
    "no version": (lambda v: v.pop("version"), "version", "None"),
    "edited": (lambda v: v["products"][0].update(seconds=2e-3), "hash", "edited or damaged"),
    "date": (lambda v: v.update(date="yesterday"), "date", "not allowed"),
}


@pytest.mark.parametrize(("change", "key", "says"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_one_clear_error(change: Callable[[dict[str, Any]], object], key: str, says: str) -> None:
    with pytest.raises(JobError) as caught:
        Profile.from_json(changed(change), "p.json")
    assert caught.value.file == "p.json"
    assert (caught.value.key or "").endswith(key)
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["", "[1, 2]", "null", '{"version": 1, "machine": {"ki', "\x00"])
def test_what_is_no_profile(text: str) -> None:
    with pytest.raises(JobError, match=r"p\.json") as caught:
        Profile.from_json(text, "p.json")
    assert "plait measure machine" in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfd")
    for name in ("absent", "binary"):
        with pytest.raises(JobError, match="cannot be read as a profile"):
            Profile.read(tmp_path / name)


def test_the_later_of_two_counts() -> None:
    old, new = profile(curve(1e-3), curve(5e-3, kind="send")), profile(curve(2e-3), date="2026-02-03")
    found = joined([old, new.model_copy(update={"products": ()})])
    assert {one.kind: one.latency for one in found.collectives} == {"all_reduce": 2e-3, "send": 5e-3}
    assert found.products == old.products
    assert found.date == "2026-02-03"


def test_profiles_of_different_devices_are_not_joined() -> None:
    other = profile().model_copy(update={"machine": MACHINE.model_copy(update={"kind": "cpu"})})
    with pytest.raises(JobError, match="devices cannot be joined"):
        joined([profile(), other])


@given(st.integers(1, 8), st.integers(1, 4), st.integers(2, 8), st.integers(1, 8))
def test_a_group_knows_where_its_ranks_are(per_node: int, minipod: int, ranks: int, stride: int) -> None:
    members = range(0, ranks * stride, stride)
    group = Group.of(members, per_node, nodes_per_minipod=minipod)
    assert group.nodes == len({rank // per_node for rank in members})
    assert group.minipods == len({rank // (per_node * minipod) for rank in members})
    assert group.nodes <= group.ranks <= group.nodes * group.per_node


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
@given(ranks=st.integers(2, 64))
def test_bytes_of_a_ring(kind: Any, ranks: int) -> None:
    """Each rank passes one of n pieces on, n - 1 times; twice for an all-reduce."""
    assert wire_share(kind, ranks) * ranks == pytest.approx((ranks - 1) * (2 if kind == "all_reduce" else 1))


@pytest.mark.parametrize(
    ("kind", "ranks", "share"),
    [("all_to_all", 2, 1 / 4), ("all_to_all", 4, 3 / 16), ("broadcast", 4, 1.0), ("send", 2, 1.0)],
)
def test_bytes_of_what_is_no_ring(kind: Any, ranks: int, share: float) -> None:
    assert wire_share(kind, ranks) == share


@pytest.mark.parametrize(
    ("group", "told"),
    [
        (PAIR, "2 ranks, in a node"),
        (Group(ranks=2, per_node=1, nodes=2), "2 ranks, one on each of 2 nodes"),
        (Group(ranks=4, per_node=2, nodes=2), "4 ranks, on 2 nodes"),
        (Group(ranks=4, per_node=2, nodes=2, minipods=2), "4 ranks, on 2 nodes of 2 minipods"),
    ],
)
def test_a_group_in_words(group: Group, told: str) -> None:
    assert str(group) == told


def test_what_measured_sizes_say_of_links_and_processors() -> None:
    found = curve(1e-3, 4e-3, group=Group(ranks=4, per_node=4, nodes=1))
    assert found.latency == 1e-3
    assert found.bandwidth == 4096 * 1.5 / 4e-3  # of four ranks each moves half as much again
    assert Product(m=2, k=3, n=5, precision="fp32", seconds=0.5).rate == 120.0


def test_seconds_of_ops_are_those_of_modules() -> None:
    costs = {"attn.F": 1.0, "attn.R": 0.5, "attn.L": 0.25, "attn.D": 2.0, "attn.C": 1.0, "attn.W": 3.0, "mlp.F": 7.0,
             "attn.N": 0.5, "mlp.N": 1.5, "mlp.J": 4.0, "head.N": 99.0, "other.F": 99.0, "mlp.Q": 99.0}  # fmt: skip
    assert by_module(costs) == {
        ("attn", "forward"): 1.75, ("attn", "input gradient"): 3.0, ("attn", "weight gradient"): 3.0,
        ("mlp", "forward"): 7.0, ("norm", "forward"): 1.0, ("norm", "input gradient"): 4.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("group", "fits"),
    [({"ranks": 4, "per_node": 2, "nodes": 2}, True), ({"ranks": 2, "per_node": 2, "nodes": 2}, True),
     ({"ranks": 3, "per_node": 2, "nodes": 2}, True), ({"ranks": 5, "per_node": 2, "nodes": 2}, False),
     ({"ranks": 2, "per_node": 2, "nodes": 3}, False)],
)  # fmt: skip
def test_ranks_of_a_group_fit_on_its_nodes(group: dict[str, int], fits: bool) -> None:
    values = profile(curve(1e-3, group=Group(**group))).to_dict()
    if fits:
        assert Profile.from_dict(values).collectives[0].group == Group(**group)
    else:
        with pytest.raises(JobError, match="must lie between nodes"):
            Profile.from_dict(values)


def test_a_cluster_is_as_large_as_the_largest_of_its_profiles() -> None:
    """And its device that of a profile which says what it is; the one with more memory."""
    small = profile(curve(1e-3))
    large = Machine(kind="cuda", memory=96 << 30, ranks=16, ranks_per_node=4, backend="nccl")
    named = large.model_copy(update={"device": "X2", "ranks": 8})
    machine = joined([small, small.model_copy(update={"machine": large})]).machine
    assert (machine.device, machine.ranks, machine.ranks_per_node, machine.memory) == ("X1", 16, 4, 80 << 30)
    machine = joined([small.model_copy(update={"machine": named}), small]).machine
    assert (machine.device, machine.ranks, machine.memory) == ("X2", 8, 96 << 30)
    assert joined([small.model_copy(update={"machine": large})]).machine == large


def test_a_group_that_does_not_begin_at_the_first_rank() -> None:
    group = Group.of((9, 13, 17), 8, nodes_per_minipod=1, at_once=4)
    assert group == Group(ranks=3, per_node=2, nodes=2, minipods=2, stride=4, at_once=4)
    assert str(group) == "3 ranks, on 2 nodes of 2 minipods"
    assert str(Group.of((1, 3), 8)) == "2 ranks, in a node"
    assert str(Group.of((1, 9), 8)) == "2 ranks, one on each of 2 nodes"
