"""What nccl-tests write with ``-J FILE``, and rccl-tests with ``-Z json -x FILE``.

===========  =====================================================================================
known        of nccl-tests: args (which test), nccl_version, config (nthreads, ngpus, devices),
             results (size, out_of_place and in_place: time, nwrong), out_of_bounds. Of rccl-tests:
             rows of name, size, inPlace, time, wrong, ranks, ranksPerNode, gpusPerRank
passed over  rows whose results are wrong, or whose time contradicts their bandwidth; all rows of
             a file that is not okay without saying which, rows of 0 bytes, rows of tests that no plan
             uses; other keys
refused      a file without ranks, results or a test's name; processor times (``-C 1``); values of
             another type, times that cannot be
===========  =====================================================================================
"""

from __future__ import annotations

import re
from typing import Any, cast

from plait.core.base.passed_over import PassedOver
from plait.core.cluster.profile import Group, Profile
from plait.plan.nccl_runs import MOST_RANKS, NO_END, TESTS, WRONG, Runs, group_of, positive

MOST_OF_A_PROCESS = 1024
"""GPUs."""
NO_NAME = (
    "missing name(s) of GPUs: of a process the file names the first, and config.nthreads and config.ngpus count the "
    "others as further ranks of its host"
)
_NAME = re.compile(r"(\w+?)_perf\w*$")


def looks(values: Any) -> bool:
    """Whether a JSON document is one of these."""
    if isinstance(values, dict):
        return {"args", "config"} <= cast("dict[str, Any]", values).keys()
    rows = cast("list[Any]", values) if isinstance(values, list) else []
    return bool(rows) and isinstance(rows[0], dict) and {"algBw", "inPlace"} <= cast("dict[str, Any]", rows[0]).keys()


def read_json(values: Any, file: str, date: str, over: PassedOver) -> Profile:
    """The profile of a document. date: of the file. Raises JobError naming the key."""
    if isinstance(values, list):
        return _rccl(cast("list[Any]", values), Runs(file, over)).profile(date, "rccl-tests")
    return _nccl(cast("dict[str, Any]", values), Runs(file, over)).profile(date, "nccl-tests")


def _nccl(values: dict[str, Any], runs: Runs) -> Runs:
    told = _list(values, "args", runs)
    program = told[0] if told and isinstance(told[0], str) else ""
    found = _NAME.search(program)
    test = found[1] if found else ""
    if isinstance(code := values.get("nccl_version"), int):
        runs.versions["nccl"] = f"{code // 10000}.{code // 100 % 100}.{code % 100}"
    ranks = _ranks(_table(values, "config", runs), runs)
    rows = _list(values, "results", runs)
    bounds = values.get("out_of_bounds")
    okay = not isinstance(bounds, dict) or str(cast("dict[str, Any]", bounds).get("okay")).lower() == "true"
    if bounds is None:
        runs.over.note(NO_END, "out_of_bounds")
    wrong = any(_is_wrong(half.get("nwrong")) for row in rows for half in _halves(row))
    if not okay and not wrong:
        runs.over.note("rows of a table that FAILED without saying which", "out_of_bounds", len(rows))
        return runs
    shape = group_of(ranks, runs, "config.devices") if rows else None
    for number, row in enumerate(rows):
        assert shape
        _result(test, row, f"results[{number}]", shape, runs)
    return runs


def _result(test: str, row: Any, where: str, ranks: tuple[Group, int], runs: Runs) -> None:
    size = row.get("size") if isinstance(row, dict) else None
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise runs.refuse("has no size", where, "Give the file as the test wrote it")
    if runs.passes_over(test, size, where):
        return
    if any(_is_wrong(half.get("nwrong")) for half in _halves(row)):
        runs.over.note(WRONG, where)
        return
    order = ("in_place", "out_of_place") if test == "all_reduce" else ("out_of_place", "in_place")
    half = next((row[key] for key in order if isinstance(row.get(key), dict)), {})
    if "cpu_time" in half:
        raise runs.refuse("has the processor's times, not the collective's", where, "Run the test without -C 1")
    seconds = positive(half.get("time"), runs.file, f"{where}.time") / 1e6
    if not runs.contradict(size, seconds, half.get("alg_bw"), where):
        runs.add(test, ranks, size, seconds)


def _ranks(config: dict[str, Any], runs: Runs) -> dict[int, dict[int, str]]:
    """Hosts by group and rank. Of a process with several GPUs the file names the first."""
    each = 1
    for key in ("nthreads", "ngpus"):
        count = config.get(key, 1)
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST_OF_A_PROCESS:
            raise runs.refuse(f"{str(count)[:40]} is not allowed", f"config.{key}", "Allowed: a whole number above 0")
        each *= count
    if each > MOST_OF_A_PROCESS:
        raise runs.refuse(
            f"{each} GPUs of a process are not allowed", "config.ngpus", "Allowed: a whole number above 0"
        )
    ranks: dict[int, dict[int, str]] = {}
    for number, told in enumerate(_list(config, "devices", runs)):
        where = f"config.devices[{number}]"
        one = cast("dict[str, Any]", told) if isinstance(told, dict) else {}
        rank, group, host = one.get("rank"), one.get("group", 0), one.get("hostname")
        if not isinstance(rank, int) or not isinstance(group, int) or not isinstance(host, str):
            raise runs.refuse("has no rank and hostname", where, "Give the file as the test wrote it")
        members = ranks.setdefault(group, {})
        if rank in members or rank < 0:
            fix = "Build nccl-tests with MPI=1, so that its processes are one job"
            raise runs.refuse(f"rank {rank} stands here a second time" if rank in members else "is no rank", where, fix)
        members |= dict.fromkeys(range(rank, rank + each), host)
        runs.over.note(NO_NAME, where, each - 1)
        if len(members) > MOST_RANKS:
            raise runs.refuse(f"more than {MOST_RANKS} ranks", where, "Give the file as the test wrote it")
        if isinstance(device := one.get("device_info"), str):
            runs.device = runs.device or device
    return ranks


def _rccl(rows: list[Any], runs: Runs) -> Runs:
    for number, told in enumerate(rows):
        where = f"[{number}]"
        row = cast("dict[str, Any]", told) if isinstance(told, dict) else {}
        size, name = row.get("size"), row.get("name")
        if not isinstance(size, int) or isinstance(size, bool) or not isinstance(name, str):
            raise runs.refuse("has no name and size", where, "Give the file as the test wrote it")
        plain = re.sub("[^a-z]", "", name.lower())
        test = next((one for one in TESTS if one.replace("_", "") == plain), plain)
        if runs.passes_over(test, size, where):
            continue
        if _is_wrong(row.get("wrong")):
            runs.over.note(WRONG, where)
        elif bool(row.get("inPlace")) != (test == "all_reduce"):
            runs.over.note("rows of the other place: all-reduces are taken in place, the others out of place", where)
        else:
            seconds = positive(row.get("time"), runs.file, f"{where}.time") / 1e6
            if not runs.contradict(size, seconds, row.get("algBw"), where):
                runs.add(test, _shape(row, where, runs), size, seconds)
    return runs


def _shape(row: dict[str, Any], where: str, runs: Runs) -> tuple[Group, int]:
    counts = [row.get(key) for key in ("ranks", "ranksPerNode", "gpusPerRank")]
    if not all(isinstance(count, int) and not isinstance(count, bool) and count > 0 for count in counts):
        fix = "Import the log that the test printed instead, with its lines '#  Rank  0 ...'"
        raise runs.refuse("does not say how many ranks there were on how many nodes", where, fix)
    processes, each, gpus = cast("list[int]", counts)
    ranks, per_node = processes * gpus, min(processes, each) * gpus
    group = Group(ranks=ranks, per_node=per_node, nodes=-(-ranks // per_node), stride=1, at_once=1)
    return group, per_node


def _halves(row: Any) -> list[dict[str, Any]]:
    told = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
    return [half for key in ("out_of_place", "in_place") if isinstance(half := told.get(key), dict)]


def _is_wrong(count: Any) -> bool:
    """Whether a count of wrong elements is one; None and N/A: nobody looked."""
    if count in (None, "N/A", "n/a", ""):
        return False
    try:
        return float(count) != 0
    except (TypeError, ValueError, OverflowError):
        return True


def _list(values: dict[str, Any], key: str, runs: Runs) -> list[Any]:
    if not isinstance(found := values.get(key), list):
        raise runs.refuse("is no list", key, "Give the file as the test wrote it")
    return cast("list[Any]", found)


def _table(values: dict[str, Any], key: str, runs: Runs) -> dict[str, Any]:
    if not isinstance(found := values.get(key), dict):
        raise runs.refuse("is no table", key, "Give the file as the test wrote it")
    return cast("dict[str, Any]", found)
