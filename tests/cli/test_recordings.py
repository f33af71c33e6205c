"""``plait diagnose`` on recordings of other programs that are a little unusual: what a user reads
of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import plait
from tests.support.recordings.theirs import all_waiting, dump, kineto, message, written

TIER = "unit"
Content = dict[str, Any]


def diagnosed(folder: Path, contents: list[Content], *words: str, named: str = "nccl_trace_rank_{}") -> Any:
    """What the command does with files of these contents."""
    folder.mkdir(exist_ok=True)
    written(folder / "files", *contents, named=named)
    return plait("diagnose", folder / "files", *words)


def in_quotes(content: Content, *, times: bool = True) -> Content:
    """A trace whose numbers are texts. times: as numbers in quotes; else as the time of day."""
    events = [
        one | ({name: str(one[name]) if times else "12:00:01.5" for name in ("ts", "dur") if name in one})
        | {"args": {name: str(value) if type(value) is int else value for name, value in one.get("args", {}).items()}}
        for one in content["traceEvents"]
    ]  # fmt: skip
    return content | {"traceEvents": events}


def test_numbers_in_quotes_are_numbers(tmp_path: Path) -> None:
    plain = [kineto(rank, slow=1.4 if rank == 2 else 1.0) for rank in range(4)]
    first, second = (
        json.loads(diagnosed(tmp_path / name, some, "--json", named="rank-{}.json").stdout) | {"run": ""}
        for name, some in (("plain", plain), ("quoted", [in_quotes(one) for one in plain]))
    )
    assert first == second and [one["ranks"] for one in first["stragglers"]] == [[2]]


def test_who_waits_is_not_asked_of_traces(tmp_path: Path) -> None:
    done = diagnosed(tmp_path, [kineto(0)], "--hang", named="rank-{}.json")
    assert done.returncode == 2 and f"plait: {tmp_path / 'files'} has no rings" in done.stderr


def test_times_that_are_no_numbers_are_said(tmp_path: Path) -> None:
    done = diagnosed(tmp_path, [in_quotes(kineto(0), times=False)], named="rank-{}.json")
    assert done.returncode == 2 and "neither kernels" not in done.stderr
    assert "none of its 40 kernels and operators can be read: of 'gemm' the time is '12:00:01.5'" in done.stderr


ODD = {"input_sizes": [[5]]}


@pytest.mark.parametrize(
    "named", ["nccl_trace_rank_10.12.0.7_{}", "rank_10-12-0-7_{}.json", "nccl_trace_rank_fe80::a:7_{}"]
)
def test_an_address_in_a_name_is_no_rank(tmp_path: Path, named: str) -> None:
    contents = [{key: value for key, value in one.items() if key != "rank"} for one in all_waiting(4, {2: ODD})]
    done = diagnosed(tmp_path, contents, named=named)
    assert done.returncode == 3 and "4 ranks" in done.stdout and "Rank 2 began an all-reduce of Float 20" in done.stdout


def astray(last: int, *messages: Content) -> Content:
    """A dump of one of three ranks: 3 messages each way along the line that ended, then what is
    open."""
    ways = {0: ("send 0->1",), 1: ("recv 1<-0", "send 1->2"), 2: ("recv 2<-1",)}[last]
    ended = [
        message(way, 3 * at + number, 9000 + 100 * at, ended=True) for at in range(3) for number, way in enumerate(ways)
    ]
    return dump(last, *ended, *messages, world=3)


@pytest.mark.parametrize(
    ("opened", "odd", "says"),
    [
        (("send 0->1", "recv 1<-2", "recv 2<-1"), 1,
         "Rank 1 began message 0 from rank 2 to rank 1 of default_pg group 0-2, which rank 2 has not begun, and not "
         "message 3 from rank 0 to rank 1 of default_pg group 0-2, in which rank 0 waits for it"),
        (("send 0->2", "recv 1<-0", "recv 2<-1"), 0,
         "Rank 0 began message 0 from rank 0 to rank 2 of default_pg group 0-2, which rank 2 has not begun, and not "
         "message 3 from rank 0 to rank 1 of default_pg group 0-2, in which rank 1 waits for it"),
        (("send 0->1", "recv 1<-7", "recv 2<-1"), 1,
         "Rank 1 waits in a message from rank 7 of default_pg, which has 3 ranks: there is no such peer."),
    ],
)  # fmt: skip
def test_a_message_with_another_peer(tmp_path: Path, opened: tuple[str, ...], odd: int, says: str) -> None:
    contents = [astray(rank, message(what, 40, 20_000, ended=False)) for rank, what in enumerate(opened)]
    verdict = json.loads(diagnosed(tmp_path, contents, "--json", "--hang").stdout)["verdict"]
    assert (verdict["cause"], verdict["ranks"], verdict["differs"]) == ("mismatch", [odd], "peer")
    assert says in verdict["why"] and "different groups" not in verdict["why"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rank": -2}, "Rank 2: the dump is of rank -2 by its content, which cannot be: it counts as rank 2's"),
        ({"rank": 70}, "Rank 2: the dump is of rank 70 by its content, which none of its groups has: it counts"),
        ({"pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3, 999999999]"}}},
         "Rank 2: the dump lists members of group 0 that cannot be."),
    ],
)  # fmt: skip
def test_a_rank_that_cannot_be_is_in_the_verdict(tmp_path: Path, change: Content, says: str) -> None:
    contents = [one | (change if rank == 2 else {}) for rank, one in enumerate(all_waiting(4, {2: ODD}))]
    done = diagnosed(tmp_path, contents)
    assert done.returncode == 3 and "Rank 2 began an all-reduce of Float 20 bytes" in done.stdout
    assert f"Besides: {says}" in done.stdout


@pytest.mark.parametrize(
    ("change", "named", "says"),
    [
        (
            {"rank": 1},
            3,
            "Rank 1: the dump is not the only one of this rank: nccl_trace_rank_3 was skipped.",
        ),
        ({"entries": []}, 3, "Rank 3: the dump holds no operation."),
        (
            {"rank": None},
            99,
            "Rank 3 left no dump: it may have ended.\nBesides: Rank 99: the dump is of rank 99 by its",
        ),
    ],
)
def test_a_dump_that_tells_nothing_of_its_rank_is_in_the_verdict(
    tmp_path: Path, change: Content, named: int, says: str
) -> None:
    contents = [one | (change if rank == 3 else {}) for rank, one in enumerate(all_waiting(4, {2: ODD}))]
    for number, rank in enumerate((0, 1, 2, named)):
        written(tmp_path, contents[number], named=f"nccl_trace_rank_{rank}")
    done = plait("diagnose", tmp_path)
    assert done.returncode == 3 and "Rank 2 began an all-reduce of Float 20 bytes" in done.stdout
    assert f"Besides: {says}" in done.stdout and "100 ranks" not in done.stdout


def test_a_folder_of_folders_names_them(tmp_path: Path) -> None:
    for step in (10, 20):
        (tmp_path / f"iteration_{step}").mkdir()
        written(tmp_path / f"iteration_{step}", kineto(0), kineto(1), named="rank{}_trace.json")
    done = plait("diagnose", tmp_path)
    assert done.returncode == 2 and "its folder(s) iteration_10, iteration_20 have; name one" in done.stderr
