"""Reader of JSON results of nccl-tests (``-J FILE``) and rccl-tests (``-Z json -x FILE``).

===========  =====================================================================================
read         of nccl-tests: args (the test), nccl_version, config (nthreads, ngpus, devices),
             results (size, out_of_place and in_place: time, nwrong), out_of_bounds. Of rccl-tests:
             rows of name, size, inPlace, time, wrong, ranks, ranksPerNode, gpusPerRank
ignored      rows with wrong results, or whose time contradicts their bandwidth; all rows of a
             failed file that marks no wrong row; rows of 0 bytes; rows of tests that no plan uses;
             other keys
refused      a file without ranks, results or a test's name; processor times (``-C 1``); values of
             another type; impossible times
===========  =====================================================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, cast

from annotated_types import Ge, Le

from plait.core.base.codec.data import decode
from plait.core.base.codec.json_text import is_list, is_table
from plait.core.base.errors import JobError
from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.numbers import Count, Natural, Whole
from plait.core.cluster.profile import Group, Profile
from plait.formats.base.collective_runs import (
    IN,
    NO_END,
    OUT,
    TESTS,
    Measurement,
    Runs,
    group_of,
    version_of,
)

MOST_OF_A_PROCESS = 1024
"""The largest number of GPUs of a process."""
NO_NAME = (
    "missing name(s) of GPUs: of a process the file names the first, and config.nthreads and config.ngpus count the "
    "others as further ranks of its host"
)
_NAME = re.compile(r"(\w+?)_perf\w*$")
_OfAProcess = Annotated[int, Ge(1), Le(MOST_OF_A_PROCESS)]


@dataclass(frozen=True)
class _Device:
    """The first GPU of a process."""

    rank: Natural
    hostname: str
    group: Whole = 0
    device_info: Any = ""


@dataclass(frozen=True)
class _Config:
    devices: tuple[_Device, ...]
    nthreads: _OfAProcess = 1
    ngpus: _OfAProcess = 1


@dataclass(frozen=True)
class _Half:
    time: Any = None
    cpu_time: Any = None
    alg_bw: Any = None
    nwrong: Any = None


@dataclass(frozen=True)
class _Result:
    size: Natural
    out_of_place: _Half | None = None
    in_place: _Half | None = None

    @property
    def halves(self) -> dict[str, Measurement]:
        both = {OUT: self.out_of_place, IN: self.in_place}
        return {
            name: Measurement(half.time, half.alg_bw, half.nwrong, of_processor=half.cpu_time is not None)
            for name, half in both.items() if half
        }  # fmt: skip


@dataclass(frozen=True)
class _File:
    args: tuple[Any, ...]
    config: _Config
    results: tuple[_Result, ...]
    nccl_version: Any = None
    out_of_bounds: Any = None


@dataclass(frozen=True)
class _Row:
    """A row of rccl-tests; field names are those of the file."""

    name: str
    size: Natural
    ranks: Count
    ranksPerNode: Count  # noqa: N815
    gpusPerRank: Count  # noqa: N815
    inPlace: Any = None  # noqa: N815
    time: Any = None
    algBw: Any = None  # noqa: N815
    wrong: Any = None

    @property
    def shape(self) -> tuple[Group, int]:
        ranks, per_node = self.ranks * self.gpusPerRank, min(self.ranks, self.ranksPerNode) * self.gpusPerRank
        return Group(ranks=ranks, per_node=per_node, nodes=-(-ranks // per_node), stride=1, at_once=1), per_node


def is_results(values: Any) -> bool:
    """True if a JSON document is a result of nccl-tests or rccl-tests."""
    if is_table(values):
        return {"args", "config"} <= values.keys()
    rows = values if is_list(values) else []
    return bool(rows) and isinstance(rows[0], dict) and {"algBw", "inPlace"} <= cast("dict[str, Any]", rows[0]).keys()


def read_json(values: Any, file: str, date: str, over: IgnoredInput) -> Profile:
    """Return the profile of a document. date: the file's. Raises JobError naming the key."""
    runs = Runs(file, over)
    try:
        if is_list(values):
            _rccl(values, runs)
            return runs.profile(date, "rccl-tests")
        _nccl(decode(_File, values, ignore_unknown=True), runs)
    except JobError as error:
        raise error.in_file(file) from None
    return runs.profile(date, "nccl-tests")


def _nccl(document: _File, runs: Runs) -> None:
    found = _NAME.search(str(document.args[0])) if document.args else None
    test = found[1] if found else ""
    if isinstance(document.nccl_version, int):
        runs.versions["nccl"] = version_of(document.nccl_version)
    _ranks(document.config, runs)
    runs.over.note(NO_END, "out_of_bounds", document.out_of_bounds is None)
    bounds = document.out_of_bounds if is_table(document.out_of_bounds) else {"okay": True}
    if document.results:
        group_of(runs, "config.devices")
    for number, row in enumerate(document.results):
        where = f"results[{number}]"
        if (seconds := runs.seconds(test, row.size, row.halves, where)) is not None:
            runs.pending.append((test, row.size, seconds, where))
    runs.close("out_of_bounds", failed=str(bounds.get("okay")).lower() != "true")


def _ranks(config: _Config, runs: Runs) -> None:
    each = config.nthreads * config.ngpus
    if each > MOST_OF_A_PROCESS:
        fix = f"Allowed: at most {MOST_OF_A_PROCESS}"
        raise runs.refuse(f"{each} GPUs of a process are not allowed", "config.ngpus", fix)
    for number, one in enumerate(config.devices):
        where = f"config.devices[{number}]"
        device = one.device_info if isinstance(one.device_info, str) else ""
        runs.rank(one.group, one.rank, one.hostname, device, where, each)
        runs.over.note(NO_NAME, where, each - 1)


def _rccl(rows: list[Any], runs: Runs) -> None:
    for number, values in enumerate(rows):
        where = f"[{number}]"
        row = decode(_Row, values, where, ignore_unknown=True)
        plain = re.sub("[^a-z]", "", row.name.lower())
        test = next((one for one in TESTS if one.replace("_", "") == plain), plain)
        seconds = runs.seconds(test, row.size, {OUT: Measurement(row.time, row.algBw, row.wrong)}, where)
        if bool(row.inPlace) == (test == "all_reduce") and seconds is not None:
            runs.add(test, row.shape, row.size, seconds)
        elif seconds is not None:
            runs.over.note("rows of the other place: all-reduces are taken in place, the others out of place", where)
