"""The folder of a run, as named by the user."""

from __future__ import annotations

from pathlib import Path

from plait.core.base.errors import DataError

FOLDER = Path("runs")
"""Default of ``run.folder``: the folder that holds the folders of runs."""


def check_run_folder(folder: Path, problem: str = "") -> None:
    """Raise DataError for a path that is no folder, naming the run that was probably meant.
    problem: what is wrong with an existing folder; empty if nothing is."""
    if not folder.is_dir():
        problem = "is a file, and a run is a folder" if folder.is_file() else "no such run folder"
    if problem:
        meant = FOLDER / folder.name
        fix = "Name a folder that plait train has made, such as runs/NAME; plait runs lists them."
        raise DataError(f"{folder}: {problem}. {f'Did you mean {meant}?' if meant.is_dir() else fix}")


def check_started(folder: Path) -> None:
    """Raise DataError for a folder without a run that has started."""
    if not (folder / "plan.json").is_file():
        check_run_folder(folder, "holds no run that has started")
