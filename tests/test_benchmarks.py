"""What benchmarks share: a process is measured by itself."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from keeping import commit, keep, make_parser, timed


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
