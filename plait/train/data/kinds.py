"""What a source file is: plain text, or something that is no corpus and is refused by its name.

| file | what becomes of it |
|---|---|
| UTF-8 text, any ending that is not listed here | read |
| a few bytes that are zero or not UTF-8 (up to ``MOST_UNDECODABLE`` of a file) | read, counted |
| JSON lines, JSON, CSV, Parquet, Arrow, token files, compressed text | refused: not read yet |
| archives, crawls (WARC), notebooks, pictures, programs, databases, pickles, weights | refused by name |
| pointers of Git LFS | refused, with what to do |
| UTF-16, UTF-32, other encodings, random bytes, numbers, files filled with zeros | refused, with the share |

A kind is told by the bytes that a file begins with and, where these say nothing, by its ending.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from plait.core.base.errors import DataError
from plait.core.base.passed_over import PassedOver
from plait.train.data.sources import SourceFile

MOST_UNDECODABLE = 0.01
"""Share of a file's bytes that may be zero or no UTF-8."""
UNDECODABLE = "bytes that are zero or not UTF-8: the byte tokenizer keeps them, others read U+FFFD or U+0000"
BLOCK = 64 << 10
"""Bytes that are read of a file's beginning, middle and end."""
_LINE = 1 << 20
"""Bytes up to which a line is read to see whether it is JSON."""
_YET = "Plait does not read this format yet"
_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x1f\x8b", f"gzip; {_YET}"),
    (0, b"\x28\xb5\x2f\xfd", f"zstd; {_YET}"),
    (0, b"\xfd7zXZ\x00", f"xz; {_YET}"),
    (0, b"\x04\x22\x4d\x18", "lz4"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7-zip archive"),
    (0, b"Rar!\x1a\x07", "a RAR archive"),
    (0, b"PK\x03\x04", "a zip archive (also .docx, .xlsx, .npz, .pt, .whl)"),
    (0, b"PK\x05\x06", "a zip archive"),
    (257, b"ustar", "a tar archive"),
    (0, b"PAR1", f"Parquet; {_YET}"),
    (0, b"ARROW1", f"Arrow; {_YET}"),
    (0, b"\xff\xff\xff\xff", f"an Arrow stream; {_YET}"),
    (0, b"FEA1", f"Feather; {_YET}"),
    (0, b"Obj\x01", "Avro"),
    (0, b"MMIDIDX\x00\x00", f"an index of Megatron's tokens; {_YET}"),
    (0, b"\x93NUMPY", f"a NumPy array; {_YET}"),
    (0, b"\x89HDF\r\n\x1a\n", "HDF5"),
    (0, b"GGUF", "GGUF weights"),
    (0, b"SQLite format 3\x00", "an SQLite database"),
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a document of an office program"),
    (0, b"%PDF-", "PDF"),
    (0, b"\x89PNG\r\n\x1a\n", "a PNG picture"),
    (0, b"\xff\xd8\xff", "a JPEG picture"),
    (0, b"GIF8", "a GIF picture"),
    (0, b"RIFF", "a RIFF file (WebP, WAV)"),
    (0, b"ID3", "MP3"),
    (4, b"ftyp", "MP4"),
    (0, b"\x7fELF", "a program or library (ELF)"),
    (0, b"\xcf\xfa\xed\xfe", "a program or library (Mach-O)"),
    (0, b"\xca\xfe\xba\xbe", "a class of Java, or a program"),
    (0, b"MZ", "a program of Windows"),
    (0, b"\x00asm", "WebAssembly"),
    (0, b"\x00\x00\x00\x01Bud1", "a .DS_Store of macOS"),
    (0, b"PACK\x00\x00", "a pack of Git"),
)
"""Where, which bytes, and what they say."""
_PATTERNS: tuple[tuple[re.Pattern[bytes], str], ...] = (
    (re.compile(rb"BZh[1-9]1AY&SY"), f"bzip2; {_YET}"),
    (re.compile(rb"\x80[\x02-\x05]"), "a pickle of Python"),
    (re.compile(rb"[\s\S]{5}\x00{3}\{"), "safetensors weights"),
    (re.compile(rb"WARC/[0-9.]+\r?\n"), f"WARC, pages of a crawl; {_YET}"),
    (re.compile(rb"filedesc://"), f"ARC, pages of a crawl; {_YET}"),
    (re.compile(rb"version https://git-lfs"), "a pointer of Git LFS, which git lfs pull replaces by the file"),
    (re.compile(rb"\s*\[\s*\{\s*\"[^\"]*\"\s*:"), f"JSON; {_YET}"),
)
_ENDINGS = {
    **dict.fromkeys((".jsonl", ".ndjson"), f"JSON lines; {_YET}"),
    ".json": f"JSON; {_YET}",
    ".ipynb": f"a notebook of Jupyter, in JSON; {_YET}",
    **dict.fromkeys((".warc", ".wet", ".wat", ".arc"), f"pages of a crawl; {_YET}"),
    **dict.fromkeys((".csv", ".tsv"), f"a table; {_YET}"),
    ".parquet": f"Parquet; {_YET}",
    **dict.fromkeys((".arrow", ".feather"), f"Arrow; {_YET}"),
    **dict.fromkeys((".bin", ".idx"), f"a token file; {_YET}"),
    **dict.fromkeys((".npy", ".npz"), f"NumPy arrays; {_YET}"),
    **dict.fromkeys((".gz", ".tgz", ".zst", ".xz", ".bz2"), f"compressed; {_YET}"),
    **dict.fromkeys((".zip", ".tar", ".7z", ".rar", ".lz4", ".lzma", ".jar", ".whl"), "an archive"),
    **dict.fromkeys((".safetensors", ".gguf", ".pt", ".pth", ".ckpt"), "weights"),
    **dict.fromkeys((".pkl", ".pickle"), "a pickle of Python"),
    **dict.fromkeys((".h5", ".hdf5", ".tfrecord", ".lmdb", ".mdb", ".avro", ".orc"), "a data file"),
    **dict.fromkeys((".db", ".sqlite", ".sqlite3"), "a database"),
    **dict.fromkeys((".pdf", ".docx", ".xlsx", ".pptx", ".odt"), "a document"),
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff"), "a picture"),
    **dict.fromkeys((".mp3", ".mp4", ".wav", ".flac", ".ogg", ".mkv", ".avi"), "sound or film"),
    **dict.fromkeys((".so", ".exe", ".dll", ".dylib", ".pyc", ".class", ".wasm"), "a program"),
}  # fmt: skip
_MARKS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
"""Byte order marks."""


def look_at(files: Sequence[SourceFile], most: int | None = None) -> PassedOver:
    """Look at the beginning, middle and end of each file (of the first ``most``); what was counted.

    Raises DataError naming the first that is no text, with how many others are none and what to change.
    """
    over, text, none = PassedOver(), list[SourceFile](), list[tuple[SourceFile, str]]()
    for file in files[:most]:
        if not file.bytes:
            continue
        try:
            blocks = _blocks(file)
        except OSError as error:
            raise DataError(
                f"{file.path}: cannot read this source file: {error.strerror}; repair or remove it"
            ) from error
        if problem := kind_of_text(file.name, b"".join(blocks[:1])) or _undecodable(blocks, over, file.path):
            none.append((file, problem))
        else:
            text.append(file)
    if none:
        raise DataError(_told(none, text))
    return over


def kind_of_text(name: str, begin: bytes) -> str:
    """What a file of this name that begins so is, in place of text; empty for text.

    >>> kind_of_text("a.txt", b"\\x1f\\x8b\\x08")
    'is gzip; Plait does not read this format yet'
    >>> kind_of_text("a.txt", b"text with {braces}")
    ''
    """
    for mark, encoding in _MARKS:
        if begin.startswith(mark):
            return f"is text in {encoding}; write it anew as UTF-8 (iconv -f {encoding} -t UTF-8)"
    plain = not undecodable(_whole_characters(begin))  # may begin with a format's letters
    for at, magic, kind in _MAGIC:
        if begin[at:].startswith(magic) and not (plain and magic.isascii() and magic != b"%PDF-"):
            return f"is {kind}"
    if found := next((kind for pattern, kind in _PATTERNS if pattern.match(begin)), ""):
        return f"is {found}"
    ending = Path(name).suffix.lower()
    if ending in _ENDINGS:
        return f"is, by its ending {ending}, {_ENDINGS[ending]}"
    return f"is JSON lines; {_YET}" if _is_json_lines(begin) else ""


def undecodable(text: bytes) -> int:
    """Bytes of a whole text that are zero, which no text has, or not UTF-8.

    >>> undecodable("é".encode()), undecodable("é".encode("latin-1")), undecodable(b"cut off\\0\\0")
    (0, 1, 2)
    """
    zeros = text.count(0)
    try:
        text.decode()
    except UnicodeDecodeError:
        return zeros + len(text) - len(text.decode(errors="ignore").encode())
    return zeros


def too_many(count: int, zeros: int, size: int) -> str:
    """What is wrong with a file of which ``count`` of ``size`` bytes are not UTF-8 or zero, ``zeros`` of them
    zero; empty if it passes."""
    if count <= size * MOST_UNDECODABLE:
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


class Decodable:
    """Counts, file by file as their documents come, what is zero or not UTF-8. Raises DataError after a file
    that has too much of it."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self.over = PassedOver()
        self._files = iter([file for file in files if file.bytes])
        self._file: SourceFile | None = None
        self._size = self._count = self._zeros = 0

    def add(self, text: bytes, *, begins: bool) -> None:
        """The next document; begins: of the next file."""
        if begins:
            self.end()
            self._file, self._size, self._count, self._zeros = next(self._files, None), 0, 0, 0
        self._size, self._count = self._size + len(text), self._count + undecodable(text)
        self._zeros += text.count(0)

    def end(self) -> None:
        """No more of this file."""
        if self._file is None:
            return
        if problem := too_many(self._count, self._zeros, self._size):
            raise DataError(_told([(self._file, problem)], ()))
        self.over.note(UNDECODABLE, str(self._file.path), self._count)
        self._file = None


def _undecodable(blocks: Sequence[bytes], over: PassedOver, path: Path) -> str:
    """What is wrong with the encoding of a file of which these blocks were read; else count what is not
    UTF-8."""
    size, cut = sum(map(len, blocks)), len(blocks) > 1
    if width := _number_width(blocks[0]):
        return f"holds a zero byte in every {width}: it is UTF-{8 * width} without a mark, or numbers, no text in UTF-8"
    count = sum(undecodable(_whole_characters(block) if cut else block) for block in blocks)
    if problem := too_many(count, sum(block.count(0) for block in blocks), size):
        return problem
    over.note(UNDECODABLE, str(path), count)
    return ""


def _blocks(file: SourceFile) -> list[bytes]:
    """The whole file, or its beginning, middle and end."""
    with open(file.path, "rb") as stream:
        if file.bytes <= 3 * BLOCK:
            return [stream.read()]
        blocks = list[bytes]()
        for at in (0, file.bytes // 2, file.bytes - BLOCK):
            stream.seek(at)
            blocks.append(stream.read(_LINE if at == 0 else BLOCK))
        return blocks


def _whole_characters(block: bytes) -> bytes:
    """A block without what may be parts of characters at its ends."""
    begin = next((at for at in range(min(4, len(block))) if block[at] & 0xC0 != 0x80), 0)
    end = next((at for at in range(1, min(4, len(block)) + 1) if block[-at] & 0xC0 == 0xC0), 0)
    return block[begin : len(block) - end] if end else block[begin:]


def _number_width(begin: bytes) -> int:
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


def _is_json_lines(begin: bytes) -> bool:
    """Whether the first two lines, or the only one, are tables of JSON."""
    lines = [line for line in begin[:_LINE].split(b"\n", 200) if line.strip()][:2]
    if not lines or not lines[0].lstrip().startswith(b"{"):
        return False
    return all(map(_is_table, lines))


def _is_table(line: bytes) -> bool:
    if not line.strip().endswith(b"}"):
        return False
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and bool(found)


def _told(none: Sequence[tuple[SourceFile, str]], text: Sequence[SourceFile]) -> str:
    """The paragraph about files that are no text, with a pattern under which the others stay."""
    (first, problem), more = none[0], len(none) - 1
    others = f" ({more} more file{'s' * (more > 1)} of the corpus {'are' if more > 1 else 'is'} no text either)" * (
        more > 0
    )
    if any(file.named for file, _ in none):  # which no pattern leaves out
        text = ()
    refused, kept = {Path(file.name).suffix for file, _ in none}, Counter[str]()
    for file in text:
        kept[Path(file.name).suffix] += file.bytes
    change = "take it out, or write its texts into files of plain text"
    if ending := next((ending for ending, _ in kept.most_common() if ending and ending not in refused), ""):
        change = f'set data.pattern = "*{ending}", or take it out'
    return f"{first.path}: {problem}{others}; {change}"
