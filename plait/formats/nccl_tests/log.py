"""Reader of logs of nccl-tests and rccl-tests: comments with ranks, devices and hosts, and tables
of sizes.

===========  =====================================================================================
read         several tests in sequence, of all versions since 2.0; times in us, ms or s by the
             table's heading; terminal colours; prefixes of launchers (``srun -l``, mpirun, time
             stamps, kubectl logs, a quotation); tables out of and in place, or only in place;
             ``N/A``; time stamps and iteration times in the rows. Repeated sizes are samples of
             one size: the median counts
ignored      rows with wrong results (``#wrong``), or whose size contradicts their count, or whose
             time contradicts their bandwidth; all rows of a "FAILED" table that marks no wrong
             row; torn rows, and rows without a heading; rows of 0 bytes; rows of tests that no
             plan uses. A table that breaks off lacks its check and is noted
refused      a table without its ranks, or with a torn rank line; processes that do not form one
             job (not built with MPI=1); processor times (``-C 1``); impossible times, other units
===========  =====================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.core.base.ignored_input import IgnoredInput
from plait.core.cluster.profile import Profile
from plait.formats.base.collective_runs import (
    CANNOT,
    IN,
    NO_END,
    OUT,
    TESTS,
    UNUSED_TESTS,
    WIDTHS,
    Measurement,
    Runs,
    group_of,
    version_of,
)

_NAMES = "|".join(sorted((*TESTS, *UNUSED_TESTS), key=len, reverse=True))
_TEST = re.compile(rf"(?<![A-Za-z0-9_])({_NAMES})_perf")
_STARTING = re.compile(r"#\s*Collective test starting:\s*(?:\S*/)?(\w+?)(?:_perf\w*)?\s*$")
_RANK = re.compile(
    r"#\s+Rank\s+([0-9]+)\s+(?:Group\s+([0-9]+)\s+)?(?:Pid\s+[0-9]+\s+)?on\s+(\S+)\s+device\s+[0-9]+\s+\[[^]]*\]\s*(.*)"
)
_ANY_RANK = re.compile(r"#\s+Rank\s+[0-9]")
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_UNITS = re.compile(r"#\s+\((\w+)\)\s+\(elements\)[^(]*\(([^)]*)\)")
_PER_SECOND = {"us": 1e6, "ms": 1e3, "s": 1.0}
_HEAD = re.compile(r"#\s+size\s+count\b")
_END = re.compile(r"#\s*Out of bounds values\s*:\s*([0-9]+)\s+(OK|FAILED)")
_SLOW = re.compile(r"#\s*Avg bus bandwidth\s*:.*\bFAILED")
_LIBRARY = re.compile(r"\b([NR])CCL version\s*:?\s*([0-9][\w.]*)")
_CODE = re.compile(r"\bnccl-library=([0-9]{4,6})\b")
_TYPE = r"(?:u?int(?:8|32|64)?|char|half|float(?:16|32|64)?|double|bfloat16|f8e[0-9]m[0-9]|fp8\w*)"
_ROW = re.compile(rf"\b[0-9]+\s+[0-9]+\s+{_TYPE}\b")
"""The beginning of a row after any prefix: size, count and type."""
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*(?:e[-+]?[0-9]+)?|inf|nan)\*?|N/A", re.IGNORECASE)
_CELLS = {"size": r"[0-9]+", "count": r"[0-9]+", "type": r"[A-Za-z]\w*", "redop": r"[A-Za-z]\w*", "root": r"-?[0-9]+",
          "date": r"[0-9]{4}-[0-9]{2}-[0-9]{2}", "clock": r"[0-9:.]+"}  # fmt: skip
_NO_OTHER_HALF = re.compile(r"\S {30,}\S")
"""A row in which only the in-place half was measured: the out-of-place half is blank."""
LONGEST_LINE = 10_000
"""The longest line in characters; lines of the tests have a tenth of it."""


@dataclass
class _Log:
    """The state of the reader. test: the current test. columns: of the table being read. torn_rank:
    position of the first unreadable rank line. seen_table: True after the first table of a run."""

    runs: Runs
    test: str = ""
    columns: tuple[str, ...] = ()
    torn_rank: str = ""
    seen_table: bool = False


def read_log(text: str, file: str, date: str, over: IgnoredInput) -> Profile:
    """Return the profile of a log, which may have several tests in sequence. date: the log's,
    because its text has none. Raises JobError naming the line."""
    log = _Log(Runs(file, over))
    if found := _TEST.search(Path(file).name) or re.search(f"({'|'.join(TESTS)})(?!v)", Path(file).name):
        log.test = found[1]
    where = ""
    for number, line in enumerate(text.splitlines(), 1):
        where = f"line {number}"
        if len(line) > LONGEST_LINE:
            over.note(f"lines of more than {LONGEST_LINE} characters", where)
        else:
            _line(log, _COLOUR.sub("", line), where)
    _close(log, where, broken=True)
    return log.runs.profile(date, "nccl-tests")


def _line(log: _Log, line: str, where: str) -> None:
    if "#" in line and _comment(log, line, where):
        return
    if test := _TEST.search(line):
        log.test = test[1]
    if version := _LIBRARY.search(line):
        log.runs.versions["nccl" if version[1] == "N" else "rccl"] = version[2]
    starts = [found.start() for found in _ROW.finditer(line)]
    if not log.columns:
        log.runs.over.note("rows under no heading", where, len(starts))
    elif starts:
        taken = _row(log, line[starts[-1] :], where)
        log.runs.over.note("torn rows of a table", where, len(starts) - taken)


def _comment(log: _Log, line: str, where: str) -> bool:
    """Read a line as a comment of the tests; True if it was one."""
    runs = log.runs
    if found := _RANK.search(line):
        _another_run(log, where)
        runs.rank(int(found[2] or 0), int(found[1]), found[3], found[4].strip(), where)
    elif _ANY_RANK.search(line):
        _another_run(log, where)
        log.torn_rank = log.torn_rank or where
    elif "Using devices" in line:
        _another_run(log, where, surely=True)
    elif found := _HEAD.search(line):
        _close(log, where, broken=True)
        words = line[found.start() :].split()[1:]
        log.columns = tuple(_numbered([*words[:-1], "date", "clock"] if words[-1] == "timestamp" else words))
        log.seen_table, runs.per_second = True, _PER_SECOND["us"]
    elif found := _UNITS.search(line):
        if found[1] != "B" or found[2] not in _PER_SECOND:
            fix = "Give a table of bytes and of us, ms or s, as the tests print it"
            raise runs.refuse(f"the units ({found[1][:20]}) and ({found[2][:20]}) are not known", where, fix)
        runs.per_second = _PER_SECOND[found[2]]
    elif found := _END.search(line):
        _close(log, where, failed=found[2] == "FAILED")
    elif _SLOW.search(line):
        runs.over.note("mark(s) of a bandwidth below the required minimum, whose rows are taken", where)
    elif found := _STARTING.search(line):
        log.test = found[1]
    elif found := _CODE.search(line):
        runs.versions.setdefault("nccl", version_of(int(found[1])))
        return False  # the line may also name the test
    else:
        return False
    return True


def _another_run(log: _Log, where: str, *, surely: bool = False) -> None:
    """Forget the ranks of the previous run of the tests if a table followed them: a rank line after
    a table begins another run."""
    if log.seen_table or surely:
        _close(log, where, broken=True)
        log.runs.ranks, log.torn_rank, log.seen_table = {}, "", False


def _close(log: _Log, where: str, *, broken: bool = False, failed: bool = False) -> None:
    """Add the rows of the table to the samples. broken: the table has no line with the check of its
    results."""
    log.runs.over.note(NO_END, where, bool(log.columns) and broken)
    log.runs.close(where, failed=failed)
    log.columns = ()


def _numbered(columns: Sequence[str]) -> Iterator[str]:
    """Yield column names; a repeated name is the in-place column, since out of place comes
    first."""
    seen: set[str] = set()
    for column in columns:
        yield f"{column} in place" if column in seen else column
        seen.add(column)


def _row(log: _Log, line: str, where: str) -> bool:
    """Read a row; True if the line has a cell for every column."""
    words, columns = line.split(), log.columns
    if len(words) < len(columns) and _NO_OTHER_HALF.search(line):
        columns = tuple(one for one in columns if one.endswith(" in place") or one in _CELLS)
    cells = list(zip(columns, words, strict=False))
    if len(words) != len(columns) or not all(re.fullmatch(_CELLS.get(c, _NUMBER), word) for c, word in cells):
        return False
    _sample(log, dict(cells), where)
    return True


def _sample(log: _Log, row: dict[str, str], where: str) -> None:
    size, runs = int(row["size"]), log.runs
    halves = {
        time: Measurement(float(told), row.get(time.replace("time", "algbw")), wrong, "cputime" in row)
        for time in (OUT, IN)
        if (told := row.get(time, row.get(time.replace("time", "cputime"), "N/A"))) != "N/A"
        for wrong in (row.get(time.replace("time", "#wrong")),)
    }
    seconds = runs.seconds(log.test, size, halves, where)
    if seconds is None:
        return
    if log.torn_rank:
        fix = "Give the whole log: without all ranks the group is unknown"
        raise runs.refuse("a line of a rank is torn", log.torn_rank, fix)
    ranks = group_of(runs, where)[0].ranks  # missing ranks are refused at the first row
    width, count = WIDTHS.get(row["type"]), int(row["count"])
    if width and count * width != size and size // ranks // width != count:  # of the whole, or of a rank's part
        runs.over.note(CANNOT, where)
    else:
        runs.pending.append((log.test, size, seconds, where))
