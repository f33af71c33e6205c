"""Trained models of runs: exported for other programs, or continuing a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from plait.train.checkpoint.export import Exported
    from plait.train.sample import Sampler


Format = Literal["huggingface", "torchtitan"]


def export_run(run: Path | str, out: Path | str, step: int | None = None, format: Format = "huggingface") -> Exported:
    """Write a checkpoint of a run as a Hugging Face folder, or as torchtitan's. step: of the checkpoint;
    None: the newest that is whole. Raises CheckpointError."""
    from plait.train.checkpoint import export

    write = export.export_torchtitan if format == "torchtitan" else export.export_run
    return write(Path(run), Path(out), step)


def sampler(run: Path | str, step: int | None = None) -> Sampler:
    """The model of a run, which continues texts with ``generate``. step: of the checkpoint; None: the newest
    that is whole. Raises CheckpointError."""
    from plait.train.sample import Sampler

    return Sampler.of_run(Path(run), step)
