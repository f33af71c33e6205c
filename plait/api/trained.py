"""Trained models of runs: exported for other programs, or continuing a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from plait.train.checkpoint.export import Exported
    from plait.train.sample import Sampler


Format = Literal["huggingface", "torchtitan"]


def export_run(
    run: Path | str, out: Path | str, step: int | str | None = None, format: Format = "huggingface"
) -> Exported:
    """Write a checkpoint of a run as a Hugging Face folder, or as torchtitan's. step: of the checkpoint, or
    ``best``, that with the least evaluation loss; None: the newest that is whole. Raises CheckpointError."""
    from plait.train.checkpoint import export
    from plait.train.checkpoint.whole import step_of

    write = export.export_torchtitan if format == "torchtitan" else export.export_run
    return write(Path(run), Path(out), step_of(Path(run), step))


def sampler(run: Path | str, step: int | str | None = None) -> Sampler:
    """The model of a run, which continues texts with ``generate``. step: of the checkpoint, or ``best``;
    None: the newest that is whole. Raises CheckpointError."""
    from plait.train.checkpoint.whole import step_of
    from plait.train.sample import Sampler

    return Sampler.of_run(Path(run), step_of(Path(run), step))
