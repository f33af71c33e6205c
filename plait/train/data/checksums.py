"""When the checksums of a corpus are compared: at every start, or for a large one once per change of a file.

A start reads corpora of up to ``EVERY_START`` bytes whole: one to two seconds, and more from a slow disk. A
larger one is read when it is first seen. What was found intact is remembered in ``verified.json`` beside
the index, by size, modification time and inode, and only a shard that differs in these is read again. So what
a disk changes by itself in a large corpus, behind the file system's back, is found by whoever deletes
``verified.json``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from plait.core.base.codec.json_text import read_table
from plait.core.base.files import replacing
from plait.train.data.corpus import LARGEST_INDEX, Corpus, Index

VERIFIED_FILE = "verified.json"
EVERY_START = 1 << 30

Stamp = list[int]
"""Size, modification time in ns, inode."""


def is_large(index: Index) -> bool:
    """Whether a start does not read the whole corpus."""
    return sum(shard.bytes for shard in index.shards) > EVERY_START


def verify(corpus: Corpus) -> None:
    """Compare the checksums that need it. Raises ``DamagedCorpus`` naming the first bad shard."""
    if not is_large(corpus.index):
        corpus.verify()
        return
    stamps, known = _stamps(corpus), _remembered(corpus.folder)
    changed = {name for name, stamp in stamps.items() if known.get(name) != stamp}
    corpus.verify(changed)
    if changed:
        remember(corpus, stamps)


def remember(corpus: Corpus, stamps: dict[str, Stamp] | None = None) -> None:
    """Take every shard for intact as it is now; a folder that cannot be written costs the next start some
    time, no more."""
    try:
        with replacing(corpus.folder / VERIFIED_FILE) as path:
            path.write_text(json.dumps(stamps or _stamps(corpus), indent=1) + "\n")
    except OSError:
        pass


def _stamps(corpus: Corpus) -> dict[str, Stamp]:
    found = {file: status for file in corpus.index.files if (status := _status(corpus.folder / file))}
    return {file: [status.st_size, status.st_mtime_ns, status.st_ino] for file, status in found.items()}


def _status(file: Path) -> os.stat_result | None:
    """None for a split without documents, which has no file of ends."""
    try:
        return file.stat()
    except FileNotFoundError:
        return None


def _remembered(folder: Path) -> dict[str, object]:
    """What an earlier start wrote; nothing, if that is of no use."""
    try:
        return read_table(folder / VERIFIED_FILE, LARGEST_INDEX)
    except (OSError, ValueError):
        return {}
