"""The noun: what it derives, and its file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from plait.core.base.errors import PlacementError
from plait.core.topology.placement import Placement

PLACED = Placement(
    hosts=("n2", "n1"), minipods=("b", "a"), heights=(1, 1), ranks_per_node=8, spares=("n3",), row_spread=2,
    column_spread=1, used=2, crossings=1, alpha=0.25, score=1.75, bound=1.4, method="exact", plan="p", topology="t",
    dp_seconds=1.0, pp_seconds=2.0,
)  # fmt: skip


def test_what_follows_from_it() -> None:
    assert PLACED.gap == pytest.approx(0.25)
    assert PLACED.seconds == 3
    assert replace(PLACED, dp_seconds=None).seconds is None
    assert replace(PLACED, score=0.75, bound=0.5).gap == pytest.approx(0.5)
    assert replace(PLACED, score=0.0, bound=0.0).gap == 0
    assert replace(PLACED, score=0.5, bound=0.0).gap == 1  # any score is infinitely far from none
    assert replace(PLACED, score=PLACED.bound).gap == 0
    assert replace(PLACED, pp_seconds=None).seconds is None
    assert replace(PLACED, ep_seconds=0.5).seconds == 3.5
    table = PLACED.rank_table
    assert (table.hosts, table.world_size, table.plan) == (("n2", "n1"), 16, "p")
    with pytest.raises(PlacementError, match="n1 more than once"):
        _ = replace(PLACED, hosts=("n1", "n1")).rank_table


def test_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "placement.json"
    PLACED.write(file)
    assert Placement.read(file) == PLACED


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 9, "gap": 0}',
        '{"version": 1, "gap": 0, "hosts": 3}',
        "\x00",
        "null",
        pytest.param("[" * 60_000, id="deep"),
        json.dumps(PLACED.to_dict() | {"hosts": [1, 2]}),
        json.dumps(PLACED.to_dict() | {"heights": ["a"]}),
        json.dumps(PLACED.to_dict() | {"score": None}),
        json.dumps(PLACED.to_dict() | {"score": float("inf")}),
    ],
)
def test_broken_files(tmp_path: Path, text: str) -> None:
    file = tmp_path / "placement.json"
    file.write_text(text)
    with pytest.raises(PlacementError, match="not a placement"):
        Placement.read(file)
    with pytest.raises(PlacementError, match="No such file"):
        Placement.read(tmp_path / "none.json")
    values = json.loads(json.dumps(PLACED.to_dict() | {"colour": "red"}))
    file.write_text(json.dumps(values))
    with pytest.raises(PlacementError, match="colour"):
        Placement.read(file)
