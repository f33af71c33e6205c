"""Rank tables: what is written is read, and what is wrong in one is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import PlacementError
from plait.core.topology.rank_table import RankTable


def test_what_is_written_is_read(tmp_path: Path) -> None:
    table = RankTable(("b", "a", "c"), ranks_per_node=4, plan="sha256:1")
    table.write(tmp_path / "rank_table.json")
    assert RankTable.read(tmp_path / "rank_table.json") == table


def test_every_rank_has_one_host() -> None:
    table = RankTable(("b", "a", "c"), ranks_per_node=4)
    assert sorted(rank for host in table.hosts for rank in table.ranks_of(host)) == list(range(table.world_size))
    assert all(rank in table.ranks_of(table.host_of(rank)) for rank in range(table.world_size))
    assert table.with_host(1, "d").hosts == ("b", "d", "c")


def test_a_host_twice_is_refused() -> None:
    with pytest.raises(PlacementError, match="n1 more than once"):
        RankTable(("n1", "n2", "n1"), ranks_per_node=1)
    with pytest.raises(PlacementError, match="n1 more than once"):
        RankTable(("n1", "n2"), ranks_per_node=1).with_host(1, "n1")


@pytest.mark.parametrize(
    "change, told",
    [
        ({"version": 9}, "version 9"),
        ({"nodes": [{"host": "a", "node_rank": 1, "ranks": [2, 3]}]}, "node 0"),
        ({"nodes": [{"host": "a", "node_rank": 0, "ranks": [1, 0]}]}, "node 0"),
        ({"nodes": [{"host": "a", "node_rank": 0, "ranks": [0, 2]}]}, "node 0"),
        ({"nodes": [{"host": "a", "node_rank": 0, "ranks": [0]}]}, "node 0"),
        ({"nodes": [{"node_rank": 0}]}, "host"),
        ({"ranks_per_node": 0}, "at least one"),
        ({"nodes": 3}, "not a rank table"),
        ({"nodes": []}, "at least one host"),
        ({"nodes": [3]}, "not a rank table"),
        ({"nodes": [{"host": "a b", "node_rank": 0, "ranks": [0, 1]}]}, "'a b' cannot stand in a host list"),
        ({"nodes": [{"host": "a\n#SBATCH", "node_rank": 0, "ranks": [0, 1]}]}, "cannot stand in a host list"),
        ({"nodes": [{"host": "a,b", "node_rank": 0, "ranks": [0, 1]}]}, "cannot stand in a host list"),
        ({"nodes": [{"host": 7, "node_rank": 0, "ranks": [0, 1]}]}, r"nodes\[0\]\.host: 7 is not allowed"),
        ({"nodes": [{"host": "a", "node_rank": 0, "ranks": [0, 1, 2]}]}, "node 0"),
        ({"nodes": [{"host": "a", "node_rank": 0, "ranks": None}]}, "ranks: None is not allowed"),
        ({"ranks_per_node": "2"}, 'ranks_per_node: "2" is not allowed'),
        ({"ranks_per_node": 10**12}, "node 0"),
        ({"plan": None}, "plan: None is not allowed"),
    ],
)
def test_a_wrong_table_is_named(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = tmp_path / "rank_table.json"
    RankTable(("a",), ranks_per_node=2).write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(PlacementError, match=told) as caught:
        RankTable.read(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_json(tmp_path: Path) -> None:
    path = tmp_path / "rank_table.json"
    for text in ("{", "[" * 100_000, "null", "[1]", '{"version": ' + "1" * 5_000 + "}", "{}"):
        path.write_text(text)
        with pytest.raises(PlacementError, match="not a rank table"):
            RankTable.read(path)
    with pytest.raises(PlacementError, match="No such file"):
        RankTable.read(tmp_path / "missing.json")


PLACED = RankTable(("n1", "n2.cluster"), 2)


@pytest.mark.parametrize(("rank", "host"), [(0, "n1"), (1, "n1.cluster"), (2, "n2"), (3, "n2.cluster")])
def test_a_rank_in_its_place_passes_with_or_without_a_domain(rank: int, host: str) -> None:
    PLACED.check(rank, 4, host)


@pytest.mark.parametrize(("rank", "host"), [(0, "n2"), (2, "n1"), (2, "n2.elsewhere"), (3, "n")])
def test_a_rank_elsewhere_is_named(rank: int, host: str) -> None:
    with pytest.raises(PlacementError, match=rf"Rank {rank} runs on {host}, and the rank table has it on n"):
        PLACED.check(rank, 4, host)


def test_another_number_of_ranks_is_named() -> None:
    with pytest.raises(PlacementError, match="3 ranks were started, and the rank table has 4"):
        PLACED.check(0, 3, "n1")


def test_a_host_that_is_not_there_is_named() -> None:
    with pytest.raises(PlacementError, match="The host n9 is not in the rank table of 2 hosts"):
        RankTable(("n1", "n2"), 2).node_rank("n9")


@pytest.mark.parametrize(("hosts", "ranks"), [((), 1), (("n1",), 0), (("n1",), -1)])
def test_a_table_has_hosts_and_they_have_ranks(hosts: tuple[str, ...], ranks: int) -> None:
    with pytest.raises(PlacementError, match="at least one host and one rank of each"):
        RankTable(hosts, ranks)


def test_files_of_the_first_version_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rank_table.json"
    RankTable(("a", "b"), ranks_per_node=2).write(path)
    assert json.loads(path.read_text())["version"] == 1
