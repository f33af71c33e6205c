"""Flight recorder dumps of several versions and writers: what is read, what is said, what is passed
over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.core.runs.evidence import read_hang
from plait.diagnose.measured.importing import Imported, import_traces
from plait.diagnose.measured.reading import read_run
from tests.support.recordings.theirs import dump, dumps_imported, entry, grouped, message, verdict_of, waiting, written

SECOND = 10**9


@pytest.mark.parametrize("protocol", [2, 4])
def test_pickles_of_dumps_say_what_their_json_says(tmp_path: Path, protocol: int) -> None:
    frames = [{"name": "step", "filename": "train.py", "line": 7}] * 40
    odd: dict[str, Any] = {"process_group": ("0", "default_pg"), "frames": frames, "duration_ms": 1.25}
    dumps = [dump(rank, *([waiting(5, 9000, **odd)] if rank != 2 else []), world=4) for rank in range(4)]
    found: list[Imported] = []
    for name, form in (("json", 0), ("pickles", protocol)):
        files = written(tmp_path / name, *dumps, named="nccl_trace_rank_{}", protocol=form)
        found.append(import_traces(files, tmp_path / name / "run"))
    assert found[0] == found[1]
    assert found[0].verdict is not None
    assert found[0].verdict.ranks == (2,)
    first, second = (read_run(tmp_path / name / "run").recording.spans for name in ("json", "pickles"))
    assert first.equals(second)


@pytest.mark.parametrize("at", [1795671044864785515, 1795671044864785921, 2**53 + 1])
def test_a_dump_of_operations_of_which_nobody_knows_the_end_is_read(tmp_path: Path, at: int) -> None:
    """Gloo's: they have ended and tell one time, a number of more digits than a float has."""
    ended = [waiting(0, at + 10, retired=True)]
    dumps = [dump(rank, *ended, ended=0) for rank in range(2)]
    found = dumps_imported(tmp_path, *dumps)
    assert (found.ranks, found.spans) == (2, 0)
    assert found.verdict is not None
    assert found.verdict.cause == "none"


def test_what_gloo_writes(tmp_path: Path) -> None:
    """No state but scheduled, times of creation alone, a group without a name: what was retired has
    ended."""

    def gloo(rank: int, *more: dict[str, Any]) -> dict[str, Any]:
        entries = [
            waiting(n, SECOND * n, profiling_name="gloo:all_reduce", retired=True, record_id=n - 1) for n in (1, 2)
        ]
        return dump(rank, ended=0) | {
            "pg_config": {"": {"name": "", "desc": "", "ranks": "[0, 1]"}},
            "entries": [*entries, *more],
        }

    found = dumps_imported(tmp_path, gloo(0), gloo(1))
    assert found.verdict is not None
    assert (found.verdict.cause, found.spans) == ("none", 0)
    assert any("4 completed operations without usable times" in line for line in found.over.lines())
    hung = verdict_of(tmp_path / "open", gloo(0, waiting(3, 3 * SECOND)), gloo(1))
    assert (hung.cause, hung.ranks) == ("missing", (1,))


def test_version_one_counts_all_operations_together(tmp_path: Path) -> None:
    def old(rank: int, *, ended: bool) -> dict[str, Any]:
        last = entry(5, 9000, 9500) if ended else waiting(5, 9000)
        entries = [{k: v for k, v in one.items() if k != "collective_seq_id"} | {"seq_id": n, "pg_id": 0}
                   for n, one in enumerate([*dump(rank)["entries"], last])]  # fmt: skip
        return dump(rank) | {"version": "1.5", "entries": entries}

    assert verdict_of(tmp_path, old(0, ended=True), old(1, ended=True)).cause == "none"
    assert verdict_of(tmp_path / "open", old(0, ended=False), dump(1) | {"version": "1.5"}).ranks == (1,)


def test_a_version_that_is_not_known_is_remarked_on(tmp_path: Path) -> None:
    notes = dumps_imported(tmp_path, dump(0) | {"version": "99.0"}, dump(1) | {"version": "1.5"}).notes
    assert [note for note in notes if "version" in note] == [
        "trace0.json is of version 99.0, which is not known: it is read as version 2"
    ]


def test_times_of_zero_are_unknown_and_no_span_is_longer_than_the_job(tmp_path: Path) -> None:
    now = 1_718_000_000 * SECOND
    zero = [entry(n, now + n * SECOND, now + n * SECOND + 10**7, time_discovered_started_ns=0) for n in range(4)]
    unknown = entry(4, now, 0, time_created_ns=0, time_discovered_started_ns=0)
    found = dumps_imported(tmp_path, dump(0, *zero, unknown, ended=0), dump(1, *zero, ended=0))
    spans = read_run(tmp_path / "run").recording.spans
    assert found.spans == spans.height == 8
    lengths = (spans["end"] - spans["start"]).to_list()
    assert lengths == pytest.approx([0.01] * 8, abs=1e-6)
    assert any("1 completed operations without usable times" in line for line in found.over.lines())


def test_a_dump_that_cannot_be_read_is_not_one_that_is_missing(tmp_path: Path) -> None:
    def told(folder: str, last: dict[str, Any] | None, world: int = 4) -> Imported:
        files = written(
            tmp_path / folder,
            *(dump(rank, *([last] if last and rank != 1 else []), world=world) for rank in range(4)),
            named="dump_rank_{}.json",
        )
        files[1].write_text(files[1].read_text()[:-40])
        return import_traces(files, tmp_path / folder / "run")

    waits = told("waits", waiting(5, 9000))
    assert waits.verdict is not None
    assert (waits.verdict.cause, waits.verdict.ranks) == ("unknown", ())
    assert waits.verdict.why.startswith(
        "Rank 1's dump cannot be read: what it did is not known. Ranks 0 and 2, 3 wait for it in all-reduce 5"
    )
    assert "rank 1's file cannot be read: what it did is not known" in waits.notes
    assert not any("left no" in note for note in waits.notes)
    healthy = told("healthy", None)
    assert healthy.verdict is not None
    assert healthy.verdict.why.endswith("Rank 1's dump cannot be read: what it did is not known.")
    both = told("both", waiting(5, 9000), world=5).verdict
    assert both is not None
    assert (both.cause, both.ranks) == ("missing", (4,)), "whoever left no dump is the likelier cause"
    assert "the job has 5 ranks, and rank 4 left no file" in told("more", waiting(5, 9000), world=5).notes


def test_a_dump_without_an_operation_is_said(tmp_path: Path) -> None:
    found = dumps_imported(tmp_path, dump(0), dump(1, ended=0))
    assert "the dump of rank 1 holds no operation: none was begun, or none was recorded" in found.notes
    hung = verdict_of(tmp_path / "waits", dump(0, waiting(5, 9000)), dump(1, ended=0))
    assert (hung.cause, hung.ranks) == ("missing", (1,))
    assert hung.why.endswith("Rank 1 recorded no operation: none was begun, or none was recorded.")


def test_a_rank_that_has_done_nothing_has_no_entries(tmp_path: Path) -> None:
    empty = {key: value for key, value in dump(1).items() if key != "entries"}
    found = verdict_of(tmp_path, dump(0, waiting(5, 9000)), empty)
    assert (found.cause, found.ranks) == ("missing", (1,))


def test_entries_that_were_overwritten_are_counted(tmp_path: Path) -> None:
    """By the numbers of records; messages that are left still find their ends."""
    sent = [message("send 0->1", n, 9000 + n, ended=True, record_id=40 + n) for n in range(3)]
    got = [message("recv 1<-0", n, 9000 + n, ended=n < 2, record_id=90 + n) for n in range(1, 3)]
    found = dumps_imported(tmp_path, dump(0, *sent, ended=0), dump(1, *got, ended=0))
    lines = found.over.lines()
    assert any(line.startswith("passed over 131 entries that the recorder had overwritten") for line in lines), lines
    assert found.verdict is not None
    assert (found.verdict.cause, found.verdict.ranks) == ("missing", (0,)), "what 0 sent last is what 1 had last"


def test_messages_and_operations_of_which_the_dump_tells_too_little_are_counted(tmp_path: Path) -> None:
    odd = entry(7, 9000, 9500, profiling_name="nccl:send", is_p2p=True)
    found = dumps_imported(tmp_path, dump(0, odd, entry(9, 9000, 9500, collective_seq_id=None)), dump(1))
    assert found.over.counts == {
        "messages whose sender or receiver is unknown": 1,
        "operations without a sequence number": 1,
    } | {"entries that the recorder had overwritten": 3}


def test_of_a_group_that_nobody_tells_those_that_used_it_are_members(tmp_path: Path) -> None:
    """Its members are told as none: a third rank has no part in it."""
    config = {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"},
        "9": {"name": "9", "desc": "odd", "ranks": "[]"},
    }
    used = {"process_group": ["9", "odd"]}
    dumps = [dump(0, waiting(5, 9000, **used)), dump(1, entry(4, 8000, 8500, **used)), dump(2)]
    found = dumps_imported(tmp_path, *(one | {"pg_config": config} for one in dumps))
    assert found.verdict is not None
    assert (found.verdict.cause, found.verdict.ranks) == ("missing", (1,))
    assert "all-reduce 5 of odd group 0, 1" in found.verdict.why
    assert found.over.counts["groups of unknown members: the ranks that used them count as members"] == 2


def test_members_that_another_dump_tells(tmp_path: Path) -> None:
    """Of a group that a rank's own dump does not list; and of the whole, for which gloo has no
    name."""
    tp = {"process_group": ["tp", "tp"]}
    dumps = [dump(0, waiting(1, 9000, **tp), world=3), dump(1, waiting(1, 9000, **tp), world=3), dump(2, world=3)]
    found = dumps_imported(tmp_path, grouped(dumps[0], tp=[0, 1, 2]), *dumps[1:])
    assert found.verdict is not None
    assert (found.verdict.cause, found.verdict.ranks) == ("missing", (2,))
    assert "groups of unknown members: the ranks that used them count as members" not in found.over.counts
    nameless = {"": {"name": "", "desc": "", "ranks": "[0, 1, 2, 3]"}}
    hung = verdict_of(tmp_path / "gloo", *(one | {"pg_config": nameless} for one in (
        dump(0, waiting(5, 9000)), dump(1, waiting(5, 9000)), dump(2, waiting(5, 9000)),
    )))  # fmt: skip
    assert (hung.cause, hung.ranks) == ("missing", (3,))
    bare = [dump(rank, waiting(5, 9000)) | {"pg_config": {}} for rank in range(2)]
    alone = verdict_of(tmp_path / "untold", *bare)
    assert (alone.cause, alone.ranks) == ("unknown", ()), "all whose dumps there are"


def test_the_group_of_all_ranks_is_one_whatever_it_is_called(tmp_path: Path) -> None:
    """gloo has no name for it, NCCL calls it 0."""
    nameless = dump(0, waiting(5, 9000, process_group=["", ""]), ended=0)
    nameless["pg_config"] = {"": {"name": "", "desc": "", "ranks": "[0, 1]"}}
    found = verdict_of(tmp_path, nameless, dump(1, waiting(5, 9000), ended=0))
    assert (found.cause, found.ranks) == ("unknown", ()), "both have begun the same call"


def test_evidence_of_a_dump(tmp_path: Path) -> None:
    """When the last was known, what was last, and when a batch was begun: with its first part."""
    parts = [waiting(5, 9000), waiting(5, 8990, profiling_name="nccl:broadcast"),
             waiting(5, 9010, profiling_name="nccl:coalesced", input_sizes=[], output_sizes=[])]  # fmt: skip
    import_traces(written(tmp_path, dump(0, *parts), dump(1)), tmp_path / "run")
    first, second = read_hang(tmp_path / "run" / "hang.json")[1]
    assert (first.at, second.at) == (9000, 5900), "what was created at 9000 and 10 ns before"
    assert first.doing == "coalesced 5 of default_pg group 0, 1, which has not ended"
    assert second.doing == "all-reduce 4 of default_pg group 0, 1, which ended"
    assert [(call.sequence, call.enqueued, call.over) for call in first.calls] == [(5, 8980, False)]
    assert [(call.sequence, call.enqueued, call.over) for call in second.calls] == [(4, 5090, True)]
    assert (first.thread, second.thread) == ("waits", "unknown")


def test_a_batch_ends_with_the_last_of_its_parts(tmp_path: Path) -> None:
    parts = [entry(5, 9000, 9900), entry(5, 9001, 9500, profiling_name="nccl:broadcast")]
    import_traces(written(tmp_path, dump(0, *parts), dump(1)), tmp_path / "run")
    evidence = read_hang(tmp_path / "run" / "hang.json")[1]
    assert [(call.sequence, call.ended) for call in evidence[0].calls] == [(5, 9900)]
