"""Logs of nccl-tests as launchers, failures and others leave them: what is taken, counted, refused."""

from __future__ import annotations

import gzip
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import JobError
from plait.core.base.passed_over import PassedOver
from plait.core.cluster.profile import Point
from plait.plan.profile_import import import_profile
from tests.plan.nccl_texts import ALL_REDUCE, BREAKS_OFF, HEAD, OLD_HEAD, log, ranks, read, row


@pytest.mark.parametrize("words", [1, 2, 8, 12])
def test_a_row_that_was_cut_is_counted(tmp_path: Path, words: int) -> None:
    cut = " ".join(row(2097152, 600.0, 500.0).split()[:words])
    sizes, said = read(log(tmp_path, [*ALL_REDUCE[:-2], cut]))
    assert sizes == [1024, 1048576]
    assert "passed over 1 torn rows of a table (the first: line 14)" in said
    assert len(said) == 2 and BREAKS_OFF in said[0] + said[1]


@pytest.mark.parametrize(
    "lines",
    [
        ["  2097152   524288  float   gpu-b:9:9 [1] NCCL INFO comm 0x5 rank 5 nranks 8 - Init COMPLETE",
         " sum  -1  600.0 1.00 1.00 0  500.0 1.00 1.00 0"],
        [row(2097152, 600.0, 500.0) + " NCCL INFO"],
        [row(2097152, 600.0, 500.0).replace("600.0", "60gpu-a:0.0")],
        [row(2097152, 600.0, 500.0).replace("float", "flo 4")],
    ],
)  # fmt: skip
def test_a_row_that_others_wrote_into_is_counted(tmp_path: Path, lines: list[str]) -> None:
    sizes, said = read(log(tmp_path, [*ALL_REDUCE[:-2], *lines, *ALL_REDUCE[-2:]]))
    assert sizes == [1024, 1048576]
    assert said == ["passed over 1 torn rows of a table (the first: line 14)"]


def test_a_row_with_both_halves_is_taken_however_far_apart_they_stand(tmp_path: Path) -> None:
    words = row(2097152, 600.0, 500.0).split()
    apart = " ".join(words[:9]) + " " * 40 + " ".join(words[9:])
    assert read(log(tmp_path, [*ALL_REDUCE[:-2], apart, *ALL_REDUCE[-2:]])) == ([1024, 1048576, 2097152], [])


def wrong(line: str, out: str, into: str) -> str:
    words = line.split()
    return " ".join([*words[:8], out, *words[9:12], into])


@pytest.mark.parametrize("marks", [("0", "2e+06"), ("3", "0"), ("nan", "0"), ("1*", "0"), ("inf", "N/A")])
def test_rows_with_wrong_results_are_counted(tmp_path: Path, marks: tuple[str, str]) -> None:
    lines = [*ALL_REDUCE[:-2], wrong(row(2097152, 600.0, 500.0), *marks), "# Out of bounds values : 4 FAILED"]
    sizes, said = read(log(tmp_path, lines))
    assert sizes == [1024, 1048576]
    assert said == ["passed over 1 rows whose results are wrong (the first: line 14)"]


def test_rows_that_nobody_checked_are_taken(tmp_path: Path) -> None:
    lines = [*ALL_REDUCE[:-2], wrong(row(2097152, 600.0, 500.0), "N/A", "N/A"), *ALL_REDUCE[-2:]]
    assert read(log(tmp_path, lines)) == ([1024, 1048576, 2097152], [])


def test_a_table_that_failed_without_saying_which_is_passed_over(tmp_path: Path) -> None:
    """An old one, whose errors are differences; another table of the log is taken."""
    old = [OLD_HEAD, row(4096, 9.0, 9.0, "float"), row(8192, 9.0, 9.0, "float"), "# Out of bounds values : 2 FAILED"]
    lines = ["all_reduce_perf", *ranks("a", "b"), *old]
    with pytest.raises(JobError, match="passed over 2 rows of a table that FAILED without saying which"):
        import_profile(log(tmp_path, lines))
    sizes, said = read(log(tmp_path, [*lines, *ALL_REDUCE]))
    assert sizes == [1024, 1048576]
    assert said == ["passed over 2 rows of a table that FAILED without saying which (the first: line 10)"]


@pytest.mark.parametrize(
    "prefix",
    ["0: ", " 0: ", "[1,0]<stdout>:", "[1,0]<stdout>: ", "[0] ", "> ", "2026-01-31T10:00:00.123Z ", "worker-0  | ",
     "[2026-01-31 10:00:00] ", "Jan 31 10:00:00 host app[12]: ", "[pod/w-0/main] 2026-01-31T10:00:00Z "],
)  # fmt: skip
def test_what_stands_before_lines(tmp_path: Path, prefix: str) -> None:
    noise = ["gpu-a:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC", "12 warnings"]
    lines = [prefix + line for line in ALL_REDUCE]
    sizes, said = read(log(tmp_path, [*lines[:-2], *noise, *lines[-2:]]))
    assert sizes == [1024, 1048576]
    assert not said


def test_another_prefix_than_the_headings(tmp_path: Path) -> None:
    """Time stamps of which the heading has none."""
    lines = [line if not line.strip()[:1].isdigit() else f"10:00:00.5 {line}" for line in ALL_REDUCE]
    assert read(log(tmp_path, lines)) == ([1024, 1048576], [])


STAMPED = HEAD + " timestamp"


def test_more_columns(tmp_path: Path) -> None:
    stamps = [f"{row(size, 30.0, 20.0)}  2026-01-31 10:00:00" for size in (1024, 4096)]
    assert read(log(tmp_path, [*ALL_REDUCE[:9], STAMPED, *stamps, *ALL_REDUCE[-2:]]))[0] == [1024, 4096]
    head = "#  size count type redop root time algbw busbw #wrong i_min i_max i_p99 i_cv% time algbw busbw #wrong i_min"
    rows = ["1024 256 float sum -1 30.0 0.03 1.0 0 29.0 31.0 30.5 1.2e+01 20.0 0.05 1.0 0 19.0"]
    assert read(log(tmp_path, [*ALL_REDUCE[:9], head, *rows, *ALL_REDUCE[-2:]])) == ([1024], [])


def test_only_in_place(tmp_path: Path) -> None:
    head = "#       size         count      type   redop    root     time   algbw   busbw  #wrong"
    lines = [*ALL_REDUCE[:9], head, "1024 256 float sum -1 20.0 0.05 1.0 0", *ALL_REDUCE[-2:]]
    (curve,) = import_profile(log(tmp_path, lines)).collectives
    assert curve.points == (Point(bytes=1024, seconds=20e-6),)
    blank = f"{1024:12}  {256:12}     float     sum      -1{' ' * 32}    20.00    0.05    1.00       0"
    (curve,) = import_profile(log(tmp_path, [*ALL_REDUCE[:11], blank, *ALL_REDUCE[-2:]])).collectives
    assert curve.points == (Point(bytes=1024, seconds=20e-6),)


def test_tests_of_no_use_and_sizes_of_nothing_are_counted(tmp_path: Path) -> None:
    """An alltoallv is no all-to-all."""
    other = ["# Collective test starting: alltoallv_perf", *ranks("a", "b"), HEAD, row(64, 9.0, 9.0), ALL_REDUCE[-2]]
    last = ["# Collective test starting: /opt/nccl/all_reduce_perf_mpi", *ALL_REDUCE[2:]]
    zero = [*last[:-2], row(0, 5.0, 5.0), *last[-2:]]
    sizes, said = read(log(tmp_path, [*other, *zero]))
    assert sizes == [1024, 1048576]
    assert sorted(said) == [
        "passed over 1 rows of 0 bytes, which is less than one element a rank (the first: line 22)",
        "passed over 1 rows of alltoallv_perf, which no plan uses (the first: line 8)",
    ]


def test_rows_under_no_heading_are_counted(tmp_path: Path) -> None:
    sizes, said = read(log(tmp_path, [row(64, 1.0, 1.0), *ALL_REDUCE, row(128, 1.0, 1.0)]))
    assert sizes == [1024, 1048576]
    assert said == ["passed over 2 rows under no heading (the first: line 1)"]


def test_a_bandwidth_below_the_least_is_said(tmp_path: Path) -> None:
    sizes, said = read(log(tmp_path, [*ALL_REDUCE[:-1], "# Avg bus bandwidth    : 9.25 FAILED"]))
    assert sizes == [1024, 1048576]
    assert "below the least that was asked for" in said[0]


@pytest.mark.parametrize(
    ("change", "key", "says"),
    [
        (lambda line: line.replace("device 1 [0x01]", "dev"), "line 5", "a line of a rank is torn"),
        (lambda line: "" if "Rank  2" in line else line, "line 11", "of 4 ranks above this table rank 2 is missing"),
        (lambda line: line.replace("time", "cputime"), "line 12", "has the processor's times"),
    ],
)
def test_ranks_that_are_not_all_there(tmp_path: Path, change: Any, key: str, says: str) -> None:
    with pytest.raises(JobError, match=says) as caught:
        import_profile(log(tmp_path, [line for line in map(change, ALL_REDUCE) if line]))
    assert caught.value.key == key


def test_versions_and_packed_logs(tmp_path: Path) -> None:
    lines = ["# nccl-tests version 2.17.6 nccl-headers=22803 nccl-library=22803", *ALL_REDUCE]
    path = tmp_path / "all.log.gz"
    path.write_bytes(gzip.compress("\n".join(lines).replace("NCCL version 2.28.7+cuda13.0", "x").encode()))
    assert import_profile(path).versions == {"nccl": "2.28.3"}
    rccl = [line.replace("NCCL version 2.28.7", "RCCL version 2.22.3") for line in ALL_REDUCE]
    assert import_profile(log(tmp_path, rccl)).versions == {"rccl": "2.22.3"}


@given(seed=st.integers(0, 10**9))
def test_a_damaged_row_changes_the_answer_or_is_counted_or_refused(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    chance = random.Random(seed)
    whole = row(2097152, 600.0, 500.0)
    letters = list(whole)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(letters))
        letters[place] = chance.choice(["", letters[place] * 2, chance.choice(" \t#.-xN/0e7")])
    damaged = "".join(letters)
    over, points, error = PassedOver(), dict[int, float](), None
    path = log(tmp_path_factory.mktemp("log", numbered=True), [*ALL_REDUCE[:-2], damaged, *ALL_REDUCE[-2:]])
    try:
        points = {point.bytes: point.seconds for point in import_profile(path, over).collectives[0].points}
    except JobError as refused:
        error = refused
    if error:
        assert error.key == "line 14" or "cannot be" in str(error)
    elif points == {1024: 20e-6, 1048576: 250e-6, 2097152: 500e-6} and not over:
        words, own = damaged.split()[-13:], whole.split()  # only what nobody reads was damaged
        assert [float(words[at]) for at in (0, 8, 9, 12)] == [float(own[at]) for at in (0, 8, 9, 12)]
    else:
        assert over or points.get(2097152) != 500e-6


def test_long_lines_are_counted(tmp_path: Path) -> None:
    sizes, said = read(log(tmp_path, [*ALL_REDUCE[:-2], "#" * 20_000, *ALL_REDUCE[-2:]]))
    assert (sizes, said) == (
        [1024, 1048576],
        ["passed over 1 lines of more than 10000 characters (the first: line 14)"],
    )


def test_a_row_that_another_broke_into_is_counted_beside_it(tmp_path: Path) -> None:
    lines = [f"0: {line}" for line in ALL_REDUCE]
    lines[11] = f"0: 512 128 float {lines[11]}"
    assert read(log(tmp_path, lines)) == ([1024, 1048576], ["passed over 1 torn rows of a table (the first: line 12)"])


def test_other_lines_that_begin_with_a_number_are_passed_over(tmp_path: Path) -> None:
    found = import_profile(log(tmp_path, [*ALL_REDUCE, "4 ranks have ended"]))
    assert len(found.collectives[0].points) == 2


def test_ranks_without_a_process_number(tmp_path: Path) -> None:
    """As the first versions named them."""
    lines = [re.sub(r"Group +\d+ Pid \d+ ", "", line) for line in ALL_REDUCE]
    assert lines != ALL_REDUCE
    assert read(log(tmp_path, lines)) == ([1024, 1048576], [])


CANNOT = "of which size, count, time and bandwidth contradict each other"


@pytest.mark.parametrize(
    ("test", "size", "count", "bandwidth", "fits"),
    [
        ("alltoall", 1048576, 262144 // 4, 3.50, True),  # of one rank's part, as new versions print
        ("alltoall", 1048576, 262144, 3.50, True),
        ("alltoall", 1048576, 262144 // 8, 3.50, False),
        ("alltoall", 1048576, 262144, 3.50 / 8, False),
        ("all_reduce", 1048576, 262144, 350.0, False),
        ("all_reduce", 1048576, 262144, 0.03, False),
        ("all_reduce", 1048576, 262144 * 8, 3.50, False),
        ("all_reduce", 8, 2, 0.00, True),  # rounded away
        ("all_reduce", 8, 2, 0.01, True),
        ("all_reduce", 1048576, 262144, 3.50 * 3, True),
        ("all_reduce", 1048576, 262144, 3.50 * 5, False),
    ],
)
def test_rows_that_contradict_themselves_are_counted(
    tmp_path: Path, test: str, size: int, count: int, bandwidth: float, fits: bool
) -> None:
    line = f"{size} {count} float sum -1 300.0 {bandwidth:.2f} 1.00 0 300.0 {bandwidth:.2f} 1.00 0"
    lines = [part.replace("all_reduce", test) for part in ALL_REDUCE]
    over = PassedOver()
    (curve,) = import_profile(log(tmp_path, [*lines[:-2], line, line, *lines[-2:]]), over).collectives
    assert over.lines() == ([] if fits else [f"passed over 2 rows {CANNOT} (the first: line 14)"])
    assert len(curve.points) == (2 if size > 8 else 3)


def test_times_in_milliseconds(tmp_path: Path) -> None:
    lines = [line.replace("(us)", "(ms)") for line in ALL_REDUCE]
    rows = [
        line.replace("300.0", "0.300").replace("250.0", "0.250")
        for line in lines
        if not line.strip().startswith("1024 ")
    ]
    (curve,) = import_profile(log(tmp_path, rows)).collectives
    assert curve.points == (Point(bytes=1048576, seconds=250e-6),)
    with pytest.raises(JobError, match=r"units \(B\) and \(min\) are not known"):
        import_profile(log(tmp_path, [line.replace("(ms)", "(min)") for line in lines]))


def test_colours_of_a_terminal_are_taken_off(tmp_path: Path) -> None:
    lines = [f"\x1b[1;32m{line}\x1b[0m" for line in ALL_REDUCE]
    assert read(log(tmp_path, lines)) == ([1024, 1048576], [])


def test_one_and_several_missing_ends(tmp_path: Path) -> None:
    assert read(log(tmp_path, ALL_REDUCE[:-2]))[1][0].startswith("passed over 1 missing end of tables")
    twice = [*ALL_REDUCE[:-2], *ALL_REDUCE[1:-2]]
    assert read(log(tmp_path, twice))[1][0].startswith("passed over 2 missing ends of tables")
