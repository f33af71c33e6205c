"""Folders of which files are cut off, damaged, or somebody else's: what cannot be read is told and
left out, and nothing ends in a traceback."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.api.diagnosing import explain_hang, report_of
from plait.core.base.errors import PlaitError
from plait.core.record.ring import HEADER, LIVE_OFFSET, RECORD, RecordKind, call_of, signature_of
from plait.core.record.ring_writer import RingWriter, this_process
from plait.core.runs.attempts import Attempt, read_attempts, write_attempts
from plait.core.runs.evidence import FILE, Evidence, Verdict, WaitLink, ring_path, write_hang
from plait.core.runs.memory_peaks import TENSORS
from plait.core.runs.rank_reports import RankReport, request_reports, write_report
from plait.diagnose.measured.reading import read_run
from plait.diagnose.series import attempts_of, memory_of, series_of
from tests.support.recordings.made import Job, write_run

RANKS = 3
SIGNATURE = signature_of("all_reduce", "float32", 16)


@pytest.fixture(scope="module", autouse=True)
def soon() -> Iterator[None]:
    """A call of half a second is suspicious."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plait.api.diagnosing.deadlines_of", lambda folder: {"deadline": 0.1, "first": 0.2})
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of which everything is there: rank 2 does something else, and the others wait for
    it."""
    folder = write_run(tmp_path_factory.mktemp("whole") / "run", Job(dp=RANKS, pp=1, steps=6), hosts=RANKS)
    (folder / "rings").mkdir()
    request_reports(folder)
    for rank in range(RANKS):
        header = this_process(rank=rank, world=RANKS, capacity=32)
        ring = RingWriter(ring_path(folder, rank), header)
        name, group, now = ring.name("op"), ring.group(range(RANKS), "dp"), time.monotonic_ns()
        for number in range(40):
            at = now - (500 - number) * 10**6
            ring.begin(RecordKind.COMPUTE, name, number, at, at, at + 10**5)
            if number == 39 and rank == 2:
                break  # the others are in a call that it has not begun
            ended = 0 if number == 39 else at + 2 * 10**5
            ring.begin(RecordKind.COLLECTIVE, name, number, at, at, ended, 64, group, number,
                       call=call_of("all_reduce", "float32"), signature=SIGNATURE)  # fmt: skip
        thread = "works" if rank == 2 else "waits"
        answer = RankReport(rank=rank, token=header.token, wall=time.time_ns(), thread=thread, stack=("a.py:1 f",),
                            address=("127.0.0.1", 9), complete=True)  # fmt: skip
        write_report(folder, answer)
    lines = [{"step": step, "loss": 2.0, "seconds": 0.1, TENSORS: {"stage 0, rank 0": 1000}} for step in range(1, 7)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_attempts(folder, [Attempt(attempt=1, started=1.0, ended=2.0, outcome="failed", hosts=("a",), steps=6)])
    (folder / "checkpoints" / "step-00000004").mkdir(parents=True)
    return folder


def looked_at(folder: Path) -> list[str]:
    """Everything that reads a run's folder; what it was refused with, if it was."""
    refused: list[str] = []
    for look in (_hang, _report, _series):
        try:
            look(folder)
        except PlaitError as error:
            refused.append(str(error))
    assert all(refused)
    return refused


def _hang(folder: Path) -> None:
    found = explain_hang(folder)
    json.dumps(found.to_dict())
    assert found.text()


def _report(folder: Path) -> None:
    report = report_of(read_run(folder))
    json.dumps(report.to_dict(), default=list)
    assert report.text()


def _series(folder: Path) -> None:
    read_attempts(folder)
    run = read_run(folder)
    series_of(run.metrics)
    memory_of(run.metrics)
    attempts_of(run.attempts, live=False)


def test_the_whole_one_is_read(whole: Path) -> None:
    found = explain_hang(whole)
    assert found.verdict.certain
    assert "ank 2" in found.text()
    assert looked_at(whole) == []


def _cut(data: bytes, draw: random.Random, other: bytes) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _flipped(data: bytes, draw: random.Random, other: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.randint(1, 30)):
        if changed:
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _noise(data: bytes, draw: random.Random, other: bytes) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.randbytes(draw.randint(0, 200)) + data[at + draw.randint(0, 200) :]


def _foreign(data: bytes, draw: random.Random, other: bytes) -> bytes:
    return other


def _twice(data: bytes, draw: random.Random, other: bytes) -> bytes:
    return data + data


HARMS: list[Callable[[bytes, random.Random, bytes], bytes]] = [_cut, _flipped, _noise, _foreign, _twice]
slowly = settings(
    max_examples=10, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


@given(seed=st.integers(0, 2**32), harm=st.sampled_from(HARMS), many=st.integers(1, 4))
@slowly
def test_damaged_files(whole: Path, tmp_path_factory: pytest.TempPathFactory, seed: int, harm: Any, many: int) -> None:
    """Of any kind, and several at once."""
    draw = random.Random(seed)
    folder = tmp_path_factory.mktemp("harmed") / "run"
    shutil.copytree(whole, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in draw.sample(files, many):
        path.write_bytes(harm(path.read_bytes(), draw, draw.choice(files).read_bytes()))
    looked_at(folder)
    shutil.rmtree(folder)


@given(seed=st.integers(0, 2**32), words=st.integers(1, 8), at=st.sampled_from(["header", "live", "records"]))
@slowly
def test_rings_with_other_numbers_in_them(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, seed: int, words: int, at: str
) -> None:
    """Of the right form, and with numbers that nobody would write: times to come, ranks without
    end."""
    draw = random.Random(seed)
    folder = tmp_path_factory.mktemp("numbers") / "run"
    shutil.copytree(whole, folder)
    path = ring_path(folder, draw.randrange(RANKS))
    data = bytearray(path.read_bytes())
    first, last = {"header": (8, 300), "live": (LIVE_OFFSET, LIVE_OFFSET + 24), "records": (HEADER, len(data) - 8)}[at]
    for _ in range(words):
        value = draw.choice([0, -1, 1, 2**31 - 1, -(2**63), 2**63 - 1, draw.getrandbits(62), time.monotonic_ns()])
        place = draw.randrange(first, last, 4)
        if at == "records":  # but for the words that tell a torn record
            place = HEADER + (place - HEADER) // RECORD.size * RECORD.size + draw.randrange(4, 52, 8)
        data[place : place + 8] = value.to_bytes(8, "little", signed=True)
    path.write_bytes(data)
    looked_at(folder)
    shutil.rmtree(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@given(
    name=st.sampled_from(["metrics.jsonl", "attempts.jsonl", FILE, "hang/rank-00001.json", "rank_table.json"]),
    value=JSON, place=st.integers(0, 2**16), other=st.booleans(),
)  # fmt: skip
@slowly
def test_values_of_other_types(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, name: str, value: Any, place: int, other: bool
) -> None:
    """JSON that is well formed, with something else in the place of one value, or of all."""
    folder = tmp_path_factory.mktemp("values") / "run"
    shutil.copytree(whole, folder)
    write_hang(
        folder, Verdict(cause="stopped", why="Rank 1.", ranks=(1,), chain=(WaitLink(ranks=(0,), call="x", on=(1,)),)),
        [Evidence(rank=0)],
    )  # fmt: skip
    path = folder / name
    if name != FILE:
        (folder / FILE).unlink()
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    number = place % len(lines)
    known = json.loads(lines[number])
    lines[number] = json.dumps(value if other else _changed(known, value, place))
    path.write_text("\n".join(lines) + "\n")
    looked_at(folder)
    shutil.rmtree(folder)


def _changed(known: Any, value: Any, place: int) -> Any:
    """The value with another one somewhere in it."""
    if isinstance(known, dict) and known:
        key = sorted(known)[place % len(known)]
        return known | {key: _changed(known[key], value, place // 7)}
    if isinstance(known, list) and known:
        at = place % len(known)
        return [*known[:at], _changed(known[at], value, place // 7), *known[at + 1 :]]
    return value
