"""Flight recorder dumps of jobs that hang, and of healthy ones: who is named, and what for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.core.evidence import Verdict, read_hang
from plait.diagnose.importing import Imported, import_traces
from tests.diagnose.theirs import dump, entry, waiting, written

SECOND = 10**9


def verdict(folder: Path, *dumps: dict[str, Any]) -> Verdict:
    found = import_traces(written(folder, *dumps), folder / "run")
    assert found.verdict is not None
    assert read_hang(folder / "run" / "hang.json")[0] == found.verdict
    return found.verdict


def looked_at(folder: Path, *dumps: dict[str, Any]) -> Imported:
    return import_traces(written(folder, *dumps), folder / "run")


def message(kind: str, seq: int, at: int, *, ended: bool, **more: Any) -> dict[str, Any]:
    """``send 0->1`` or ``recv 1<-0``, ranks of the group."""
    done = {"time_discovered_completed_ns": at + 50} if ended else {}
    made = entry if ended else waiting
    args = (seq, at, at + 50) if ended else (seq, at)
    return made(*args, profiling_name=f"nccl:{kind}", is_p2p=True, p2p_seq_id=seq, collective_seq_id=0, **done, **more)


def test_a_healthy_job(tmp_path: Path) -> None:
    found = verdict(tmp_path, dump(0), dump(1))
    assert (found.cause, found.ranks) == ("none", ())
    assert found.why == "Nothing is wrong in the dumps: all of their 10 operations have ended."


def test_a_rank_that_did_not_come_is_named_with_what_it_did_last(tmp_path: Path) -> None:
    others = [dump(rank, waiting(5, 9000), world=4) for rank in (0, 1, 3)]
    found = verdict(tmp_path, *others, dump(2, world=4))
    assert (found.cause, found.ranks) == ("missing", (2,))
    assert found.why.startswith(
        "Rank 2 has not begun all-reduce 5 of default_pg group 0-3, where ranks 0, 1 and 3 wait."
    )
    assert "all-reduce 4" in found.why, "its last"
    assert [link.on for link in found.chain] == [(2,)]


def test_a_rank_without_a_dump_is_named(tmp_path: Path) -> None:
    found = verdict(tmp_path, *(dump(rank, waiting(5, 9000), world=4) for rank in (0, 1, 2)))
    assert (found.cause, found.ranks) == ("missing", (3,))
    assert "Rank 3 left no dump" in found.why
    assert "all-reduce 5" in found.why


def test_a_rank_without_a_dump_is_named_beside_another_fault_and_none(tmp_path: Path) -> None:
    wrong = waiting(5, 9000, input_sizes=[[5]])
    found = verdict(
        tmp_path, dump(0, waiting(5, 9000), world=4), dump(1, wrong, world=4), dump(2, waiting(5, 9000), world=4)
    )
    assert (found.cause, found.ranks) == ("mismatch", (1,))
    assert [one.ranks for one in found.also] == [(3,)]
    (tmp_path / "healthy").mkdir()
    healthy = verdict(tmp_path / "healthy", dump(0, world=4), dump(1, world=4), dump(2, world=4))
    assert healthy.cause == "none"
    assert "Rank 3 left no dump" in healthy.why


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
    dumps = [dump(rank, waiting(5, 9000, **(odd if rank == 2 else {}), state=state), world=4) for rank in range(4)]
    found = verdict(tmp_path, *dumps)
    assert (found.cause, found.ranks, found.differs) == ("mismatch", (2,), differs)
    assert words in found.why


def test_another_order_is_told_as_one(tmp_path: Path) -> None:
    right = [waiting(5, 9000), waiting(6, 9100, profiling_name="nccl:broadcast")]
    turned = [waiting(5, 9000, profiling_name="nccl:broadcast"), waiting(6, 9100)]
    found = verdict(tmp_path, *(dump(rank, *(turned if rank == 1 else right), world=4) for rank in range(4)))
    assert (found.cause, found.ranks, found.differs) == ("mismatch", (1,), "order")


def test_a_call_that_all_began_and_nobody_ended(tmp_path: Path) -> None:
    found = verdict(tmp_path, *(dump(rank, waiting(5, 9000, state="started"), world=4) for rank in range(4)))
    assert (found.cause, found.ranks) == ("unknown", ())
    assert "All of ranks 0-3 have begun all-reduce 5 of default_pg group 0-3" in found.why


def test_who_alone_has_not_ended_is_named(tmp_path: Path) -> None:
    dumps = [dump(rank, waiting(5, 9000) if rank == 3 else entry(5, 9000, 9500), world=4) for rank in range(4)]
    found = verdict(tmp_path, *dumps)
    assert (found.cause, found.ranks) == ("missing", (3,))
    assert "has not ended all-reduce 5" in found.why


def test_sizes_that_need_not_be_equal_are_no_fault(tmp_path: Path) -> None:
    """Of all-to-all while it is under way; of others once all have ended them."""
    uneven = [entry(5, 9000, 9500, profiling_name="nccl:all_gather", input_sizes=[[rank + 1]]) for rank in range(2)]
    assert verdict(tmp_path, *(dump(rank, uneven[rank]) for rank in range(2))).cause == "none"
    (tmp_path / "under_way").mkdir()
    exchange = [waiting(5, 9000, profiling_name="nccl:all_to_all", input_sizes=[[rank + 1]]) for rank in range(2)]
    assert verdict(tmp_path / "under_way", *(dump(rank, exchange[rank]) for rank in range(2))).cause == "unknown"


def test_groups_are_told_apart(tmp_path: Path) -> None:
    """Two of the same members; and one in which a rank waits while the other waits for a third in another."""
    groups = {
        "0": ("default_pg", [0, 1, 2]),
        "3": ("mesh_tp", [0, 1]),
        "4": ("mesh_tp_async", [0, 1]),
        "5": ("dp", [1, 2]),
    }
    config = {name: {"name": name, "desc": desc, "ranks": str(ranks)} for name, (desc, ranks) in groups.items()}
    tp, twin, dp = ({"process_group": [name, groups[name][0]]} for name in ("3", "4", "5"))
    dumps = [
        dump(0, waiting(1, 9000, **tp), entry(1, 8000, 8500, **twin)),
        dump(1, waiting(2, 9100, **dp), entry(1, 8000, 8500, **twin)),
        dump(2, entry(1, 8000, 8200, **dp)),
    ]
    found = verdict(tmp_path, *(one | {"pg_config": config} for one in dumps))
    assert (found.cause, found.ranks) == ("missing", (2,)), "rank 1 has not come to tp 1, but it waits itself"
    assert "of dp group 1, 2" in found.why


def test_a_circle_of_groups_is_a_deadlock(tmp_path: Path) -> None:
    config = {name: {"name": name, "desc": name, "ranks": "[0, 1]"} for name in ("a", "b")}
    one, two = (dump(n, waiting(1, 9000, process_group=[name, name])) for n, name in enumerate("ab"))
    found = verdict(tmp_path, one | {"pg_config": config}, two | {"pg_config": config})
    assert (found.cause, found.ranks) == ("deadlock", (0, 1))


def test_messages(tmp_path: Path) -> None:
    """A receiver waits for a rank that waits for nobody; those that came are no fault."""
    ends = [message("send 0->1", 1, 9000, ended=True)], [message("recv 1<-0", 1, 9000, ended=True)]
    found = verdict(tmp_path, dump(0, *ends[0]), dump(1, *ends[1], message("recv 1<-0", 2, 9500, ended=False)))
    assert (found.cause, found.ranks) == ("missing", (0,))
    assert "message 1 from rank 0 to rank 1" in found.why
    (tmp_path / "came").mkdir()
    assert verdict(tmp_path / "came", dump(0, *ends[0]), dump(1, *ends[1])).cause == "none"


def test_messages_whose_sizes_differ(tmp_path: Path) -> None:
    sent = message("send 0->1", 1, 9000, ended=False, input_sizes=[[7]])
    got = message("recv 1<-0", 1, 9000, ended=False, output_sizes=[[8]], output_dtypes=["Float"])
    assert verdict(tmp_path, dump(0, sent), dump(1, got)).cause == "mismatch"


def test_parts_of_a_batch_have_its_state(tmp_path: Path) -> None:
    """Messages that were begun together are entries that stay scheduled; the batch's own entry has ended."""

    def batch(kind: str, ended: bool) -> list[dict[str, Any]]:
        none = {"input_sizes": [], "output_sizes": [], "profiling_name": "nccl:coalesced"}
        whole = message("send 0->1", 3, 9100, ended=ended) | none
        return [message(kind, 3, 9000, ended=False), whole]

    both = "send 0->1", "recv 1<-0"
    assert verdict(tmp_path, *(dump(rank, *batch(kind, ended=True)) for rank, kind in enumerate(both))).cause == "none"
    (tmp_path / "open").mkdir()
    found = verdict(tmp_path / "open", dump(0), dump(1, *batch("recv 1<-0", ended=False)))
    assert (found.cause, found.ranks) == ("missing", (0,))


def test_what_gloo_writes(tmp_path: Path) -> None:
    """No state but scheduled, times of creation alone, a group without a name: what was retired has ended."""

    def gloo(rank: int, *more: dict[str, Any]) -> dict[str, Any]:
        entries = [
            waiting(n, SECOND * n, profiling_name="gloo:all_reduce", retired=True, record_id=n - 1) for n in (1, 2)
        ]
        return dump(rank, ended=0) | {
            "pg_config": {"": {"name": "", "desc": "", "ranks": "[0, 1]"}},
            "entries": [*entries, *more],
        }

    found = looked_at(tmp_path, gloo(0), gloo(1))
    assert found.verdict is not None
    assert (found.verdict.cause, found.spans) == ("none", 0)
    assert any("4 operations that ended, nobody knows when" in line for line in found.over.lines())
    (tmp_path / "open").mkdir()
    hung = verdict(tmp_path / "open", gloo(0, waiting(3, 3 * SECOND)), gloo(1))
    assert (hung.cause, hung.ranks) == ("missing", (1,))


def test_a_rank_that_has_done_nothing_has_no_entries(tmp_path: Path) -> None:
    empty = {key: value for key, value in dump(1).items() if key != "entries"}
    found = verdict(tmp_path, dump(0, waiting(5, 9000)), empty)
    assert (found.cause, found.ranks) == ("missing", (1,))


def test_times_of_zero_are_unknown_and_no_span_is_longer_than_the_job(tmp_path: Path) -> None:
    now = 1_718_000_000 * SECOND
    zero = [entry(n, now + n * SECOND, now + n * SECOND + 10**7, time_discovered_started_ns=0) for n in range(4)]
    unknown = entry(4, now, 0, time_created_ns=0, time_discovered_started_ns=0)
    from plait.diagnose.reading import read_run

    found = looked_at(tmp_path, dump(0, *zero, unknown, ended=0), dump(1, *zero, ended=0))
    spans = read_run(tmp_path / "run").recording.spans
    assert found.spans == spans.height == 8
    lengths = (spans["end"] - spans["start"]).to_list()
    assert lengths == pytest.approx([0.01] * 8, abs=1e-6)
    assert any("1 operations that ended, nobody knows when" in line for line in found.over.lines())


def test_entries_that_were_overwritten_are_counted(tmp_path: Path) -> None:
    """By the numbers of records; messages that are left still find their ends."""
    sent = [message("send 0->1", n, 9000 + n, ended=True, record_id=40 + n) for n in range(3)]
    got = [message("recv 1<-0", n, 9000 + n, ended=n < 2, record_id=90 + n) for n in range(1, 3)]
    found = looked_at(tmp_path, dump(0, *sent, ended=0), dump(1, *got, ended=0))
    lines = found.over.lines()
    assert any(line.startswith("passed over 131 entries that the recorder had overwritten") for line in lines), lines
    assert found.verdict is not None
    assert (found.verdict.cause, found.verdict.ranks) == ("missing", (0,)), "what 0 sent last is what 1 had last"


def test_version_one_counts_all_operations_together(tmp_path: Path) -> None:
    def old(rank: int, *, ended: bool) -> dict[str, Any]:
        last = entry(5, 9000, 9500) if ended else waiting(5, 9000)
        entries = [{k: v for k, v in one.items() if k != "collective_seq_id"} | {"seq_id": n, "pg_id": 0}
                   for n, one in enumerate([*dump(rank)["entries"], last])]  # fmt: skip
        return dump(rank) | {"version": "1.5", "entries": entries}

    assert verdict(tmp_path, old(0, ended=True), old(1, ended=True)).cause == "none"
    (tmp_path / "open").mkdir()
    assert verdict(tmp_path / "open", old(0, ended=False), dump(1) | {"version": "1.5"}).ranks == (1,)


def test_where_a_rank_waits_is_its_innermost_frames(tmp_path: Path) -> None:
    frames = [
        {"name": "all_reduce", "filename": "c10d.py", "line": 9},
        {"name": "step", "filename": "train.py", "line": 7},
    ]
    import_traces(written(tmp_path, dump(0, waiting(5, 9000, frames=frames)), dump(1)), tmp_path / "run")
    evidence = read_hang(tmp_path / "run" / "hang.json")[1]
    assert evidence[0].stack == ("train.py:7 step", "c10d.py:9 all_reduce")
