"""What a source file is: a format that is read, or something that is no corpus and is refused by its name.

| file | what becomes of it |
|---|---|
| UTF-8 text, any ending that is not listed here | read |
| a few bytes that are zero or not UTF-8 (up to ``MOST_UNDECODABLE`` of a file) | read, counted |
| ``.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.parquet``, ``.arrow`` | read: ``plait.train.data.rows`` |
| the first four and text, in gzip, xz, zstd or bzip2 (``.jsonl.gz``) | read |
| ``.bin`` with an ``.idx`` beside it (Megatron), ``.npy`` | tokens, read in place (``token_files``) |
| archives, crawls (WARC), notebooks, pictures, programs, databases, pickles, weights | refused by name |
| pointers of Git LFS | refused, with what to do |
| UTF-16, UTF-32, other encodings, random bytes, numbers, files filled with zeros | refused, with the share |
| a file whose content is one format and whose ending is another's | refused, with its proper name |

A file without an ending is what its content is. So nothing is trained on as text that is not text.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.core.base.errors import DataError
from plait.train.data.compressed import BZIP2, COMPRESSED, GZIP, XZ, ZSTD, opened
from plait.train.data.sources import SourceFile
from plait.train.data.utf8 import number_width, too_many, undecodable, whole_characters

TEXT, JSON_LINES, JSON, CSV, TSV = "text", "JSON lines", "JSON", "CSV", "TSV"
PARQUET, ARROW, ARROW_STREAM = "Parquet", "Arrow", "Arrow stream"
MEGATRON, NUMPY, TOKENS = "Megatron", "NumPy", "tokens"
PLAIN = (TEXT, JSON_LINES, JSON, CSV, TSV)
"""Formats whose files are text."""
IN_PLACE = (MEGATRON, NUMPY, TOKENS)
"""Formats of token ids."""
FORMATS = (*PLAIN, PARQUET, ARROW, ARROW_STREAM, *IN_PLACE)
BLOCK = 64 << 10
"""Bytes that are read of a file's beginning, middle and end."""
AT_ONCE = 3 * BLOCK
"""Bytes of a file that is read whole for that."""
_LINE = 1 << 20
"""Bytes up to which a line is read to see whether it is JSON."""
OLDER_MEGATRON = (
    "an index of Megatron's older form (TNTIDX), and only the newer (MMIDIDX) is read; write the corpus anew with "
    "tools/preprocess_data.py of Megatron-LM, older ones with --dataset-impl mmap"
)
_NO_INDEX = "which does not begin as an index of Megatron does (MMIDIDX); fetch it again, or take it out"
_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x1f\x8b", GZIP),
    (0, b"\x28\xb5\x2f\xfd", ZSTD),
    (0, b"\xfd7zXZ\x00", XZ),
    (0, b"\x04\x22\x4d\x18", "lz4"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7-zip archive"),
    (0, b"Rar!\x1a\x07", "a RAR archive"),
    (0, b"PK\x03\x04", "a zip archive (also .docx, .xlsx, .npz, .pt, .whl)"),
    (0, b"PK\x05\x06", "a zip archive"),
    (257, b"ustar", "a tar archive"),
    (0, b"PAR1", PARQUET),
    (0, b"ARROW1", ARROW),
    (0, b"FEA1", "Feather of version 1; write it anew as Arrow or Parquet"),
    (0, b"Obj\x01", "Avro"),
    (0, b"MMIDIDX\x00\x00", MEGATRON),
    (0, b"TNTIDX\x00\x00", OLDER_MEGATRON),
    (0, b"\x93NUMPY", NUMPY),
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
    # A message: its length (int32, below 2^28), and where its table begins in it (uint32, near).
    (re.compile(rb"\xff{4}[\s\S]{3}[\x00-\x0f][\s\S]{2}\x00\x00"), ARROW_STREAM),
    (re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"), BZIP2),
    (re.compile(rb"\x80[\x02-\x05]"), "a pickle of Python"),
    (re.compile(rb"[\s\S]{5}\x00{3}\{"), "safetensors weights"),
    (re.compile(rb"WARC/[0-9.]+\r?\n"), "WARC, pages of a crawl"),
    (re.compile(rb"filedesc://"), "ARC, pages of a crawl"),
    (re.compile(rb"version https://git-lfs"), "a pointer of Git LFS, which git lfs pull replaces by the file"),
    (re.compile(rb"\s*\[\s*\{\s*\"[^\"]*\"\s*:"), JSON),
)
_ENDINGS = {
    **dict.fromkeys((".jsonl", ".ndjson"), JSON_LINES),
    ".json": JSON,
    ".ipynb": "a notebook of Jupyter, in JSON",
    **dict.fromkeys((".warc", ".wet", ".wat", ".arc"), "pages of a crawl"),
    ".csv": CSV,
    ".tsv": TSV,
    **dict.fromkeys((".parquet", ".pq"), PARQUET),
    **dict.fromkeys((".arrow", ".feather"), ARROW),
    **dict.fromkeys((".bin", ".idx"), TOKENS),
    ".npy": NUMPY,
    ".npz": "several NumPy arrays",
    ".gz": GZIP,
    ".tgz": GZIP,
    ".zst": ZSTD,
    ".xz": XZ,
    ".bz2": BZIP2,
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
"""What an ending says; a file of any other is text."""
_SAYS: dict[str, tuple[str, ...]] = {
    JSON_LINES: (".jsonl", ".ndjson", ".json"),
    JSON: (".json", ".jsonl"),
    PARQUET: (".parquet", ".pq"),
    ARROW: (".arrow", ".feather"),
    ARROW_STREAM: (".arrow",),
    MEGATRON: (".idx",),
    NUMPY: (".npy",),
    GZIP: (".gz", ".tgz"),
    XZ: (".xz",),
    ZSTD: (".zst",),
    BZIP2: (".bz2",),
}
"""Endings that a file of such content may have."""
_MARKS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
"""Byte order marks."""


@dataclass(frozen=True)
class FileKind:
    """What a file is: one of ``FORMATS``, and its compression, empty for none. problem: why it is refused;
    empty if it is read."""

    format: str = TEXT
    compression: str = ""
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.format} in {self.compression}" if self.compression else self.format


def look_at(files: Sequence[SourceFile], most: int | None = None, dtype: str = "") -> Counter[str]:
    """Look at the beginning, middle and end of each file (of the first ``most``); how many there are of each
    format. dtype: of bare numbers, where files are that.

    Raises DataError naming the first that is not read, with how many others are not and what to change, and
    where token files stand beside others.
    """
    counts, read, none = Counter[str](), list[SourceFile](), list[tuple[SourceFile, str]]()
    for file in files[:most]:
        if not file.bytes:
            continue
        kind = kind_of_file(file, dtype)
        if kind.problem:
            none.append((file, kind.problem))
        else:
            read.append(file)
            counts[kind.format] += 1
    if none:
        raise DataError(_told(none, read))
    in_place = [format for format in counts if format in IN_PLACE]
    if in_place and len(in_place) < len(counts):
        others = ", ".join(format for format in counts if format not in IN_PLACE)
        raise DataError(
            f"{read[0].path} and others: a source has token files ({in_place[0]}) and other files ({others}); name "
            "them apart in data.sources, or choose one with data.pattern"
        )
    return counts


def kind_of_file(file: SourceFile, dtype: str = "") -> FileKind:
    """What a file is, by its name and what it holds at its beginning, middle and end. Raises DataError for
    one that cannot be read."""
    try:
        blocks = _blocks(file)
        if dtype:
            found = _content(blocks[0])
            return (
                FileKind(problem=f"is {found} by its content, no bare numbers; leave dtype out")
                if found
                else FileKind(TOKENS)
            )
        kind = kind_of(file.name, blocks[0] if blocks else b"", beside=_beside(file.path))
        if kind.problem:
            return kind
        if kind.compression:
            return _inside(file, kind)
    except OSError as error:
        raise DataError(f"{file.path}: cannot read this source file: {error.strerror}; repair or remove it") from error
    if kind.format in PLAIN and (problem := _undecodable(blocks)):
        return FileKind(problem=problem)
    return kind


def _inside(file: SourceFile, outer: FileKind) -> FileKind:
    """What a compressed file holds."""
    name = _without_ending(file.name)
    try:
        with opened(file.path, outer.compression) as stream:
            begin = stream.read(_LINE)
    except DataError as error:
        return FileKind(problem=str(error).removeprefix(f"{file.path}: "))
    inner = kind_of(name, begin)
    if not inner.problem and (inner.compression or inner.format not in PLAIN):
        return FileKind(problem=f"is {inner.compression or inner.format} in {outer.compression}; decompress it")
    if not inner.problem and begin and (problem := _undecodable([begin])):
        inner = FileKind(problem=problem)
    if inner.problem:
        return FileKind(problem=f"is {outer.compression}, and what it holds {inner.problem}")
    return FileKind(inner.format, outer.compression)


def kind_of(name: str, begin: bytes, *, beside: str = "") -> FileKind:
    """What a file of this name that begins so is. beside: the form of a ``.bin``'s index of Megatron.

    >>> kind_of("a.txt", b"\\x1f\\x8b\\x08").problem
    'is gzip by its content, and its ending is .txt; name it a.txt.gz'
    >>> kind_of("a.jsonl.gz", b"\\x1f\\x8b\\x08")
    FileKind(format='JSON lines', compression='gzip', problem='')
    >>> kind_of("a.txt", b"text with {braces}")
    FileKind(format='text', compression='', problem='')
    """
    for mark, encoding in _MARKS:
        if begin.startswith(mark):
            return FileKind(problem=f"is text in {encoding}; write it anew as UTF-8 (iconv -f {encoding} -t UTF-8)")
    ending = ending_of(name)
    says, found = _ENDINGS.get(ending, ""), _content(begin)
    if found and found not in (*FORMATS, *COMPRESSED):
        return FileKind(problem=f"is {found}")
    if says and says not in (*FORMATS, *COMPRESSED):
        return FileKind(problem=f"is, by its ending {ending}, {says}")
    if found and ending and ending not in _SAYS[found]:
        inside = found in COMPRESSED and says not in COMPRESSED
        better = name + _SAYS[found][0] if inside else str(Path(name).with_suffix(_SAYS[found][0]))
        return FileKind(problem=f"is {found} by its content, and its ending is {ending}; name it {Path(better).name}")
    if found in COMPRESSED:
        return FileKind(_ENDINGS.get(ending_of(_without_ending(name)), TEXT), found)
    if found:
        return FileKind(found)
    if says == TOKENS:
        other = f"has beside it {beside}" if beside else _RAW.format(ending=ending)
        return FileKind(MEGATRON) if beside == MEGATRON else FileKind(problem=other)
    if says and says not in PLAIN:
        return FileKind(problem=f"is, by its ending {ending}, {says}, and does not begin as {says} does")
    return FileKind(says or TEXT)


_RAW = (
    "is, by its ending {ending}, a token file, with no index (.idx) of Megatron beside it; if it is bare numbers, say "
    'which in data.sources = [{{ path = "...", dtype = "uint16" }}]'
)


def ending_of(name: str) -> str:
    """The ending of a file's name, in small letters, without a number of its part.

    >>> ending_of("a.JSONL"), ending_of("b.jsonl-00000-of-00010"), ending_of("part-00000")
    ('.jsonl', '.jsonl', '')
    """
    suffix = Path(name).suffix.lower()
    known = re.match(r"(\.[a-z0-9]+)[-_][-_0-9of]+$", suffix)
    return known[1] if known and known[1] in _ENDINGS else suffix


def _without_ending(name: str) -> str:
    path = Path(name)
    return str(path.with_suffix(".tar")) if path.suffix.lower() == ".tgz" else str(path.with_suffix(""))


def _content(begin: bytes) -> str:
    """What bytes say that a file begins with; empty where they say nothing: text, or anything."""
    plain = not undecodable(whole_characters(begin))  # may begin with a format's letters
    for at, magic, kind in _MAGIC:
        if begin[at:].startswith(magic) and not (plain and magic.isascii() and magic != b"%PDF-"):
            return kind
    if found := next((kind for pattern, kind in _PATTERNS if pattern.match(begin)), ""):
        return found
    return JSON_LINES if _is_json_lines(begin) else ""


def _beside(path: Path) -> str:
    """What the index of Megatron beside a ``.bin`` is; empty where there is none."""
    if path.suffix != ".bin" or not (index := path.with_suffix(".idx")).is_file():
        return ""
    with open(index, "rb") as stream:
        found = _content(stream.read(9))
    return found if found in (MEGATRON, OLDER_MEGATRON) else f"{index.name}, {_NO_INDEX}"


def _undecodable(blocks: Sequence[bytes]) -> str:
    """What is wrong with the encoding of a file of which these blocks were read; empty if it passes."""
    size, cut = sum(map(len, blocks)), len(blocks) > 1 or len(blocks[0]) == _LINE
    if width := number_width(blocks[0]):
        return f"holds a zero byte in every {width}: it is UTF-{8 * width} without a mark, or numbers, no text in UTF-8"
    count = sum(undecodable(whole_characters(block) if cut else block) for block in blocks)
    return too_many(count, sum(block.count(0) for block in blocks), size)


def _blocks(file: SourceFile) -> list[bytes]:
    """The whole file, or its beginning, middle and end."""
    with open(file.path, "rb") as stream:
        if file.bytes <= AT_ONCE:
            return [stream.read()]
        blocks = list[bytes]()
        for at in (0, file.bytes // 2, file.bytes - BLOCK):
            stream.seek(at)
            blocks.append(stream.read(_LINE if at == 0 else BLOCK))
        return blocks


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
    """The paragraph about files that are not read, with a pattern under which the others stay."""
    (first, problem), more = none[0], len(none) - 1
    others = f" ({more} more file{'s' * (more > 1)} of the corpus {'are' if more > 1 else 'is'} not read either)" * (
        more > 0
    )
    if any(file.named for file, _ in none):  # which no pattern leaves out
        text = ()
    refused, kept = {Path(file.name).suffix for file, _ in none}, Counter[str]()
    for file in text:
        kept[Path(file.name).suffix] += file.bytes
    change = "take it out, or write its texts into files of plain text or JSON lines"
    if ending := next((ending for ending, _ in kept.most_common() if ending and ending not in refused), ""):
        change = f'set data.pattern = "*{ending}", or take it out'
    if ";" in problem and change.startswith("take"):  # it says what to do
        return f"{first.path}: {problem}{others}"
    return f"{first.path}: {problem}{others}; {change}"
