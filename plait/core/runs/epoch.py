"""Which attempt at a run may write: one that was given up, and goes on somewhere all the same, may not.

Whoever begins an attempt holds the run's lock and leaves a new word in ``epoch.json``. Its ranks and their
collectors are told the word, and compare it before they write. A machine that was cut off for an hour, a
process that was stopped and goes on, a pod that comes back with its node: each finds another word there.
"""

from __future__ import annotations

import json
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from plait.core.base.codec.json_text import read_table
from plait.core.base.env import epoch_word, note_epoch
from plait.core.base.errors import RunLost
from plait.core.base.files import replacing

FILE = "epoch.json"


def _of_run(folder: Path) -> str:
    """By the name of its folder, which is the same wherever that is mounted."""
    return f"{crc32(folder.resolve().name.encode()):08x}"


@dataclass(frozen=True)
class Epoch:
    """Of the run in ``folder``. word: what only one attempt has; empty: nobody began it, so nothing is
    compared."""

    folder: Path
    word: str = ""

    @staticmethod
    def begin(folder: Path) -> Epoch:
        """A new one, told to all that this process starts. A folder that cannot be written keeps nobody from
        writing, since nobody can."""
        word = secrets.token_hex(8) + _of_run(folder)
        try:
            with replacing(folder / FILE, parents=False) as draft:
                draft.write_text(json.dumps({"epoch": word, "since": time.time()}) + "\n")
        except OSError:
            word = ""
        note_epoch(word)
        return Epoch(folder, word)

    @staticmethod
    def mine(folder: Path) -> Epoch:
        """The one that this process was started in; none if that was another run's."""
        word = epoch_word()
        return Epoch(folder, word if word.endswith(_of_run(folder)) else "")

    @property
    def over(self) -> bool:
        """Whether another attempt has begun. A file that is gone or cannot be read says nothing."""
        if not self.word:
            return False
        with suppress(OSError, ValueError):
            found = read_table(self.folder / FILE).get("epoch")
            return isinstance(found, str) and found != self.word
        return False

    def check(self) -> None:
        """Raise RunLost if another attempt has begun."""
        if self.over:
            raise RunLost(
                f"this attempt at the run in {self.folder} was given up, and another has begun: nothing more is "
                "written, and it ends"
            )
