"""What of an evaluation is trained on, too: its loss says nothing of text that the model has not seen."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.train.data.sets import DataSet
from plait.train.data.sources import SourceFile


@dataclass(frozen=True)
class SetFiles:
    """A source of a job and its files. Without any it is a prepared corpus, or somewhere else."""

    set: DataSet
    files: Sequence[SourceFile]

    def items(self) -> Iterator[tuple[Hashable, str]]:
        """What its text is in, with a name for people: files, whatever paths lead to them; a prepared corpus;
        addresses."""
        if self.set.made:
            yield _identity(self.set.folder), str(self.set.folder)
        elif self.set.is_elsewhere:
            yield from ((path, path) for path in self.set.source.paths)
        yield from ((_identity(file.path), str(file.path)) for file in self.files if file.bytes)


def also_trained_on(training: Sequence[SetFiles], evaluated: Sequence[SetFiles]) -> str:
    """A sentence that names the sets of ``data.eval`` which hold files of training data. Empty if none
    does."""
    asked = [(one.set.name, dict(one.items())) for one in evaluated]
    wanted = {item for _, items in asked for item in items}
    trained = {item for one in training for item, _ in one.items() if item in wanted} if wanted else set[Hashable]()
    found = [_told(name, items, both) for name, items in asked if (both := [at for at in items if at in trained])]
    if not found:
        return ""
    return (
        f"data.eval has what is trained on, too: {'; '.join(found)}. Losses of it tell nothing of text that the model "
        "has not seen. Take it out of the training data, or name other text."
    )


def _told(name: str, items: Mapping[Hashable, str], both: Sequence[Hashable]) -> str:
    first = items[both[0]]
    if len(items) == 1:
        return f"eval_loss/{name} ({first})"
    return f"eval_loss/{name} ({len(both):,} of {len(items):,} files, the first {first})"


def _identity(path: Path) -> Hashable:
    """What is the same for all paths that lead to a file. Of Megatron's pair: that of its tokens."""
    try:
        found = os.stat(path.with_suffix(".bin") if path.suffix == ".idx" else path)
    except OSError:  # whoever reads it says so
        return str(path)
    return found.st_dev, found.st_ino
