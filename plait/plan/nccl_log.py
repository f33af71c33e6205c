"""What nccl-tests and rccl-tests print: comments that name ranks, devices and hosts, and tables of sizes.

===========  =====================================================================================
known        several tests one after the other, of all versions since 2.0; times in us, ms or s, as
             the heading says; colours of terminals; what a launcher puts before lines (``srun -l``,
             mpirun, time stamps, kubectl logs, a quotation); tables in and out of place or only in
             place; ``N/A``; time stamps and times of iterations beside the rows. Sizes that repeat
             are samples of one point: the median counts
passed over  rows whose results are wrong (``#wrong``), or whose size contradicts their count, or
             their time and bandwidth; all rows of a table that "FAILED" without
             saying which; rows that are torn, or stand under no heading; rows of 0 bytes; rows of
             tests that no plan uses; tables that break off lack a check, and are noted
refused      a table without its ranks, or with a torn line among theirs; processes that are no one
             job (not built with MPI=1); processor times (``-C 1``); times that cannot be, other units
===========  =====================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from plait.core.base.passed_over import PassedOver
from plait.core.cluster.profile import Group, Profile
from plait.plan.nccl_runs import (
    CANNOT,
    MOST_RANKS,
    MOST_ROWS,
    NO_END,
    OTHERS,
    TESTS,
    WIDTHS,
    WRONG,
    Runs,
    group_of,
    positive,
)

_NAMES = "|".join(sorted((*TESTS, *OTHERS), key=len, reverse=True))
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
_LIKE_A_ROW = re.compile(r"^\s*[0-9]+(?:\s*$|\s+[0-9]+(?:\s|$))")
_BEGUN = re.compile(r"(?:^|\s)[0-9]+\s+[0-9]+(?:\s|$)")
"""A row that another one broke into."""
_ROW_ANYWHERE = re.compile(rf"\b[0-9]+\s+[0-9]+\s+{_TYPE}\s+(?:[a-z]+\s+-?[0-9]+\s+)?[0-9]")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*(?:e[-+]?[0-9]+)?|inf|nan)\*?|N/A", re.IGNORECASE)
_CELLS = {"size": r"[0-9]+", "count": r"[0-9]+", "type": r"[A-Za-z]\w*", "redop": r"[A-Za-z]\w*", "root": r"-?[0-9]+",
          "date": r"[0-9]{4}-[0-9]{2}-[0-9]{2}", "clock": r"[0-9:.]+"}  # fmt: skip
_NO_OTHER_HALF = re.compile(r"\S {30,}\S")
"""A row of which only the half in place was measured: the other is blank."""
LONGEST_LINE = 10_000
"""Characters: the tests' own have a tenth of that."""
TORN = "torn rows of a table"


@dataclass
class _Log:
    """Where the reading is. lead: words that stand before a line's own. columns: of the table that is open.
    per_second: how many of its times' unit a second has. pending: its rows: test, size, seconds and where.
    wrong: whether one of its rows was."""

    runs: Runs
    test: str = ""
    lead: int = 0
    columns: tuple[str, ...] = ()
    per_second: float = 1e6
    ranks: dict[int, dict[int, str]] = field(default_factory=dict[int, dict[int, str]])
    torn_rank: str = ""
    seen_table: bool = False
    pending: list[tuple[str, int, float, str]] = field(default_factory=list[tuple[str, int, float, str]])
    wrong: bool = False


def read_log(text: str, file: str, date: str, over: PassedOver) -> Profile:
    """The profile of a log, which may hold several tests one after the other. date: of the log, which does
    not say itself. Raises JobError naming the line."""
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
    if log.columns:
        _row(log, line, where)
    elif _ROW_ANYWHERE.search(line):
        log.runs.over.note("rows under no heading", where)


def _comment(log: _Log, line: str, where: str) -> bool:
    """Whether a line was one of the tests' own, which is then taken."""
    if found := _RANK.search(line):
        _another_run(log, where)
        _rank(log, int(found[1]), int(found[2] or 0), found[3], found[4].strip(), where)
    elif _ANY_RANK.search(line):
        _another_run(log, where)
        log.torn_rank = log.torn_rank or where
    elif "Using devices" in line:
        _another_run(log, where)
        log.ranks, log.torn_rank = {}, ""
    elif found := _HEAD.search(line):
        _close(log, where, broken=True)
        log.lead = len(line[: found.start()].split())
        words = line[found.start() :].split()[1:]
        log.columns = tuple(_numbered([*words[:-1], "date", "clock"] if words[-1] == "timestamp" else words))
        log.seen_table, log.per_second = True, _PER_SECOND["us"]
    elif found := _UNITS.search(line):
        if found[1] != "B" or found[2] not in _PER_SECOND:
            fix = "Give a table of bytes and of us, ms or s, as the tests print it"
            raise log.runs.refuse(f"the units ({found[1][:20]}) and ({found[2][:20]}) are not known", where, fix)
        log.per_second = _PER_SECOND[found[2]]
    elif found := _END.search(line):
        if found[2] == "FAILED" and not log.wrong:
            log.runs.over.note("rows of a table that FAILED without saying which", where, len(log.pending))
            log.pending.clear()
        _close(log, where)
    elif _SLOW.search(line):
        log.runs.over.note("marks that a bandwidth is below the least that was asked for; its rows are taken", where)
    elif found := _STARTING.search(line):
        log.test = found[1]
    elif found := _CODE.search(line):
        code = int(found[1])
        log.runs.versions.setdefault("nccl", f"{code // 10000}.{code // 100 % 100}.{code % 100}")
        return False  # a line may name the test as well
    else:
        return False
    return True


def _another_run(log: _Log, where: str) -> None:
    """Ranks after a table are those of another run."""
    if log.seen_table:
        _close(log, where, broken=True)
        log.ranks, log.torn_rank, log.seen_table = {}, "", False


def _close(log: _Log, where: str, *, broken: bool = False) -> None:
    """Take what the open table holds. broken: no line has said whether its results were right."""
    if log.columns and broken:
        log.runs.over.note(NO_END, where)
    if log.pending:
        ranks = _ranks(log, log.pending[0][3])
        for test, size, seconds, _ in log.pending:
            log.runs.add(test, ranks, size, seconds)
    log.columns, log.wrong = (), False
    log.pending.clear()


def _ranks(log: _Log, where: str) -> tuple[Group, int]:
    """Those named above a table, and how many a node has."""
    if log.torn_rank:
        fix = "Give the whole log: without all ranks nobody knows the group"
        raise log.runs.refuse("a line of a rank is torn", log.torn_rank, fix)
    return group_of(log.ranks, log.runs, where)


def _rank(log: _Log, rank: int, group: int, host: str, device: str, where: str) -> None:
    members = log.ranks.setdefault(group, {})
    if len(members) >= MOST_RANKS:
        raise log.runs.refuse(f"more than {MOST_RANKS} ranks", where, "Keep those of one run")
    if rank in members:
        fix = "Build nccl-tests with MPI=1, so that its processes are one job"
        raise log.runs.refuse(f"rank {rank} stands here a second time", where, fix)
    members[rank] = host
    log.runs.device = log.runs.device or device


def _numbered(columns: Sequence[str]) -> Iterator[str]:
    """Out of place comes first, then the same columns in place."""
    seen: set[str] = set()
    for column in columns:
        yield f"{column} in place" if column in seen else column
        seen.add(column)


def _row(log: _Log, line: str, where: str) -> None:
    words, many = line.split(), len(log.columns)
    own = words[log.lead :]
    columns = log.columns
    if len(own) < many and _NO_OTHER_HALF.search(line):
        columns = tuple(one for one in columns if one.endswith(" in place") or one in _CELLS)
    if not _fits(columns, own) and len(words) > many and not _LIKE_A_ROW.match(line):
        own = words[-many:]  # something else stands before this line than before the heading
        if _fits(columns, own) and _BEGUN.search(" ".join(words[:-many])):
            log.runs.over.note(TORN, where)
    if _fits(columns, own):
        _sample(log, dict(zip(columns, own, strict=True)), where)
    elif _LIKE_A_ROW.match(" ".join(words[log.lead :])) or _ROW_ANYWHERE.search(line):
        log.runs.over.note(TORN, where)


def _fits(columns: Sequence[str], words: Sequence[str]) -> bool:
    if len(words) != len(columns):
        return False
    cells = zip(columns, words, strict=True)
    return all(re.fullmatch(_CELLS[c], word) if c in _CELLS else _NUMBER.fullmatch(word) for c, word in cells)


def _sample(log: _Log, row: dict[str, str], where: str) -> None:
    size = int(row["size"])
    if log.runs.passes_over(log.test, size, where):
        return
    if any(column.startswith("#wrong") and _is_wrong(cell) for column, cell in row.items()):
        log.wrong = True
        log.runs.over.note(WRONG, where)
        return
    if "cputime" in row:
        raise log.runs.refuse("has the processor's times, not the collective's", where, "Run the test without -C 1")
    # An all-reduce is done in place when models train, everything else from one buffer to another.
    preferred = ("time in place", "time") if log.test == "all_reduce" else ("time", "time in place")
    column = next((column for column in preferred if row.get(column, "N/A") != "N/A"), None)
    if column is None:
        raise log.runs.refuse("has no time", where, "Give a whole table: size ... time algbw busbw")
    if len(log.pending) >= MOST_ROWS:
        raise log.runs.refuse(f"more than {MOST_ROWS} rows of a table", where, "Keep those that are to be used")
    seconds = positive(float(row[column]), log.runs.file, where) / log.per_second
    group, _ = _ranks(log, where)  # whoever lacks ranks is told so at the first row
    bandwidth = row.get(column.replace("time", "algbw"))
    if not _counts(row, size, group.ranks):
        log.runs.over.note(CANNOT, where)
    elif not log.runs.contradict(size, seconds, bandwidth, where):
        log.pending.append((log.test, size, seconds, where))


def _counts(row: dict[str, str], size: int, ranks: int) -> bool:
    """Whether so many elements are the size: all of them, or one rank's part, as some tests print."""
    width, count = WIDTHS.get(row.get("type", "")), int(row.get("count", 0))
    return not width or count * width == size or size // ranks // width == count


def _is_wrong(cell: str) -> bool:
    """Whether a count of wrong elements is one: ``2e+06``, ``nan``; not ``N/A``, where nobody looked."""
    return cell != "N/A" and float(cell.rstrip("*")) != 0
