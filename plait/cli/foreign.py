"""Recordings of other tools on the command line: read where they lie, or made into a run's folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import typer

from plait.cli import terminal

if TYPE_CHECKING:
    from plait.diagnose.importing import Imported


def imported(files: Sequence[Path], out: Path) -> Imported:
    """Make the folder ``out`` of files, and print which were skipped. Raises as ``import_traces`` does."""
    import sys

    from plait.diagnose.importing import import_traces

    return import_traces(files, out, lambda line: typer.echo(terminal.fitted(line, sys.stderr), err=True))


@contextmanager
def as_run(paths: Sequence[Path]) -> Iterator[Path]:
    """The folder of a run: the one that is named, or one made of recordings of others, while the block runs.
    Raises DataError for several paths of which some are no recordings."""
    from plait.diagnose.importing import recordings_in

    if len(paths) == 1 and (not paths[0].exists() or _is_run(paths[0])):
        yield paths[0]
        return
    files = recordings_in(paths)
    if not files and len(paths) == 1:
        yield paths[0]
        return
    with TemporaryDirectory(prefix="plait-") as folder:
        out = Path(folder) / "run"
        imported(files, out)
        yield out


def _is_run(path: Path) -> bool:
    """Whether a folder is a run's, of which something may be missing."""
    return path.is_dir() and any((path / name).exists() for name in ("timeline", "plan.json", "rings", "hang.json"))
