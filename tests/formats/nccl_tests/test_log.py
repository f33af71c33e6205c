"""Logs of nccl-tests as launchers, failures and others leave them: what is taken, counted,
refused."""

from __future__ import annotations

import gzip
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import JobError
from plait.core.base.ignored_input import IgnoredInput
from plait.core.cluster.profile import Group
from plait.formats.base import collective_runs
from plait.formats.nccl_tests import log as nccl_log
from plait.formats.nccl_tests.log import read_log
from plait.plan.calibrate.profile_import import import_profile
from tests.formats.nccl_tests.texts import ALL_REDUCE, HEAD, OLD_HEAD, UNITS, log, ranks, read, row

TWO, THREE = [1024, 1048576], [1024, 1048576, 2097152]
LARGE = row(2097152, 600.0, 500.0)
BREAKS_OFF = "1 missing end of tables, whose rows are taken (the first: line"


def among(*lines: str) -> list[str]:
    """The log with lines at the end of its table, the first of them its line 14."""
    return [*ALL_REDUCE[:-2], *lines, *ALL_REDUCE[-2:]]


def marked(out: str, into: str) -> str:
    """A row with counts of wrong elements."""
    words = LARGE.split()
    return " ".join([*words[:8], out, *words[9:12], into])


def prefixed(prefix: str) -> list[str]:
    """The log as a launcher prints it, with other lines among its own."""
    lines = [prefix + line for line in ALL_REDUCE]
    noise = ["gpu-a:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC", "12 warnings"]
    return [*lines[:-2], *noise, *lines[-2:]]


TORN, WRONG = "1 torn rows of a table", "1 rows whose results are wrong"
FAILED = "# Out of bounds values : 4 FAILED"
OLD = ["all_reduce_perf", *ranks("a", "b"), OLD_HEAD, *(row(size, 9.0, 9.0, "float") for size in (4096, 8192)), FAILED]
MEANT = "# Collective test starting: /opt/nccl/all_reduce_perf_mpi"
LOST = [
    line.split(" on ")[0] if "Rank  2" in line else line for line in ALL_REDUCE if line.strip()[:1] > "9" or "#" in line
]
TABLES: dict[str, tuple[list[str], list[int], list[str]]] = {
    **{f"cut after {count}": ([*ALL_REDUCE[:-2], " ".join(LARGE.split()[:count])], TWO, [f"{TORN} (the first: line 14)",
                              BREAKS_OFF]) for count in (8, 12)},
    "written into": (among("  2097152   524288  float   gpu-b:9:9 [1] NCCL INFO comm 0x5 rank 5 nranks 8",
                           " sum  -1  600.0 1.00 1.00 0  500.0 1.00 1.00 0"), TWO, [TORN]),
    "words behind": (among(LARGE + " NCCL INFO"), TWO, [TORN]),
    "words within": (among(LARGE.replace("600.0", "60gpu-a:0.0")), TWO, [TORN]),
    "another row within": ([*ALL_REDUCE[:11], f"0: 512 128 float {ALL_REDUCE[11]}", *ALL_REDUCE[12:]], TWO, [TORN]),
    "halves far apart": (among(" ".join(LARGE.split()[:9]) + " " * 40 + " ".join(LARGE.split()[9:])), THREE, []),
    **{f"wrong: {marks}": ([*ALL_REDUCE[:-2], marked(*marks), FAILED], TWO, [f"{WRONG} (the first: line 14)"])
       for marks in (("0", "2e+06"), ("3", "0"), ("nan", "0"), ("1*", "0"))},
    "nobody looked": (among(marked("N/A", "N/A")), THREE, []),
    "failed, another table": ([*OLD, *ALL_REDUCE], TWO, ["2 rows of a table that FAILED without saying which (the f"]),
    **{prefix: (prefixed(prefix), TWO, [])
       for prefix in ("0: ", "[1,0]<stdout>:", "> ", "2026-01-31T10:00:00.123Z ", "worker-0  | ",
                      "Jan 31 10:00:00 host app[12]: ", "[pod/w-0/main] 2026-01-31T10:00:00Z ", "\x1b[1;32m")},
    "times of rows alone": ([f"10:00:00.5 {line}" if line.strip()[:1].isdigit() else line for line in ALL_REDUCE],
                            TWO, []),
    "stamps behind": ([*ALL_REDUCE[:9], HEAD + " timestamp", LARGE + "  2026-01-31 10:00:00", *ALL_REDUCE[-2:]],
                      [2097152], []),
    "times of iterations": (
        [*ALL_REDUCE[:9], HEAD.replace("#wrong ", "#wrong i_min i_cv%", 1) + " i_min",
         "1024 256 float sum -1 30.0 0.03 1.0 0 29.0 1.2e+01 20.0 0.05 1.0 0 19.0", *ALL_REDUCE[-2:]], [1024], []),
    "another test, no bytes": (
        ["# Collective test starting: alltoallv_perf", *ranks("a", "b"), HEAD, row(64, 9.0, 9.0), ALL_REDUCE[-2], MEANT,
         *ALL_REDUCE[2:-2], row(0, 5.0, 5.0), *ALL_REDUCE[-2:]], TWO,
        ["1 rows of alltoallv_perf, which no plan uses (the first: line 8)", "1 rows of 0 bytes, which is less than"]),
    "no heading": ([row(64, 1.0, 1.0), *ALL_REDUCE, row(128, 1.0, 1.0)], TWO, ["2 rows under no heading (the fi"]),
    "slow": ([*ALL_REDUCE[:-1], "# Avg bus bandwidth    : 9.25 FAILED"], TWO, ["1 mark of a bandwidth below"]),
    "a long line": (among(LARGE.rjust(nccl_log.LONGEST_LINE + 1)), TWO, ["1 lines of more than 10000 characters"]),
    "no longer line": (among(LARGE.rjust(nccl_log.LONGEST_LINE)), THREE, []),
    "a number first": ([*ALL_REDUCE, "4 ranks have ended"], TWO, []),
    "no process numbers": ([re.sub(r"Group +\d+ Pid \d+ ", "", line) for line in ALL_REDUCE], TWO, []),
    "no end": (ALL_REDUCE[:-2], TWO, [BREAKS_OFF]),
    "no ends": ([*ALL_REDUCE[:-2], *ALL_REDUCE[1:-2]], TWO, ["2 missing ends of tables"]),
    "a torn rank of another run": ([*LOST, *ALL_REDUCE], TWO, []),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "sizes", "said"), TABLES.values(), ids=map(str, TABLES))
def test_rows_that_are_taken_and_counted(tmp_path: Path, lines: list[str], sizes: list[int], said: list[str]) -> None:
    found, told = read(log(tmp_path, lines))
    assert found == sizes
    assert len(told) == len(said) and all(any(part in line for line in told) for part in said), told


def without(rank: int, text: str = "") -> list[str]:
    """The log with a line of a rank that is torn, or replaced."""
    return [text or line.split(" on ")[0] if f"Rank  {rank}" in line else line for line in ALL_REDUCE]


def again(*lines: str) -> list[str]:
    """The log, and ranks of a run that nothing but these begins."""
    return [*ALL_REDUCE, *(line for line in lines if "Using" not in line)]


SECOND = "of 4 ranks above this table rank 2 is missing"
REFUSED: dict[str, tuple[list[str], str | None, str]] = {
    "no table": (ALL_REDUCE[:7], None, "has no table of nccl-tests"),
    "cut off": (ALL_REDUCE[:11], None, "has no table of nccl-tests"),
    "failed": (OLD, None, "passed over 2 rows of a table that FAILED without saying which"),
    "no ranks": (["all_reduce_perf", HEAD, row(8, 1.0, 1.0)], "line 3", "0 ranks are named"),
    "one rank": (["all_reduce_perf", *ranks("a", each=1), HEAD, row(8, 1.0, 1.0)], "line 5", "1 ranks are named"),
    "no kind": ([*ranks("a"), HEAD, row(8, 1.0, 1.0)], "line 5", "the collective is unknown"),
    "negative": ([*ALL_REDUCE[:11], row(8, 1.0, -2.0)], "line 12", "above 0"),
    "nan": ([*ALL_REDUCE[:11], row(8, 1.0, float("nan"))], "line 12", "above 0"),
    "twice": (["all_reduce_perf", *ranks("a", each=1), *ranks("a", each=1)[1:], HEAD], "line 4", "MPI=1"),
    "no number": ([*ALL_REDUCE[:11], f" {10**18}{'0' * 5000} 1 float sum -1 1 1 1 0 1 1 1 0"], None, "impossible"),
    "vanishes": ([*ALL_REDUCE[:11], row(8, 1.0, 1e-320)], None, "impossible number"),
    "superscript": (["all_reduce_perf", *ranks("a"), HEAD, row(8, 1.0, 1.0).replace("8", "\u00b2")], None, "no table"),
    "no time": (among(re.sub("[65]00.0", "N/A", LARGE)), "line 14", "has no time"),
    "torn device": ([line.replace("device 1 [0x01]", "dev") for line in ALL_REDUCE], "line 5", "of a rank is torn"),
    "a rank that is missing": ([line for line in ALL_REDUCE if "Rank  2" not in line], "line 11", SECOND),
    "processor": ([line.replace("time", "cputime") for line in ALL_REDUCE], "line 12", "has the processor's times"),
    **{f"torn rank {rank}": (without(rank), f"line {4 + rank}", "a line of a rank is torn") for rank in (0, 3)},
    **{f"torn rank {rank} of the next": (again(*without(rank)), f"line {len(ALL_REDUCE) + 3 + rank}", "is torn")
       for rank in (0, 3)},
    "minutes": ([line.replace("(us)", "(min)") for line in ALL_REDUCE], "line 11", "units (B) and (min) are not known"),
    "KiB": ([line.replace("(B)", "(KiB)") for line in ALL_REDUCE], "line 11", "units (KiB) and (us) are not known"),
    "a rank far away": (without(0, ALL_REDUCE[3].replace("Rank  0", f"Rank {10**15}")), "line 12", "rank 0 is miss"),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "key", "says"), REFUSED.values(), ids=map(str, REFUSED))
def test_a_log_that_cannot_be_used_is_one_clear_error(
    tmp_path: Path, lines: list[str], key: str | None, says: str
) -> None:
    path = log(tmp_path, lines)
    with pytest.raises(JobError) as caught:
        import_profile(path)
    assert (caught.value.file, caught.value.key) == (str(path), key)
    assert says in str(caught.value)


def test_no_more_rows_than_any_test_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_runs, "MOST_ROWS", 3)
    assert read(log(tmp_path, among(LARGE)))[0] == THREE
    with pytest.raises(JobError, match="line 15: more than 3 rows"):
        import_profile(log(tmp_path, among(LARGE, LARGE)))


GATHER = ["# Collective test starting: all_gather_perf", *ranks("a", each=4), HEAD, UNITS,
          row(4096, 40.0, 35.0, "float none -1"), "# Collective test concluded: all_gather_perf"]  # fmt: skip
SWAP = ["# Collective test starting: alltoall_perf", *ranks("a", each=4), HEAD, UNITS,
        row(4096, 50.0, 45.0, "float none -1").removesuffix(" 0") + " N/A"]  # fmt: skip
UNUSED = ["# Collective test starting: reduce_perf", *ranks("a", each=4), HEAD, row(4096, 9.0, 9.0)]
SENT = [*ranks("a", "b", each=1, group=""), OLD_HEAD, row(4096, 40.0, 35.0, "float")]
SPLIT = [f"#  Rank {n} Group {g} Pid 1 on {host} device {g} [0x0{g}] X" for g in (0, 1) for n, host in enumerate("ab")]
BLANK = f"{1024:12}  {256:12}     float     sum      -1{' ' * 32}    20.00    0.05    1.00       0"
IN_PLACE = [HEAD.rpartition(" time")[0], "1024 256 float sum -1 20.0 0.05 1.0 0"]
FOUR, PAIR = Group(ranks=4, per_node=2, nodes=2), Group(ranks=2, per_node=1, nodes=2)
NODE = Group(ranks=4, per_node=4, nodes=1)
MILLIS = [line.replace("(us)", "(ms)") for line in ALL_REDUCE[:11]]
UNNAMED = row(1024, 30.0, 20.0).replace("0.03", "N/A").replace("0.05", "N/A")
CURVES: dict[str, tuple[str, list[str], list[tuple[str, Group, dict[int, float]]]]] = {
    "two nodes": ("", ALL_REDUCE, [("all_reduce", FOUR, {1024: 20, 1048576: 250})]),
    "kinds one after the other": ("", [*GATHER, *UNUSED, *SWAP], [
        ("all_gather", NODE, {4096: 40}), ("all_to_all", NODE, {4 * 4096: 50})]),
    "an old table": ("sendrecv_perf.txt", [f"[1,0]<stdout>:{line}" for line in SENT], [("send", PAIR, {4096: 40})]),
    "samples": ("", [*ALL_REDUCE[:11], *(row(1024, 30.0, each) for each in (20.0, 26.0, 22.0))], [
        ("all_reduce", FOUR, {1024: 22})]),
    "no headline of its own": ("", [*again(*ranks(*"abc", each=1)), "# alltoall_perf", HEAD, row(4096, 50.0, 45.0)], [
        ("all_reduce", FOUR, {1024: 20, 1048576: 250}),
        ("all_to_all", Group(ranks=3, per_node=1, nodes=3), {3 * 4096: 50})]),
    "a split run": ("", ["all_reduce_perf", *SPLIT, HEAD, row(4, 1.0, 1.0)], [
        ("all_reduce", Group(ranks=2, per_node=1, nodes=2, stride=2, at_once=2), {4: 1})]),
    "only in place": ("", [*ALL_REDUCE[:9], *IN_PLACE, *ALL_REDUCE[-2:]], [("all_reduce", FOUR, {1024: 20})]),
    "blank out of place": ("", [*ALL_REDUCE[:11], BLANK, *ALL_REDUCE[-2:]], [("all_reduce", FOUR, {1024: 20})]),
    "units of a table": ("", [*MILLIS, UNNAMED, ALL_REDUCE[-2], HEAD, re.sub("1024 +256", "2048 512", UNNAMED)],
                         [("all_reduce", FOUR, {1024: 20e3, 2048: 20})]),
    **{name: (name, [line for line in ALL_REDUCE if "mpirun" not in line], [(kind, FOUR, {1024: time, 1048576: more})])
       for name, kind, time, more in (("all_gather.log", "all_gather", 30, 300), ("x-reduce_scatter-4.log",
                                                                                  "reduce_scatter", 30, 300))},
}  # fmt: skip


@pytest.mark.parametrize(("name", "lines", "curves"), CURVES.values(), ids=map(str, CURVES))
def test_curves_of_a_log(
    tmp_path: Path, name: str, lines: list[str], curves: list[tuple[str, Group, dict[int, float]]]
) -> None:
    found = import_profile(log(tmp_path, lines, name or "test.log"))
    assert [(one.kind, one.group) for one in found.collectives] == [(kind, group) for kind, group, _ in curves]
    for one, (_, _, told) in zip(found.collectives, curves, strict=True):
        assert {point.bytes: point.seconds * 1e6 for point in one.points} == pytest.approx(told, rel=1e-9)


@pytest.mark.parametrize("name", ["alltoallv.txt", "run.log"])
def test_a_name_that_says_no_collective(name: str) -> None:
    with pytest.raises(JobError, match="the collective is unknown"):
        read_log("\n".join(line for line in ALL_REDUCE if "mpirun" not in line), name, "2026-01-01", IgnoredInput())


def test_the_library_and_the_first_device_that_is_named(tmp_path: Path) -> None:
    lines = ["# nccl-tests version 2.17.6 nccl-headers=22803 nccl-library=22803", *ALL_REDUCE]
    path = tmp_path / "all.log.gz"
    path.write_bytes(gzip.compress("\n".join(lines).replace("NCCL version 2.28.7+cuda13.0", "x").encode()))
    assert import_profile(path).versions == {"nccl": "2.28.3"}
    rccl = [line.replace("NCCL version 2.28.7", "RCCL version 2.22.3") for line in ALL_REDUCE]
    assert import_profile(log(tmp_path, rccl)).versions == {"rccl": "2.22.3"}
    lines = [line.replace("Acme X1", "") if "Rank  0" in line else line for line in ALL_REDUCE]
    lines = [line.replace("X1", "X2") if "Rank  1" in line else line for line in lines]
    found = import_profile(log(tmp_path, lines))
    assert (found.machine.device, found.versions) == ("Acme X2", {"nccl": "2.28.7"})
    assert (found.machine.ranks, found.machine.ranks_per_node) == (4, 2)


@given(seed=st.integers(0, 10**9))
def test_a_damaged_row_changes_the_answer_or_is_counted_or_refused(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    chance = random.Random(seed)
    letters = list(LARGE)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(letters))
        letters[place] = chance.choice(["", letters[place] * 2, chance.choice(" \t#.-xN/0e7")])
    damaged = "".join(letters)
    over, points, error = IgnoredInput(), dict[int, float](), None
    path = log(tmp_path_factory.mktemp("log", numbered=True), among(damaged))
    try:
        points = {point.bytes: point.seconds for point in import_profile(path, over).collectives[0].points}
    except JobError as refused:
        error = refused
    if error:
        assert error.key == "line 14" or "cannot be" in str(error)
    elif points == {1024: 20e-6, 1048576: 250e-6, 2097152: 500e-6} and not over:
        words, own = damaged.split()[-13:], LARGE.split()  # only what nobody reads was damaged
        assert [float(words[at]) for at in (0, 8, 9, 12)] == [float(own[at]) for at in (0, 8, 9, 12)]
    else:
        assert over or points.get(2097152) != 500e-6


@pytest.mark.parametrize(
    ("test", "size", "count", "bandwidth", "fits"),
    [
        ("alltoall", 1048576, 262144 // 4, 3.50, True),  # of one rank's part, as new versions print
        ("alltoall", 1048576, 262144, 3.50, True),
        ("alltoall", 1048576, 262144 // 8, 3.50, False),
        ("alltoall", 1048576, 262144, 3.50 / 8, False),
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
    over = IgnoredInput()
    (curve,) = import_profile(
        log(tmp_path, [part.replace("all_reduce", test) for part in among(line, line)]), over
    ).collectives
    said = "passed over 2 rows whose size, count, time and bandwidth contradict each other (the first: line 14)"
    assert over.lines() == ([] if fits else [said])
    assert len(curve.points) == (2 if size > 8 else 3)
