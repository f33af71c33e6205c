"""What members of a group began differently, by flight recorder dumps: operation, size, type,
order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.recordings.theirs import all_waiting, dump, entry, message, verdict_of, waiting


@pytest.mark.parametrize(
    ("odd", "differs", "words"),
    [
        ({"input_sizes": [[5]]}, "size", "Float 20 bytes"),
        ({"input_dtypes": ["Half"]}, "dtype", "Half"),
        ({"profiling_name": "nccl:broadcast"}, "op", "a broadcast"),
    ],
)
@pytest.mark.parametrize("state", ["scheduled", "started"])
def test_who_began_something_else_is_named(
    tmp_path: Path, odd: dict[str, Any], differs: str, words: str, state: str
) -> None:
    found = verdict_of(tmp_path, *all_waiting(4, {2: odd}, state=state))
    assert (found.cause, found.ranks, found.differs) == ("mismatch", (2,), differs)
    assert words in found.why


def test_several_that_began_different_things_are_told_apart(tmp_path: Path) -> None:
    odd: dict[int, dict[str, Any]] = {
        2: {"input_sizes": [[1025]]},
        3: {"profiling_name": "nccl:broadcast", "input_sizes": [[262144]]},
        4: {"input_dtypes": ["Half"]},
    }
    found = verdict_of(tmp_path, *all_waiting(8, odd))
    assert (found.cause, found.ranks, found.differs) == ("mismatch", (2, 3, 4), "size and op and dtype")
    assert found.why == (
        "Rank 2 began an all-reduce of Float 4100 bytes, rank 3 began a broadcast of Float 1048576 bytes and rank 4 "
        "began an all-reduce of Half 64 bytes as call 5 of default_pg group 0-7, where ranks 0, 1 and 5-7 began an "
        "all-reduce of Float 128 bytes: the size, op and dtype must be the same on all."
    )


def test_without_a_majority_all_that_differs_is_told(tmp_path: Path) -> None:
    found = verdict_of(tmp_path, *all_waiting(3, {1: {"input_sizes": [[1025]]}, 2: {"input_dtypes": ["Half"]}}))
    assert found.differs == "size and dtype"
    assert "Mismatch of size and dtype in call 5" in found.why


def test_another_order_is_told_as_one(tmp_path: Path) -> None:
    right = [waiting(5, 9000), waiting(6, 9100, profiling_name="nccl:broadcast")]
    turned = [waiting(5, 9000, profiling_name="nccl:broadcast"), waiting(6, 9100)]
    found = verdict_of(tmp_path, *(dump(rank, *(turned if rank == 1 else right), world=4) for rank in range(4)))
    assert (found.cause, found.ranks, found.differs) == ("mismatch", (1,), "order")


def test_sizes_that_need_not_be_equal_are_no_fault(tmp_path: Path) -> None:
    """Of all-to-all while it is under way; of others once all have ended them."""
    uneven = [entry(5, 9000, 9500, profiling_name="nccl:all_gather", input_sizes=[[rank + 1]]) for rank in range(2)]
    assert verdict_of(tmp_path, *(dump(rank, uneven[rank]) for rank in range(2))).cause == "none"
    exchange = [waiting(5, 9000, profiling_name="nccl:all_to_all", input_sizes=[[rank + 1]]) for rank in range(2)]
    assert verdict_of(tmp_path / "under_way", *(dump(rank, exchange[rank]) for rank in range(2))).cause == "unknown"


@pytest.mark.parametrize(
    ("name", "odd", "cause"),
    [
        ("scatter", {"input_sizes": [[99]]}, "unknown"),
        ("scatter", {"output_sizes": [[99]]}, "mismatch"),
        ("scatter", {"output_dtypes": ["Int"]}, "mismatch"),
        ("reduce_scatter", {"input_sizes": [[99]]}, "mismatch"),
        ("reduce_scatter", {"output_sizes": [[99]]}, "unknown"),
        ("all_reduce", {"input_sizes": [], "output_sizes": [[8]]}, "unknown"),
        ("all_reduce", {"input_sizes": [], "output_sizes": [[99]]}, "mismatch"),
        ("alltoall_base", {"input_sizes": [[99]]}, "unknown"), ("all_to_all", {"input_dtypes": ["Int"]}, "mismatch"),
    ],
)  # fmt: skip
def test_what_must_be_equal_on_all_members(tmp_path: Path, name: str, odd: dict[str, Any], cause: str) -> None:
    usual: dict[str, Any] = {
        "profiling_name": f"nccl:{name}", "input_sizes": [[8]], "output_sizes": [[8]],
        "input_dtypes": ["Float"], "output_dtypes": ["Float"],
    }  # fmt: skip
    assert verdict_of(tmp_path, *all_waiting(3, {1: odd}, **usual)).cause == cause


def test_of_a_batch_the_parts_count_together(tmp_path: Path) -> None:
    """Different operations that were begun as one are "coalesced", with the bytes of all."""
    whole = {"profiling_name": "nccl:coalesced", "input_sizes": [], "output_sizes": []}

    def batch(size: int, world: int = 3) -> list[dict[str, Any]]:
        return [
            waiting(5, 9000),
            waiting(5, 9001, profiling_name="nccl:broadcast", input_sizes=[[size]]),
            waiting(5, 9002, **whole),
        ]

    found = verdict_of(tmp_path, *(dump(rank, *batch(9 if rank == 2 else 8), world=3) for rank in range(3)))
    assert (found.cause, found.ranks, found.differs) == ("mismatch", (2,), "size")
    assert "a coalesced of Float 164 bytes" in found.why and "160 bytes" in found.why


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        ({"output_dtypes": ["Half"]}, "mismatch"), ({"output_dtypes": ["Float"]}, "unknown"),
        ({"output_dtypes": [], "output_sizes": [], "input_dtypes": ["Float"]}, "unknown"),
        ({"output_dtypes": [], "output_sizes": [], "input_dtypes": ["Half"]}, "mismatch"),
    ],
)  # fmt: skip
def test_what_is_received_is_what_comes_out(tmp_path: Path, more: dict[str, Any], cause: str) -> None:
    """And what is sent is what goes in."""
    sent = message("send 0->1", 1, 9000, ended=False, input_sizes=[[8]], input_dtypes=["Float"],
                   output_sizes=[[99]], output_dtypes=["Int"])  # fmt: skip
    usual = {"input_sizes": [[8]], "input_dtypes": ["Float"], "output_sizes": [[8]]}
    if "output_sizes" not in more and more["output_dtypes"] == ["Half"]:
        usual["output_sizes"] = [[16]]  # as many bytes
    got = message("recv 1<-0", 1, 9000, ended=False, **(usual | more))
    assert verdict_of(tmp_path, dump(0, sent), dump(1, got)).cause == cause


def test_messages_whose_sizes_differ(tmp_path: Path) -> None:
    sent = message("send 0->1", 1, 9000, ended=False, input_sizes=[[7]])
    got = message("recv 1<-0", 1, 9000, ended=False, output_sizes=[[8]], output_dtypes=["Float"])
    assert verdict_of(tmp_path, dump(0, sent), dump(1, got)).cause == "mismatch"


@pytest.mark.parametrize("verb", ["broadcast", "reduce"])
def test_operations_out_of_place_have_their_plain_names(tmp_path: Path, verb: str) -> None:
    found = verdict_of(tmp_path, *all_waiting(4, {2: {"profiling_name": f"nccl:_{verb}_oop"}}))
    assert f"Rank 2 began a {verb} of Float" in found.why
