"""``plait diagnose`` and ``plait trace`` as users call them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from plait.cli.main import app
from plait.core.base.errors import DataError, JobError, LaunchError
from plait.core.runs.evidence import Evidence, Verdict, write_hang
from tests.support.recordings.made import At, Job, write_run
from tests.support.recordings.theirs import dump, entry, kineto, waiting, written

TIER = "unit"


def slow(at: At) -> float:
    return (0.1 if at.way == "forward" else 0.2) * (1.5 if (at.dp, at.stage) == (1, 0) else 1.0)


CLEAN, SLOW = Job(dp=4, pp=2), Job(dp=4, pp=2, compute=slow)


def run_cli(*words: object) -> Result:
    found = CliRunner().invoke(app, [str(word) for word in words])
    if found.exception and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found


def read(*words: object) -> tuple[int, dict[str, Any]]:
    found = run_cli("diagnose", *words, "--json")
    return found.exit_code, json.loads(found.stdout)


def test_a_slow_rank_is_exit_status_3(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", SLOW, hosts=8)
    found = run_cli("diagnose", run)
    assert found.exit_code == 3
    for words in (
        "8 ranks (pp 2, dp 4)", "SLOW PROCESSOR: rank 1 on h1 (stage 0, dp 1), since step 1",
        "If it were as fast as the others",
        "the mean rank's mean step", "goodput", "The plan holds no measured costs",
    ):  # fmt: skip
        assert words in found.stdout
    status, report = read(run)
    assert status == 3
    one = report["stragglers"][0]
    assert (one["what"], one["ranks"], one["hosts"], one["since"]) == ("slow processor", [1], ["h1"], 1)
    assert 0 < one["cost_seconds_per_step"] < report["steps"]["median"]
    assert sum(share["seconds"] for share in report["shares"]) == pytest.approx(report["steps"]["median"], rel=0.1)


CUT = Verdict(cause="stopped", why="Rank 3 (h1) is stopped.", ranks=(3,), hosts=("h1",))
UNKNOWN = Verdict(cause="unknown", why="Nothing tells which.")


@pytest.mark.parametrize(("verdict", "status"), [(CUT, 3), (UNKNOWN, 1)])
def test_a_run_that_hung_is_said_to_have_hung(tmp_path: Path, verdict: Verdict, status: int) -> None:
    run = write_run(tmp_path / "run", CLEAN)
    write_hang(run, verdict, [Evidence(rank=rank) for rank in range(8)])
    found = run_cli("diagnose", run)
    assert found.exit_code == status
    assert f"{verdict.heading}. {verdict.why}" in found.stdout
    assert f"plait diagnose {run} --hang" in found.stdout
    assert "No straggler" in found.stdout, "what its steps tell is said as well"
    code, report = read(run)
    assert (code, report["hang"]["cause"], report["hang"]["ranks"]) == (status, verdict.cause, list(verdict.ranks))


def test_of_a_run_that_hung_in_its_first_step_that_is_all(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", CLEAN)
    for file in (run / "timeline").iterdir():
        file.unlink()
    write_hang(run, CUT, [Evidence(rank=rank) for rank in range(8)])
    found = run_cli("diagnose", run)
    assert found.exit_code == 3
    assert CUT.why in found.stdout
    assert "holds no timeline" in found.stdout


def test_a_damaged_verdict_on_a_hang_is_told(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", CLEAN)
    (run / "hang.json").write_text("[" * 100_000)
    code, report = read(run)
    assert (code, report["hang"]) == (0, None)
    assert any("hang.json is damaged" in note for note in report["notes"])


def test_every_json_counts_what_was_left_out(tmp_path: Path) -> None:
    run, other = write_run(tmp_path / "run", CLEAN), write_run(tmp_path / "other", CLEAN)
    for folder, count in ((run, 2), (other, 1)):
        for part in sorted((folder / "timeline").iterdir())[:count]:
            part.write_bytes(b"nothing")
    unread = "files of the timeline that cannot be read"
    assert [(row["what"], row["count"]) for row in read(run)[1]["passed_over"]] == [(unread, 2)]
    found = json.loads(run_cli("diagnose", run, "--timeline", "--json").stdout)
    assert [(row["what"], row["count"]) for row in found["passed_over"]] == [(unread, 2)]
    found = json.loads(run_cli("diagnose", run, "--timeline", "--against", other, "--json").stdout)
    assert [(row["what"], row["count"]) for row in found["passed_over"]] == [(unread, 3)]
    assert len(found["notes"]) == 3
    assert f"passed over 2 {unread}" in run_cli("view", run, "--save", tmp_path / "r.html").stderr
    assert "truncated or no Parquet" in run_cli("trace", "export", run, "-o", tmp_path / "t.json").stdout


def test_a_clean_run_is_exit_status_0(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", CLEAN)
    found = run_cli("diagnose", run)
    assert found.exit_code == 0
    assert "No straggler. The latest of 8 comparable ranks is rank" in found.stdout
    status, report = read(run)
    assert (status, report["stragglers"], report["version"]) == (0, [], 3)
    assert report["predicted"] is None and "plait measure machine" in report["notes"][0]


def test_traces_go_out_and_come_in(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", CLEAN)
    out = tmp_path / "t.pftrace"
    found = run_cli("trace", "export", run, "--ranks", "0-1,4", "--steps", "3-4", "-o", out)
    assert "of 3 ranks and 2 steps" in found.stdout
    assert out.stat().st_size > 1000
    as_json = tmp_path / "t.json"
    run_cli("trace", "export", run, "-o", as_json)
    events = json.loads(as_json.read_text())["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {18, 19, 20}, "counted from 1"
    for words, said in (
        (("--ranks", "99"), "there are no spans"), (("--ranks", "x"), "no number and no range"),
        (("--steps", "4-2"), "ends before it begins"), (("--ranks", "0-99999999"), "more than anybody"),
        (("--ranks", "²"), "no number and no range"), (("--steps", "1-²"), "no number and no range"),
        (("--ranks", "9" * 5000), "no number and no range"), (("--ranks", "9" * 18), "there are no spans"),
    ):  # fmt: skip
        with pytest.raises((DataError, JobError), match=said):
            run_cli("trace", "export", run, *words, "-o", out)
    with pytest.raises(JobError, match="is no format for traces"):
        run_cli("trace", "export", run, "-o", tmp_path / "t.txt")
    with pytest.raises(DataError, match="of 1 file, none could be used"):
        run_cli("trace", "import", as_json, "--out", tmp_path / "again")


def test_where_no_trace_can_be_written(tmp_path: Path) -> None:
    run, text = write_run(tmp_path / "run", CLEAN), tmp_path / "t.txt"
    with pytest.raises(JobError, match=r"plan.json is a file of the run. Choose another"):
        run_cli("trace", "export", run, "-o", run / "plan.json")
    text.write_text("mine")
    (tmp_path / "folder.json").mkdir()
    for target in (tmp_path / "folder.json", Path("/proc/x.pftrace"), text / "x.json"):
        with pytest.raises(LaunchError, match=r"cannot be written: .* Choose another with --out"):
            run_cli("trace", "export", run, "-o", target)
    good = tmp_path / "good.json"
    good.write_text(json.dumps(kineto(0)))
    for target in (text / "x", Path("/proc/x")):
        with pytest.raises(LaunchError, match=r"cannot be written: .* Choose another with --out"):
            run_cli("trace", "import", good, "--out", target)
    with pytest.raises(JobError, match="is not empty"):
        run_cli("trace", "import", good, "--out", text)
    assert text.read_text() == "mine"


def test_recordings_of_others_are_read_where_they_lie(tmp_path: Path) -> None:
    """Files, or the folder that they are in; nothing is written beside them."""
    files = written(tmp_path, *(kineto(rank, slow=1.3 if rank == 2 else 1.0) for rank in range(4)))
    for words in (files, [tmp_path]):
        found = run_cli("diagnose", *words)
        assert found.exit_code == 3
        assert "SLOW PROCESSOR: rank 2" in found.stdout
        assert "plait-" not in found.stdout, "the folder that was made in between is nobody's concern"
    assert sorted(tmp_path.iterdir()) == files


def test_a_late_host_is_said_in_the_text(tmp_path: Path) -> None:
    written(tmp_path, *(kineto(rank, late=200.0 if rank == 2 else 0.0) for rank in range(4)))
    found = run_cli("diagnose", tmp_path)
    assert found.exit_code == 3
    assert "LATE: rank 2 is the last to come to dp collectives in 100% of steps, 200 µs of a step" in found.stdout
    assert "its host is late" in found.stdout
    assert read(tmp_path)[1]["late"]["rank"] == 2


def test_dumps_say_why_a_job_hangs(tmp_path: Path) -> None:
    dumps = [dump(rank, *([] if rank == 2 else [waiting(5, 9000)]), world=4) for rank in range(3)]
    written(tmp_path, *dumps, named="nccl_trace_rank_{}")
    for words in (("diagnose", tmp_path), ("diagnose", "--hang", tmp_path)):
        found = run_cli(*words)
        assert found.exit_code == 3
        assert "Rank 2 has not begun all-reduce 5 of default_pg group 0-3, where ranks 0, 1 wait" in found.stdout
        assert "Rank 3 left no dump" in found.stdout
    status, report = read(tmp_path)
    assert (status, report["hang"]["cause"], report["hang"]["ranks"]) == (3, "missing", [2])
    out = tmp_path / "run"
    told = run_cli("trace", "import", *sorted(tmp_path.glob("nccl*")), "--out", out)
    assert "Rank 2 has not begun all-reduce 5" in told.stdout
    assert "the job has 4 ranks, and rank 3 left no file" in told.stdout
    assert run_cli("diagnose", "--hang", out).exit_code == 3


def test_of_healthy_dumps_nothing_is_wrong(tmp_path: Path) -> None:
    timed, untimed = tmp_path / "timed", tmp_path / "untimed"
    for folder, more in ((timed, {}), (untimed, {"time_created_ns": 0, "time_discovered_started_ns": 0})):
        folder.mkdir()
        written(folder, *(dump(rank, entry(5, 9000, 9500, **more), ended=0) for rank in range(2)))
        for words in ((folder,), ("--hang", folder)):
            found = run_cli("diagnose", *words)
            assert (found.exit_code, "Nothing is wrong in the dumps" in found.stdout) == (0, True)


def test_what_was_passed_over_is_printed_and_kept(tmp_path: Path) -> None:
    content = kineto(1)
    content["traceEvents"][3]["dur"] = -1
    files = written(tmp_path, kineto(0), content)
    said = "passed over 1 kernels of which name, time or length cannot be (the first: trace1.json: gemm)"
    found = run_cli("trace", "import", *files, "--out", tmp_path / "run")
    assert said in found.stderr
    for words in ((), ("--timeline",)):
        assert said in run_cli("diagnose", tmp_path / "run", *words).stdout
    row = {"what": "kernels of which name, time or length cannot be", "count": 1, "first": "trace1.json: gemm"}
    assert row in read(tmp_path / "run")[1]["passed_over"]


def test_a_folder_that_holds_no_recordings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("nothing")
    with pytest.raises(DataError, match="holds no timeline"):
        run_cli("diagnose", tmp_path)
    with pytest.raises(DataError, match="of 1 file, none could be used"):
        run_cli("diagnose", tmp_path / "readme.txt")


def test_dumps_do_not_tell_what_was_hidden(tmp_path: Path) -> None:
    files = written(tmp_path, dump(0), dump(1))
    run_cli("trace", "import", *files, "--out", tmp_path / "run")
    assert "hidden" not in run_cli("diagnose", tmp_path / "run", "--timeline").stdout
    assert json.loads(run_cli("diagnose", tmp_path / "run", "--timeline", "--json").stdout)["hidden"] is None
