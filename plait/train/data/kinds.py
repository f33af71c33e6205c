"""Determine the format of a source file, and refuse files that are no corpus.

| file | treatment |
|---|---|
| UTF-8 text, any ending that is not listed here | read |
| a few bytes that are zero or not UTF-8 (up to ``MOST_UNDECODABLE`` of a file) | read, counted |
| ``.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.parquet``, ``.arrow`` | read: ``plait.train.data.rows`` |
| the first four and text, in gzip, xz, zstd or bzip2 (``.jsonl.gz``) | read |
| ``.bin`` with an ``.idx`` beside it (Megatron), ``.npy`` | tokens, read in place (``token_files``) |
| formats that could pass as text: archives, crawls, notebooks, PDF, pickles, databases | refused by name |
| other encodings, pictures, programs, weights, numbers, zeros | refused, with the share |
| pointers of Git LFS | refused, with the remedy |
| a file whose content is one format and whose ending is another's | refused, with its proper name |

The content decides the format of a file without an ending. So nothing is trained on as text that is
not text. Bytes that are not UTF-8 are counted and reported; a file with too many of them is
refused.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from plait.core.base.errors import DataError
from plait.train.data.sources import SourceFile, damaged, unreadable

TEXT, JSON_LINES, JSON, CSV, TSV = "text", "JSON lines", "JSON", "CSV", "TSV"
PARQUET, ARROW, ARROW_STREAM = "Parquet", "Arrow", "Arrow stream"
MEGATRON, NUMPY, TOKENS = "Megatron", "NumPy", "tokens"
GZIP, XZ, ZSTD, BZIP2 = "gzip", "xz", "zstd", "bzip2"
PLAIN = (TEXT, JSON_LINES, JSON, CSV, TSV)
"""Formats whose files are text."""
IN_PLACE = (MEGATRON, NUMPY, TOKENS)
"""Formats of token ids."""
COMPRESSED = (GZIP, XZ, ZSTD, BZIP2)
FORMATS = (*PLAIN, PARQUET, ARROW, ARROW_STREAM, *IN_PLACE)
BLOCK = 64 << 10
"""Bytes that are read of a file's beginning, middle and end."""
AT_ONCE = 3 * BLOCK
"""Size in bytes up to which a file is read completely instead."""
_LINE = 1 << 20
"""Bytes of a file's beginning that are read to see whether its lines are JSON."""
NOTEBOOK = "a notebook of Jupyter, in JSON"
OLDER_MEGATRON = (
    "an index of Megatron's older form (TNTIDX), and only the newer (MMIDIDX) is read; write the corpus anew with "
    "tools/preprocess_data.py of Megatron-LM, older ones with --dataset-impl mmap"
)
_BEGINNINGS: tuple[tuple[re.Pattern[bytes], str], ...] = (
    (re.compile(rb"\x1f\x8b"), GZIP),
    (re.compile(rb"\x28\xb5\x2f\xfd"), ZSTD),
    (re.compile(rb"\xfd7zXZ\x00"), XZ),
    (re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"), BZIP2),
    (re.compile(rb"PAR1[\s\S]*\x00"), PARQUET),
    (re.compile(rb"ARROW1\x00\x00"), ARROW),
    # A message: its length (int32, below 2^28), and the offset of its table (uint32, small).
    (re.compile(rb"\xff{4}[\s\S]{3}[\x00-\x0f][\s\S]{2}\x00\x00"), ARROW_STREAM),
    (re.compile(rb"MMIDIDX\x00\x00"), MEGATRON),
    (re.compile(rb"TNTIDX\x00\x00"), OLDER_MEGATRON),
    (re.compile(rb"\x93NUMPY"), NUMPY),
    (re.compile(rb"\s*\[\s*\{\s*\"[^\"]*\"\s*:"), JSON),
    (re.compile(rb"PK\x03\x04|PK\x05\x06|[\s\S]{257}ustar"), "an archive (zip, tar); unpack it"),
    (re.compile(rb"WARC/[0-9.]+\r?\n|filedesc://"), "pages of a crawl (WARC, ARC)"),
    (re.compile(rb"SQLite format 3\x00|Obj\x01|\x89HDF\r\n"), "a database or data file of another program"),
    (re.compile(rb"\x80[\x02-\x05]"), "a pickle of Python"),
    (re.compile(rb"%PDF-"), "PDF"),
    (re.compile(rb"version https://git-lfs"), "a pointer of Git LFS, which git lfs pull replaces by the file"),
)
"""Patterns of file beginnings: of the formats that are read, and of others that could pass as
text."""
_ENDINGS = {
    ".jsonl": JSON_LINES, ".ndjson": JSON_LINES, ".json": JSON, ".csv": CSV, ".tsv": TSV,
    ".parquet": PARQUET, ".pq": PARQUET, ".arrow": ARROW, ".feather": ARROW,
    ".bin": TOKENS, ".idx": TOKENS, ".npy": NUMPY,
    ".gz": GZIP, ".tgz": GZIP, ".zst": ZSTD, ".xz": XZ, ".bz2": BZIP2, ".ipynb": NOTEBOOK,
}  # fmt: skip
"""Formats by file ending; a file with any other ending is text."""
_MORE = {JSON_LINES: (".json",), JSON: (".jsonl",), ARROW_STREAM: (".arrow",), MEGATRON: (".idx",)}
"""Further endings that files of these formats may have."""
_RAW = (
    "is, by its ending {ending}, a token file, with no index (.idx) of Megatron beside it; if it is bare numbers, say "
    'which in data.sources = [{{ path = "...", dtype = "uint16" }}]'
)
_NO_INDEX = "which does not begin as an index of Megatron does (MMIDIDX); fetch it again, or take it out"


@dataclass(frozen=True)
class FileKind:
    """The kind of a file: one of ``FORMATS``, and its compression, empty for none. problem: why it
    is refused; empty if it is read."""

    format: str = TEXT
    compression: str = ""
    problem: str = ""


def check_formats(files: Sequence[SourceFile], most: int | None = None, dtype: str = "") -> Counter[str]:
    """Check the beginning, middle and end of each file (of the first ``most``); return the number
    of files by format. dtype: for files of bare numbers.

    Raises DataError naming the first refused file, with the number of other refused files and the
    remedy; also for a mixture of token files and other files.
    """
    kinds = [(file, kind_of_file(file, dtype)) for file in files[:most] if file.bytes]
    read = [file for file, kind in kinds if not kind.problem]
    if refused := [(file, kind.problem) for file, kind in kinds if kind.problem]:
        raise DataError(_refusal(refused, read))
    counts = Counter(kind.format for _, kind in kinds)
    in_place = [format for format in counts if format in IN_PLACE]
    if in_place and len(in_place) < len(counts):
        others = ", ".join(format for format in counts if format not in IN_PLACE)
        raise DataError(
            f"{read[0].path} and others: a source has token files ({in_place[0]}) and other files ({others}); name "
            "them apart in data.sources, or choose one with data.pattern"
        )
    return counts


def _refusal(refused: Sequence[tuple[SourceFile, str]], read: Sequence[SourceFile]) -> str:
    """Return the message about refused files, with a pattern that selects the others."""
    (first, problem), more = refused[0], len(refused) - 1
    told = f"{first.path}: {problem}"
    if more:
        told += f" ({more} more file{'s' * (more > 1)} of the corpus {'are' if more > 1 else 'is'} not read either)"
    endings, kept = {Path(file.name).suffix for file, _ in refused}, Counter[str]()
    for file in read:
        kept[Path(file.name).suffix] += file.bytes
    ending = next((ending for ending, _ in kept.most_common() if ending and ending not in endings), "")
    if ending and not any(file.named for file, _ in refused):  # no pattern excludes files that the user named
        return f'{told}; set data.pattern = "*{ending}", or take it out'
    if ";" in problem:  # it already names a remedy
        return told
    return f"{told}; take it out, or write its texts into files of plain text or JSON lines"


def kind_of_file(file: SourceFile, dtype: str = "") -> FileKind:
    """Return the kind of a file, from its name and its contents at beginning, middle and end.
    Raises DataError for one that cannot be read."""
    try:
        blocks = _blocks(file)
        if dtype:
            found = _content(blocks[0])
            return FileKind(
                TOKENS, problem=f"is {found} by its content, no bare numbers; leave dtype out" if found else ""
            )
        kind = kind_of(file.name, blocks[0], index_form=_index_form(file.path))
        if kind.compression and not kind.problem:
            return _inside(file, kind)
    except OSError as error:
        raise unreadable(file.path, error) from error
    return _as_text(kind, blocks)


def _as_text(kind: FileKind, blocks: Sequence[bytes]) -> FileKind:
    """Return the kind of a file, refused if it should be text and these blocks of it are not."""
    if kind.problem or kind.format not in PLAIN:
        return kind
    count, zeros = sum(map(undecodable, blocks)), sum(block.count(0) for block in blocks)
    problem = too_many(count, zeros, sum(map(len, blocks)))
    return FileKind(problem=problem) if problem else kind


def _inside(file: SourceFile, outer: FileKind) -> FileKind:
    """Return the kind of a compressed file's content."""
    try:
        with opened(file.path, outer.compression) as stream:
            begin = stream.read(_LINE)
    except DataError as error:
        return FileKind(problem=str(error).removeprefix(f"{file.path}: "))
    inner = _as_text(kind_of(_without_ending(file.name), begin), [begin])
    if inner.problem:
        return FileKind(problem=f"is {outer.compression}, and what it holds {inner.problem}")
    if inner.compression or inner.format not in PLAIN:
        return FileKind(problem=f"is {inner.compression or inner.format} in {outer.compression}; decompress it")
    return FileKind(inner.format, outer.compression)


def kind_of(name: str, begin: bytes, *, index_form: str = "") -> FileKind:
    """Return the kind of a file from its name and beginning. index_form: the form of the Megatron
    index beside a ``.bin``.

    >>> kind_of("a.txt", b"\\x1f\\x8b\\x08").problem
    'is gzip by its content, and its ending is .txt; name it a.txt.gz'
    >>> kind_of("a.jsonl.gz", b"\\x1f\\x8b\\x08")
    FileKind(format='JSON lines', compression='gzip', problem='')
    >>> kind_of("a.txt", b"text with {braces}")
    FileKind(format='text', compression='', problem='')
    """
    ending = ending_of(name)
    says, found = _ENDINGS.get(ending, TEXT), _content(begin)
    if found and found not in (*FORMATS, *COMPRESSED):
        return FileKind(problem=f"is {found}")
    if says == NOTEBOOK:
        return FileKind(problem=f"is, by its ending {ending}, {says}")
    if found:
        fitting = [one for one, format in _ENDINGS.items() if format == found] + [*_MORE.get(found, ())]
        if ending and ending not in fitting:
            inside = found in COMPRESSED and says not in COMPRESSED
            better = Path(name + fitting[0] if inside else Path(name).with_suffix(fitting[0])).name
            return FileKind(problem=f"is {found} by its content, and its ending is {ending}; name it {better}")
        if found in COMPRESSED:
            return FileKind(_ENDINGS.get(ending_of(_without_ending(name)), TEXT), found)
        return FileKind(found)
    if says == TOKENS:
        other = f"has beside it {index_form}" if index_form else _RAW.format(ending=ending)
        return FileKind(MEGATRON) if index_form == MEGATRON else FileKind(problem=other)
    if says not in PLAIN:
        return FileKind(problem=f"is, by its ending {ending}, {says}, and does not begin as {says} does")
    return FileKind(says)


def ending_of(name: str) -> str:
    """Return the ending of a file's name, in lower case, without a part number.

    >>> ending_of("a.JSONL"), ending_of("b.jsonl-00000-of-00010"), ending_of("part-00000")
    ('.jsonl', '.jsonl', '')
    """
    suffix = Path(name).suffix.lower()
    known = re.match(r"(\.[a-z0-9]+)[-_][-_0-9of]+$", suffix)
    return known[1] if known and known[1] in _ENDINGS else suffix


def _without_ending(name: str) -> str:
    path = Path(name)
    return str(path.with_suffix(".tar" if path.suffix.lower() == ".tgz" else ""))


def _content(begin: bytes) -> str:
    """Return the format that a file's beginning shows; empty if it shows none: text, or
    anything."""
    if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "text in UTF-16 or UTF-32; write it anew as UTF-8 (iconv -f UTF-16 -t UTF-8)"
    found = next((kind for pattern, kind in _BEGINNINGS if pattern.match(begin)), "")
    return found or (JSON_LINES if _is_json_lines(begin) else "")


def _is_json_lines(begin: bytes) -> bool:
    """Return True if the first two lines, or the only one, are JSON objects."""
    lines = [line.strip() for line in begin[:_LINE].split(b"\n", 200) if line.strip()][:2]
    if not all(line.startswith(b"{") and line.endswith(b"}") for line in lines):
        return False
    try:
        found: list[Any] = [json.loads(line) for line in lines]
    except (ValueError, RecursionError):
        return False
    return bool(found) and all(found)


def _index_form(path: Path) -> str:
    """Return the form of the Megatron index beside a ``.bin``; empty if there is no index."""
    if path.suffix != ".bin" or not (index := path.with_suffix(".idx")).is_file():
        return ""
    with open(index, "rb") as stream:
        found = _content(stream.read(9))
    return found if found in (MEGATRON, OLDER_MEGATRON) else f"{index.name}, {_NO_INDEX}"


def _blocks(file: SourceFile) -> list[bytes]:
    """Return the whole file as one block, or its beginning, middle and end."""
    with open(file.path, "rb") as stream:
        if file.bytes <= AT_ONCE:
            return [stream.read()]
        blocks = list[bytes]()
        for at in (0, file.bytes // 2, file.bytes - BLOCK):
            stream.seek(at)
            blocks.append(stream.read(_LINE if at == 0 else BLOCK))
        return blocks


# ---- compression ----


@contextmanager
def opened(path: Path, compression: str = "") -> Generator[IO[bytes]]:
    """Context manager: yield a file's decompressed content as a stream of bytes. Raises DataError
    for a file that is damaged or cannot be read."""
    try:
        with _stream(path, compression) as stream:
            yield stream
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # bz2, gzip and zstd set none for damage
            raise unreadable(path, error) from error
        raise damaged(path, compression, error) from None


def _stream(path: Path, compression: str) -> IO[bytes]:
    if not compression:
        return open(path, "rb")
    if compression == ZSTD:
        import pyarrow as pa  # reads all frames and detects truncation; the package zstandard does not

        found: Any = pa.input_stream(str(path), compression="zstd")
    else:
        found = {GZIP: gzip.GzipFile, BZIP2: bz2.BZ2File, XZ: lzma.LZMAFile}[compression](path, "rb")
    return io.BufferedReader(found, 1 << 20)


# ---- text ----

MOST_UNDECODABLE = 0.01
"""Share of a file's bytes that may be zero or not UTF-8."""
FEW = 4
"""Number of bytes that are zero or not UTF-8 and that a short file may have in any case, unless
they are more than a quarter of it."""
UNDECODABLE = "bytes that are zero or not UTF-8: the byte tokenizer keeps them, others read U+FFFD or U+0000"
HALVES = re.compile("[\ud800-\udfff]")
"""Pattern of lone surrogates, which JSON can spell and UTF-8 cannot."""


def undecodable(text: bytes) -> int:
    """Return the number of bytes in a whole text that are zero, which no text has, or not UTF-8.

    >>> undecodable("é".encode()), undecodable("é".encode("latin-1")), undecodable(b"cut off\\0\\0")
    (0, 1, 2)
    """
    return text.count(0) + decoded(text)[1]


def decoded(text: bytes) -> tuple[str, int]:
    """Return a whole text, and the number of its bytes that are not UTF-8 and become U+FFFD."""
    try:
        return text.decode(), 0
    except UnicodeDecodeError:
        return text.decode(errors="replace"), len(text) - len(text.decode(errors="ignore").encode())


def encoded(text: str) -> tuple[bytes, int]:
    """Return a text as UTF-8, and the number of its lone surrogates, which become U+FFFD."""
    try:
        return text.encode(), 0
    except UnicodeEncodeError:
        whole, count = HALVES.subn("\ufffd", text)
        return whole.encode(), count


def utf8(text: str) -> bytes:
    """Return a text as UTF-8; lone surrogates become U+FFFD."""
    return encoded(text)[0]


def too_many(count: int, zeros: int, size: int) -> str:
    """Return what is wrong with a file of ``size`` bytes, ``count`` of which are zero or not UTF-8
    (``zeros`` are zero); empty if the file passes."""
    if count <= max(size * MOST_UNDECODABLE, min(FEW, size // 4)):
        return ""
    if 2 * zeros > count:
        return (
            f"is no text: {zeros / size:.1%} of its bytes are zero, at most {MOST_UNDECODABLE:.0%} may be; write it "
            "anew as UTF-8 if it is UTF-16 (iconv -f UTF-16 -t UTF-8), take them out (tr -d '\\000') if it is a log "
            "that was cut off, or take the file out if it holds numbers"
        )
    return (
        f"is no text in UTF-8: {count / size:.1%} of its bytes are none, at most {MOST_UNDECODABLE:.0%} may be; write "
        "it anew as UTF-8 (iconv -f ENCODING -t UTF-8), if it is text in another encoding"
    )


class Decoder:
    """A decoder of blocks of bytes to text. bad: bytes so far that were not UTF-8 and became
    U+FFFD. A byte order mark at the beginning is removed."""

    def __init__(self) -> None:
        self.bad = 0
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        self._rest = b""

    def feed(self, block: bytes, *, final: bool = False) -> str:
        """Return the text of the next block. final: nothing follows."""
        whole = self._rest + block
        cut = len(whole) if final else whole_characters(whole)
        self.bad += decoded(whole[:cut])[1]
        self._rest = whole[cut:]
        return self._decoder.decode(block, final)


def whole_characters(block: bytes) -> int:
    """Return the length of a block without a character at its end that may be incomplete."""
    for back in range(1, min(4, len(block) + 1)):
        if block[-back] & 0xC0 != 0x80:  # the first byte of the last character
            return len(block) - back if block[-back] >= 0xC0 else len(block)
    return len(block)
