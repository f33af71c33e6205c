"""What of a source's files is looked at before ranks start, beyond what fills a sequence: damage behind
what was looked at, and tokens that the tokenizer does not have. The cost is bounded; ranks look at all of it.

| files | what is looked at |
|---|---|
| rows: JSON lines, JSON, CSV, Parquet, Arrow | all rows, up to ``LOOK`` bytes of files of a source |
| JSON lines beyond that, not compressed | the last line |
| text | all bytes, up to ``TEXTS`` of files of a source; what is compressed counts as rows |
| token files | all tokens up to ``TOKENS`` of a source; beyond, stretches of each file, both ends too |
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import numpy as np

from plait.core.base.errors import DataError
from plait.train.data import kinds
from plait.train.data.in_place import check_vocabulary
from plait.train.data.kinds import kind_of_file
from plait.train.data.sources import SourceFile
from plait.train.data.token_files import SCAN, Tokens

LOOK = 32 << 20
"""Bytes: about a second."""
TEXTS = 128 << 20
"""Bytes: a fifth of a second, of a file that lies in memory."""
TAIL = 1 << 20
"""Bytes of the end of a file, in which its last line is looked for."""
TOKENS = 256 << 20
"""About a second, of a file that lies in memory."""
LEAST = 4096
"""Tokens of a stretch."""


class RowsAhead:
    """Of which files of a source all is looked at, in the order in which they are asked for."""

    def __init__(self) -> None:
        self._left, self._text_left = LOOK, TEXTS

    def whole(self, file: SourceFile) -> bool:
        """Whether all of it is to be read. Raises DataError for a last line that is cut off, if a file of
        rows is not."""
        kind = kind_of_file(file)
        if kind.format == kinds.TEXT and not kind.compression:
            if file.bytes <= kinds.AT_ONCE:  # was looked at whole for its kind
                return False
            self._text_left -= file.bytes
            return self._text_left >= 0
        if not file.bytes:
            return False
        self._left -= file.bytes
        if self._left < 0 and kind.format == kinds.JSON_LINES and not kind.compression:
            _look_at_last_line(file)
        return self._left >= 0


def _look_at_last_line(file: SourceFile) -> None:
    with open(file.path, "rb") as stream:
        stream.seek(-min(TAIL, file.bytes), os.SEEK_END)
        lines = stream.read().rstrip().split(b"\n")
    if len(lines) < 2:  # it is longer
        return
    try:
        json.loads(lines[-1].decode(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{file.path}: its last line is not JSON ({error}); the file may be cut off: fetch it again"
        ) from None


def look_at_tokens(files: Sequence[Tokens], vocab: int) -> None:
    """Raise DataError for a token that is none of ``vocab``."""
    whole = sum(len(one.array) for one in files) <= TOKENS
    size = SCAN if whole else max(LEAST, min(SCAN, TOKENS // (2 * len(files))))
    most = max(2, TOKENS // (size * len(files)))
    for one in files:
        begins = range(0, len(one.array), size)
        if not whole and len(begins) > most:
            begins = (np.linspace(0, len(begins) - 1, most).astype(int) * size).tolist()
        for begin in begins:
            check_vocabulary(one, vocab, begin, begin + size)
