"""Text and UTF-8: bytes that are none are counted, said, and refused where a file has too many of them."""

from __future__ import annotations

import codecs
import re

MOST_UNDECODABLE = 0.01
"""Share of a file's bytes that may be zero or no UTF-8."""
FEW = 4
"""Such bytes that a short file may have in any case, unless they are more than a quarter of it."""
UNDECODABLE = "bytes that are zero or not UTF-8: the byte tokenizer keeps them, others read U+FFFD or U+0000"


def undecodable(text: bytes) -> int:
    """Bytes of a whole text that are zero, which no text has, or not UTF-8.

    >>> undecodable("é".encode()), undecodable("é".encode("latin-1")), undecodable(b"cut off\\0\\0")
    (0, 1, 2)
    """
    return text.count(0) + not_utf8(text)


def not_utf8(text: bytes) -> int:
    """Bytes of a whole text that are not UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return len(text) - len(text.decode(errors="ignore").encode())
    return 0


def too_many(count: int, zeros: int, size: int) -> str:
    """What is wrong with a file of which ``count`` of ``size`` bytes are not UTF-8 or zero, ``zeros`` of them
    zero; empty if it passes."""
    if count <= max(size * MOST_UNDECODABLE, min(FEW, size // 4)):
        return ""
    if 2 * zeros > count:
        return (
            f"is no text: {zeros / size:.1%} of its bytes are zero, at most {MOST_UNDECODABLE:.0%} may be; take them "
            "out (tr -d '\\000'), if it is a log that was cut off"
        )
    return (
        f"is no text in UTF-8: {count / size:.1%} of its bytes are none, at most {MOST_UNDECODABLE:.0%} may be; write "
        "it anew as UTF-8 (iconv -f ENCODING -t UTF-8), if it is text in another encoding"
    )


def whole_characters(block: bytes) -> bytes:
    """A block without what may be parts of characters at its ends."""
    begin = next((at for at in range(min(4, len(block))) if block[at] & 0xC0 != 0x80), 0)
    end = next((at for at in range(1, min(4, len(block)) + 1) if block[-at] & 0xC0 == 0xC0), 0)
    return block[begin : len(block) - end] if end else block[begin:]


def number_width(begin: bytes) -> int:
    """2 or 4 where zeros stand at some of so many places and nowhere else, as in numbers and UTF-16; else
    0."""
    if len(begin) < 16:
        return 0
    for width in (2, 4):
        places = [begin[at::width] for at in range(width)]
        shares = [place.count(0) / len(place) for place in places]
        if max(shares) > 0.9 and min(shares) < 0.1:
            return width
    return 0


class Decoder:
    """Blocks of bytes to text. ``bad``: bytes that were not UTF-8 so far; U+FFFD stands for them. A byte
    order mark at the beginning is left out."""

    def __init__(self) -> None:
        self.bad = 0
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        self._rest = b""

    def feed(self, block: bytes, *, final: bool = False) -> str:
        """The text of the next block; final: nothing follows."""
        checked = self._rest + block
        cut = len(checked) if final else len(checked) - _unfinished(checked)
        self.bad += not_utf8(checked[:cut])
        self._rest = checked[cut:]
        return self._decoder.decode(block, final)


def _unfinished(block: bytes) -> int:
    """Bytes at the end of a block that may begin a character."""
    for back in range(1, min(4, len(block) + 1)):
        if block[-back] & 0xC0 != 0x80:
            return back if block[-back] >= 0xC0 else 0
    return 0


HALVES = re.compile("[\ud800-\udfff]")
"""Lone halves of surrogate pairs, which JSON can spell and UTF-8 cannot."""


def utf8(text: str) -> bytes:
    """Return a text's UTF-8; U+FFFD stands for a lone half of a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return HALVES.sub("\ufffd", text).encode()
