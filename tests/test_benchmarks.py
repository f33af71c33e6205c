"""What benchmarks share: a process is measured by itself."""

from __future__ import annotations

import json
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from keeping import HERE, commit, keep, make_parser, timed

from plait.launch.local.local import local_start, run_ranks
from tests.support.lab import wait_until


@pytest.mark.system
def test_the_largest_process_does_not_stand_for_those_after_it() -> None:
    here = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10  # a child's size begins with it
    large, small = (
        timed([sys.executable, "-c", f"size = len(b'x' * ({mib} << 20)); print('done')"]) for mib in (here + 200, 1)
    )
    assert large.output == small.output == "done\n"
    assert large.largest_mib > here + 200
    assert small.largest_mib < here + 100
    assert 0 < small.processor_seconds < 10 * small.seconds


@pytest.mark.system
def test_more_than_a_pipe_holds_is_kept() -> None:
    assert len(timed([sys.executable, "-c", "print('x' * 10**6)"]).output) == 10**6 + 1


@pytest.mark.system
def test_a_command_that_fails_is_an_error_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        timed([sys.executable, "-c", "import sys; sys.exit('no such thing')"])
    assert caught.value.returncode == 1
    assert "no such thing" in capsys.readouterr().err


@pytest.mark.system
def test_a_kept_figure_says_when_where_and_of_what_it_is(tmp_path: Path) -> None:
    kept = tmp_path / "folder/kept.json"
    keep({"speedup": 1.5}, make_parser(None, rounds=1).parse_args(["--save", str(kept)]))
    told = json.loads(kept.read_text())
    assert told["speedup"] == 1.5
    assert {"date", "machine", "load_before", "stolen", "commit", "command"} < told.keys()
    assert told["commit"].rstrip("+") == commit().rstrip("+") and told["load_before"] >= 0


ENDS = """
import subprocess, sys, time
from pathlib import Path
from keeping import finish

def main():
    child = subprocess.Popen(["sleep", "600"])
    Path(sys.argv[1]).write_text(str(child.pid))
    child.wait()

finish(main)
"""


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_benchmark_ends_of_a_signal_with_what_it_has_started(tmp_path: Path, number: signal.Signals) -> None:
    benchmark = subprocess.Popen([sys.executable, "-c", ENDS, str(tmp_path / "pid")], cwd=HERE)
    wait_until((tmp_path / "pid").exists, "it does not start")
    wait_until((tmp_path / "pid").read_text, "it does not start")
    child = int((tmp_path / "pid").read_text())
    benchmark.send_signal(number)
    assert benchmark.wait(60) == 128 + number
    wait_until(lambda: not Path(f"/proc/{child}").exists(), "its child goes on")


@pytest.mark.system
def test_every_way_brings_a_stage_on_another_mesh_what_it_was_sent(tmp_path: Path) -> None:
    """A rank that gets something else fails, and so does the run: of h and two skips, of four
    micro-batches, one rank after a forward and two after a backward, by five ways."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    setup = {
        "hosts": 3, "ranks_per_host": 1, "degrees": [(1, 2), (1, 1)], "layers": 10, "levels": 2,
        "micro_batches": 4, "forward": 0.001, "boundary": (16, 2, 32), "rounds": 1,
    }  # fmt: skip
    out = tmp_path / "out.json"
    argv = [sys.executable, str(HERE / "pipeline_meshes_ranks.py"), str(out), json.dumps(setup)]
    run_ranks(local_start(argv, 3, port), 3, tmp_path / "logs", timeout=120)
    found = json.loads(out.read_text())
    assert found["checked"] == 5 * 4 * 3 * (1 + 2)
    forward, backward = found["transfer_s"]["alpa"]
    assert backward == pytest.approx(2 * forward)  # to two hosts, a copy each
    assert forward < found["transfer_s"]["broadcast"][1] < backward
