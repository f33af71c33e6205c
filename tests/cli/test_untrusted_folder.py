"""A run beside files that somebody else has put there: none of them is executed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from plait.core.base.process import command_of
from tests.support.runs import write_job

HOSTILE = ("json", "secrets", "torch", "numpy", "select", "socket", "polars", "tensorboardX", "plait")
CODE = "open({!r}, 'a').write(__name__ + '\\n'); raise SystemExit(77)\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job beside modules that leave a mark; another folder of them to start from."""
    (tmp_path / "beside").mkdir()
    for place in (tmp_path, tmp_path / "beside"):
        for name in HOSTILE:
            (place / f"{name}.py").write_text(CODE.format(str(tmp_path / "executed")))
    return tmp_path


@pytest.mark.parametrize("tp", [2, 3], ids=["ranks", "forked ranks"])
def test_training_imports_nothing_from_beside_the_job(folder: Path, tp: int) -> None:
    job = write_job(folder, steps=2)
    asked = [f"run.folder={folder / 'runs'}", f"strategy.tp={tp}", "model.hidden=48", "model.num_heads=6"]
    for place in (folder, folder / "beside"):
        done = subprocess.run(
            command_of("plait.cli.main", "train", str(job), *asked, f"run.name={place.name}"),
            cwd=place, capture_output=True, text=True, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert (folder / "runs" / place.name / "timeline").is_dir(), "nothing was collected"
    assert not (folder / "executed").exists(), (folder / "executed").read_text()


def test_a_check_of_this_machine_imports_nothing_from_there(folder: Path) -> None:
    done = subprocess.run(
        command_of("plait.cli.main", "check", "--folder", str(folder / "disk"), "--disk", "0.001"),
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr and "77" not in done.stderr, done.stderr
    assert not (folder / "executed").exists(), (folder / "executed").read_text()
