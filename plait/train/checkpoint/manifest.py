"""What a complete checkpoint consists of, as JSON: its files, and which range of which tensor lies in which.

Nothing here is trusted: a manifest is read from a folder that others may write to. It is data from beginning
to end, its file names name files beside it, and what does not fit together is refused.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from plait.core.base.codec.json_text import parse_table
from plait.core.base.numbers import shown
from plait.core.reshard.layouts import Box

FORMAT = 2
LARGEST, MOST = 256 << 20, 16_000_000
"""Bytes and values of a manifest: with thousands of ranks it names millions of parts."""
_FILE = re.compile(r"rank-\d{5,}\.safetensors")


def file_of(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


class Stored(NamedTuple):
    """A whole tensor: its dtype (safetensors' name of it), its shape, and its parts, each in a file."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, Box], ...]


def name_in_file(key: str, box: Box) -> str:
    """What a part is called in its file.

    >>> name_in_file("master/norm.weight", Box((0,), (8,)))
    'master/norm.weight[0:8]'
    """
    return f"{key}{box}"


class OlderFormatError(ValueError):
    """A manifest of a format that this version does not read."""


@dataclass(frozen=True)
class Manifest:
    """files: name -> (bytes, CRC-32). tensors: by key (``exp_avg/layers.0.attn.q.weight``).

    serial grows with every checkpoint completed in the folder: a run that went back to an older step goes on
    from what it wrote last, not from the highest step.
    """

    step: int
    serial: int
    state: dict[str, Any]
    files: dict[str, tuple[int, int]]
    tensors: dict[str, Stored] = field(default_factory=dict[str, Stored])

    def to_text(self) -> str:
        """JSON, with a checksum of its own."""
        tensors = {
            key: [stored.dtype, stored.shape, [(file, *box) for file, box in stored.parts]]
            for key, stored in self.tensors.items()
        }
        body = {
            "format": FORMAT,
            "step": self.step,
            "serial": self.serial,
            "state": self.state,
            "files": self.files,
            "tensors": tensors,
        }
        return json.dumps({**body, "crc32": _crc_of(body)}) + "\n"

    @staticmethod
    def from_text(text: str) -> Manifest:
        """Raises ValueError for anything but the text of an intact manifest of this format."""
        body = parse_table(text, most=MOST)
        if body.pop("crc32", None) != _crc_of(body):
            raise ValueError("its checksum does not match")
        if body.get("format") == 1:
            raise OlderFormatError(
                "it was written by an older Plait, whose checkpoints hold a pickle: reading one may execute what "
                "somebody put there, so this version does not. Export it with the version that wrote it, and go on "
                "from the export with train.init_from"
            )
        if body.get("format") != FORMAT:
            raise OlderFormatError(f"it has format {shown(body.get('format'))}, and this version reads format {FORMAT}")
        try:
            return _manifest(body)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the content of a manifest: {error!r}") from None


def _manifest(body: dict[str, Any]) -> Manifest:
    files = {str(name): (int(size), int(crc)) for name, (size, crc) in body["files"].items()}
    if wrong := [name for name in files if not _FILE.fullmatch(name)]:
        raise ValueError(f"'{wrong[0]}' is no file of a checkpoint")
    tensors = {str(key): _stored(key, entry, files) for key, entry in body["tensors"].items()}
    state = body["state"]
    if not isinstance(state, dict):
        raise ValueError("its state is no table")
    if not isinstance(skipped := state.get("skipped", 0), int) or skipped < 0:
        raise ValueError(f"its state has {shown(skipped)} updates that were skipped")
    return Manifest(int(body["step"]), int(body["serial"]), state, files, tensors)


def _stored(key: str, entry: Any, files: Mapping[str, Any]) -> Stored:
    dtype, shape, parts = entry
    whole = Box(tuple(0 for _ in shape), tuple(int(size) for size in shape))
    found = tuple((str(file), Box(tuple(map(int, start)), tuple(map(int, stop)))) for file, start, stop in parts)
    for file, box in found:
        if not len(box.start) == len(box.stop) == len(shape):
            raise ValueError(f"a part of '{key}' goes from {box.start} to {box.stop}, and its shape is {whole.stop}")
        if file not in files or whole.meet(box) != box:
            raise ValueError(f"a part of '{key}' cannot lie at {box} in '{file}'")
    return Stored(str(dtype), whole.stop, found)


def _crc_of(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
