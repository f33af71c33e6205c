"""What benchmarks share: a process is measured by itself."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
from keeping import timed


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
