"""Preparation: what a stream contains, when it is reused, and that a corpus appears whole or not at all."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.core.errors import DataError, JobError
from plait.train.data import documents as cutting
from plait.train.data import prepare as module
from plait.train.data.corpus import Corpus, Index, SplitName
from plait.train.data.documents import PIECE, WHOLE, Document
from plait.train.data.prepare import prepare
from plait.train.data.sources import SourceFile
from plait.train.data.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
TEXTS = st.dictionaries(
    st.text("abcxyz", min_size=1, max_size=6), st.binary(min_size=1, max_size=40), min_size=1, max_size=12
)
PREPARE = (
    "import sys, os; from pathlib import Path; from plait.train.data.prepare import prepare; "
    "from plait.train.data.tokenizer import *;"
)


class Untouchable(ByteTokenizer):
    """A tokenizer that must not be asked anything: the corpus is there already."""

    def encode_many(self, texts: object) -> list[np.ndarray]:
        raise AssertionError("the text was encoded again")


def write(folder: Path, texts: dict[str, bytes]) -> Path:
    for name, text in texts.items():
        path = folder / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return folder


def documents(corpus: Corpus, split: SplitName) -> list[bytes]:
    """The split's stream, cut at end-of-text."""
    ids = corpus.read(split, 0, corpus.num_tokens(split))
    assert not ids.size or ids[-1] == BYTES.end_of_text
    cuts = np.flatnonzero(ids == BYTES.end_of_text)
    return [part[part != BYTES.end_of_text].astype(np.uint8).tobytes() for part in np.split(ids, cuts + 1)[:-1]]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write(tmp_path / "texts", {f"{number:02d}": f"text number {number}\n".encode() * 20 for number in range(30)})


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


# What a stream contains


@settings(max_examples=25, deadline=None)
@given(texts=TEXTS)
def test_a_stream_is_the_documents_in_order_of_path(
    tmp_path_factory: pytest.TempPathFactory, texts: dict[str, bytes]
) -> None:
    root = tmp_path_factory.mktemp("order")
    corpus = prepare([str(write(root / "texts", texts))], BYTES, root / "corpus", eval_fraction=0)
    assert documents(corpus, "train") == [texts[name] for name in sorted(texts, key=lambda name: f"{name}.txt")]
    assert corpus.index.splits["train"].documents == len(texts)


@settings(max_examples=25, deadline=None)
@given(texts=TEXTS, more=TEXTS)
def test_adding_files_never_moves_a_document(
    tmp_path_factory: pytest.TempPathFactory, texts: dict[str, bytes], more: dict[str, bytes]
) -> None:
    root = tmp_path_factory.mktemp("grow")
    fixed = {"0train": b"always for training", "0eval": b"always for evaluation 1"}  # so that no split is empty
    before, after = (
        prepare([write(root / name, {**fixed, **content})], BYTES, root / f"{name}-corpus", eval_fraction=0.5)
        for name, content in (("before", texts), ("after", {**more, **texts}))
    )
    for split in ("train", "eval"):
        assert set(documents(before, split)) <= set(documents(after, split))
        assert not set(documents(after, split)) & set(documents(after, "eval" if split == "train" else "train"))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(
        st.sampled_from([b"short\n", b"\n", "é".encode() * 5000, "\U0001f600".encode() * 3001, b"\x80" * 9000]),
        max_size=12,
    )
)
def test_documents_of_a_file_are_the_file(tmp_path: Path, lines: list[bytes]) -> None:
    content = b"".join(lines) * 3
    (tmp_path / "long.txt").write_bytes(content)
    found = list(
        cutting.documents(SourceFile(path=tmp_path / "long.txt", name="long.txt", bytes=len(content), mtime_ns=0))
    )
    assert b"".join(document.text for document in found) == content
    assert [document.offset for document in found] == np.cumsum([0, *(len(d.text) for d in found)])[
        : len(found)
    ].tolist()
    if len(content) <= WHOLE:
        assert len(found) == (1 if content else 0)
    else:
        assert all(0 < len(document.text) <= PIECE for document in found)
    if b"\x80" * 9 not in content:
        assert all(document.text.decode() for document in found), "no character is cut"


def test_one_long_file_has_both_splits(tmp_path: Path) -> None:
    content = b"".join(b"line %d of a long file\n" % number for number in range(20_000))
    (tmp_path / "long").write_bytes(content)
    corpus = prepare([tmp_path / "long"], BYTES, tmp_path / "corpus")  # the pattern does not filter a file named itself
    train, held_out = documents(corpus, "train"), documents(corpus, "eval")
    assert len(train) > 1
    assert held_out
    assert sum(map(len, train + held_out)) == len(content)
    assert all(part in content and part.endswith(b"\n") for part in train + held_out), (
        "end-of-text wherever the text jumps"
    )
    assert corpus.num_tokens("train") == sum(map(len, train)) + len(train)


def test_sources_are_read_in_the_order_given_and_a_file_once(tmp_path: Path) -> None:
    write(tmp_path / "b", {"2": b"second", "1": b"first"})
    write(tmp_path / "a", {"3": b"third"})
    corpus = prepare(
        [tmp_path / "b", tmp_path / "a", tmp_path / "b" / "2.txt"], BYTES, tmp_path / "corpus", eval_fraction=0
    )
    assert documents(corpus, "train") == [b"first", b"second", b"third"]


def test_hidden_files_and_the_corpus_itself_are_not_sources(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"text", ".hidden": b"no", ".git/x": b"no", "deep/er/b": b"more"})
    (tmp_path / "deep" / "round").symlink_to(tmp_path)
    (tmp_path / "empty.txt").touch()
    for _ in range(2):
        corpus = prepare([tmp_path], BYTES, tmp_path / "corpus", pattern="*", eval_fraction=0)
        assert documents(corpus, "train") == [b"text", b"more"]


def test_a_large_vocabulary_is_stored_in_four_bytes(tmp_path: Path, texts: Path) -> None:
    class Large(ByteTokenizer):
        vocab, end_of_text, fingerprint = 70_000, 69_999, "large"

    small = prepare([texts], BYTES, tmp_path / "small")
    large = prepare([texts], Large(), tmp_path / "large")
    assert (small.index.dtype, large.index.dtype) == ("uint16", "uint32")
    ids = large.read("train", 0, large.num_tokens("train"))
    assert ids.max() == 69_999
    assert (ids[ids < 256] == (old := small.read("train", 0, len(ids)))[old < 256]).all()


def test_shards_are_full_but_the_last(tmp_path: Path, texts: Path) -> None:
    one = prepare([texts], BYTES, tmp_path / "one")
    many = prepare([texts], BYTES, tmp_path / "many", shard_tokens=1000)
    many.verify()
    for name, split in many.index.splits.items():
        assert [shard.tokens for shard in split.shards[:-1]] == [1000] * (len(split.shards) - 1)
        assert split.shards[0].file == f"{name}-00000.bin"
        assert split.digest == one.index.splits[name].digest


def test_progress_reaches_the_total(tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "GROUP", 1000)
    calls: list[tuple[int, int]] = []
    prepare([texts], BYTES, tmp_path / "corpus", progress=lambda done, total: calls.append((done, total)))
    total = sum(path.stat().st_size for path in texts.iterdir())
    assert len(calls) > 2
    assert calls == sorted(calls)
    assert calls[-1] == (total, total)
    assert snapshot(tmp_path / "corpus") == snapshot(prepare([texts], BYTES, tmp_path / "again").folder), (
        "whatever the grouping"
    )


# When it is reused


def test_the_same_sources_are_prepared_once(tmp_path: Path, texts: Path) -> None:
    first = prepare([texts], BYTES, tmp_path / "corpus")
    times = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    moved = texts.rename(tmp_path / "moved")
    again = prepare([moved], Untouchable(), tmp_path / "corpus")
    assert again.index == first.index
    assert times == {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}


@pytest.mark.parametrize("what", ["file", "time", "tokenizer", "fraction", "shards"])
def test_a_change_prepares_anew(tmp_path: Path, texts: Path, what: str) -> None:
    first = prepare([texts], BYTES, tmp_path / "corpus")
    options: dict[str, float] = {"fraction": {"eval_fraction": 0.3}, "shards": {"shard_tokens": 999}}.get(what, {})
    tokenizer = ByteTokenizer()
    if what == "file":
        (texts / "new.txt").write_bytes(b"new")
    elif what == "time":
        os.utime(texts / "00.txt", ns=(1, 1))
    elif what == "tokenizer":
        tokenizer.fingerprint = "another"
    untouchable = Untouchable()
    untouchable.fingerprint = tokenizer.fingerprint
    with pytest.raises(AssertionError, match="encoded again"):
        prepare([texts], untouchable, tmp_path / "corpus", **options)  # type: ignore[arg-type]
    again = prepare([texts], tokenizer, tmp_path / "corpus", **options)  # type: ignore[arg-type]
    again.verify()
    assert again.index != first.index


# What is refused


def test_nothing_to_prepare_is_explained(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    cases: list[tuple[list[str], str]] = [
        ([str(tmp_path / "absent")], r"absent: no such file or folder; correct the path, or use 'python-stdlib'"),
        ([str(tmp_path)], r"the corpus is empty; name a file or folder that has text"),
        ([], r"no source: the corpus is empty"),
    ]
    for sources, message in cases:
        with pytest.raises(DataError, match=message):
            prepare(sources, BYTES, tmp_path / "corpus")
    with pytest.raises(
        DataError, match=r"no file in it matches the pattern '\*\.md', its files end in \.txt; change the pattern"
    ):
        prepare([tmp_path], BYTES, tmp_path / "corpus", pattern="*.md")
    (tmp_path / "broken.txt").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"broken\.txt: cannot read this source file"):
        prepare([tmp_path], BYTES, tmp_path / "corpus")
    assert {path.name for path in tmp_path.iterdir()} == {"empty.txt", "broken.txt"}


@pytest.mark.parametrize("key, value", [("eval_fraction", 1.0), ("eval_fraction", -0.1), ("shard_tokens", 0)])
def test_wrong_settings_are_job_errors(tmp_path: Path, texts: Path, key: str, value: float) -> None:
    with pytest.raises(JobError) as caught:
        prepare([texts], BYTES, tmp_path / "corpus", **{key: value})  # type: ignore[arg-type]
    assert caught.value.key == key


def test_nothing_left_to_train_on_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"only": b"a short text"}) / "only.txt"
    with pytest.raises(DataError, match=r"all 1 documents fell into the eval split; add text or lower eval_fraction"):
        prepare([path], BYTES, tmp_path / "corpus", eval_fraction=0.999999)
    for fraction in (0, 1e-6):
        corpus = prepare([path], BYTES, tmp_path / "corpus", eval_fraction=fraction)
        assert [corpus.num_tokens("train"), corpus.num_tokens("eval")] == [13, 0]


# Damage


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (_flip, "damaged (checksum"),
    "truncated": (lambda shard: os.truncate(shard, 5), "has 5 bytes and the index says"),
    "missing": (Path.unlink, "the shard is missing"),
    "extra": (lambda shard: shutil.copy(shard, shard.with_name("train-00009.bin")), "of which the index says nothing"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_repaired_loudly_while_the_sources_are_the_same(tmp_path: Path, texts: Path, kind: str) -> None:
    said: list[str] = []
    first = prepare([texts], BYTES, tmp_path / "corpus", say=said.append)
    intact = snapshot(first.folder)
    damage, says = DAMAGE[kind]
    damage(first.folder / "train-00000.bin")
    again = prepare([texts], BYTES, tmp_path / "corpus", say=said.append)
    assert again.index == first.index
    assert snapshot(again.folder) == intact
    assert len(said) == 1, "once, and not when nothing is wrong"
    assert said[0].startswith(f"warning: {tmp_path}/corpus/train-0000")
    assert says in said[0]
    assert said[0].endswith("Its sources are unchanged, so the corpus is prepared again")


def test_damage_is_refused_when_the_sources_hold_something_else(tmp_path: Path, texts: Path) -> None:
    """Also by a byte that a disk flipped in them: name, size and time are the same."""
    first = prepare([texts], BYTES, tmp_path / "corpus")
    before = (texts / "00.txt").stat()
    _flip(texts / "00.txt")
    os.utime(texts / "00.txt", ns=(before.st_atime_ns, before.st_mtime_ns))
    _flip(first.folder / "train-00000.bin")
    damaged = snapshot(first.folder)
    with pytest.raises(DataError, match="is damaged, and cannot be made again: its sources have other contents"):
        prepare([texts], BYTES, tmp_path / "corpus", say=lambda text: None)
    assert snapshot(first.folder) == damaged


def test_an_index_that_cannot_be_used_is_refused_and_left(tmp_path: Path, texts: Path) -> None:
    folder = prepare([texts], BYTES, tmp_path / "corpus").folder
    (folder / "index.json").write_text("{}")
    with pytest.raises(DataError, match=r"index\.json: not a usable corpus index .* delete the folder"):
        prepare([texts], Untouchable(), tmp_path / "corpus")
    assert (folder / "index.json").read_text() == "{}"


def test_a_folder_with_other_things_is_never_replaced(tmp_path: Path, texts: Path) -> None:
    before = snapshot(texts)
    with pytest.raises(
        DataError, match=r"texts: will not be replaced by a corpus because it holds other things \(\d\d\.txt\)"
    ):
        prepare([texts], BYTES, texts)
    with pytest.raises(
        DataError, match=r"00\.txt: will not be replaced by a corpus because it holds other things \(not a folder\)"
    ):
        prepare([texts], BYTES, texts / "00.txt")
    with pytest.raises(DataError, match=r"cannot write the corpus: (Not a directory|File exists); choose another"):
        prepare([texts], BYTES, texts / "00.txt" / "corpus")
    assert snapshot(texts) == before
    assert {path.name for path in tmp_path.iterdir()} == {"texts"}


# Whole or not at all


def _full_device(path: object, mode: str) -> object:
    return io.FileIO("/dev/full", mode)


def _no_space(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where, name, replacement", [(module, "FileIO", _full_device), (os, "fsync", _no_space)])
def test_a_full_disk_leaves_nothing_and_the_older_corpus(
    tmp_path: Path,
    texts: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: object,
    name: str,
    replacement: Callable[..., object],
) -> None:
    older = prepare([texts / "00.txt"], BYTES, tmp_path / "corpus", eval_fraction=0).index
    before = snapshot(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, replacement)
        with pytest.raises(
            DataError, match=r"corpus: the disk is full: this corpus needs about \d+\.\d MB and .* MB were free"
        ):
            prepare([texts], BYTES, tmp_path / "corpus")
    assert snapshot(tmp_path) == before
    assert Corpus.open(tmp_path / "corpus").index == older


@pytest.mark.parametrize("group", [40_000, 4 << 20])
def test_a_really_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    monkeypatch.setattr(cutting, "GROUP", group)  # full in the first group of documents, or in a later one
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        write(tmp_path / "texts", {str(number): os.urandom(30_000) for number in range(20)})
        with pytest.raises(DataError, match=r"the disk is full: this corpus needs about 1\.2 MB and 0\.3 MB were free"):
            prepare([tmp_path / "texts"], BYTES, disk / "corpus", shard_tokens=5000)
        assert [path.name for path in disk.iterdir()] == [".corpus.lock"]
    finally:
        subprocess.run(["umount", disk], check=True)


def test_an_interruption_leaves_nothing(tmp_path: Path, texts: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([texts], BYTES, tmp_path / "corpus", progress=interrupt)
    assert {path.name for path in tmp_path.iterdir()} == {"texts", ".corpus.lock"}


def _start(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PREPARE + code, *map(str, arguments)]
    return subprocess.Popen(
        command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )


def test_processes_at_once_and_one_killed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    write(tmp_path / "texts", {str(number): rng.bytes(20_000) for number in range(100)})
    call = "prepare([sys.argv[1]], ByteTokenizer(), Path(sys.argv[2]), shard_tokens=50_000"
    go = "print(flush=True); sys.stdin.readline();"
    paths = (tmp_path / "texts", tmp_path / "corpus")
    killed = _start(f"{go} {call}, progress=lambda *_: os.kill(os.getpid(), 9))", *paths)
    workers = [_start(f"{go} print({call}).index.source)", *paths) for _ in range(2)]
    for process in (killed, *workers):
        assert process.stdout is not None
        process.stdout.readline()  # imported and waiting, so that the next lines race
    assert killed.communicate("\n")[0] == ""
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.glob(".corpus.tmp-*")], "a killed process leaves its draft"
    for process in workers:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    found = [process.communicate()[0].strip() for process in workers]
    corpus = prepare([tmp_path / "texts"], Untouchable(), tmp_path / "corpus", shard_tokens=50_000)
    corpus.verify()
    assert found == [corpus.index.source] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"texts", "corpus", ".corpus.lock"}, (
        "the draft of the killed one is gone"
    )


def _no_locks(file: object, operation: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_without_locks_the_corpus_of_a_faster_process_stays(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Overtaken(ByteTokenizer):
        def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
            faster.append(prepare([folder], BYTES, tmp_path / "corpus").folder.stat().st_ino)
            return super().encode_many(texts)

    folder, faster = texts, list[int]()
    monkeypatch.setattr(module.fcntl, "flock", _no_locks)
    assert [prepare([texts], Overtaken(), tmp_path / "corpus").folder.stat().st_ino] == faster


@pytest.mark.parametrize("round_", range(3))
def test_without_locks_the_first_rename_wins(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, round_: int
) -> None:
    monkeypatch.setattr(module.fcntl, "flock", _no_locks)
    barrier, found = threading.Barrier(3), list[str]()

    def work() -> None:
        barrier.wait()
        found.append(prepare([texts], BYTES, tmp_path / "corpus", shard_tokens=500).index.source)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(found)) == 1
    Corpus.open(tmp_path / "corpus").verify()
    assert {path.name for path in tmp_path.iterdir()} == {"texts", "corpus", ".corpus.lock"}


def test_two_corpora_in_one_folder_at_once_are_refused(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_wins(temporary: Path, out: Path, index: Index) -> None:
        os.rename(temporary, tmp_path / "lost")

    monkeypatch.setattr(module, "_publish", other_wins)
    with pytest.raises(DataError, match="another process put a different corpus there at the same time"):
        prepare([texts], BYTES, tmp_path / "corpus")


def test_place_is_uniform() -> None:
    places = [Document(text=b"%d" % number, offset=0).place for number in range(2000)]
    assert abs(np.mean(np.array(places) < 0.1) - 0.1) < 0.03
    assert min(places) >= 0
    assert max(places) < 1
