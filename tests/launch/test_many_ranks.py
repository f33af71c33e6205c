"""A launcher of many ranks, which are stand-ins: limits are raised, all are heard, all end when they are
asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CODE = """
import json, resource, sys
from pathlib import Path
from benchmarks.launcher import measured
resource.setrlimit(resource.RLIMIT_NOFILE, (256, int(sys.argv[2])))
print(json.dumps(measured(300, 0.5, Path(sys.argv[1]))))
"""
REPOSITORY = Path(__file__).resolve().parents[2]


def run(folder: Path, most: int) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", CODE, str(folder), str(most)]
    return subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=120)


def test_more_ranks_than_the_soft_limit_of_files_are_run_and_stopped(tmp_path: Path) -> None:
    done = run(tmp_path, 4096)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["soft limit before"] == 256
    assert 600 < found["open files"] < found["limit of open files"] < 900
    assert found["of it for ranks, MiB"] < 30


def test_a_hard_limit_that_is_too_low_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, 512)
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    assert "300 ranks take this process" in said and "the system allows it 512 (ulimit -Hn)" in said
