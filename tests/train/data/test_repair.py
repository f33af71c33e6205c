"""A corpus appears whole or not at all, and one that is damaged is prepared again or refused."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from plait.core.base.errors import DataError
from plait.train.data import prepare as module
from plait.train.data import shards
from plait.train.data.corpus import Corpus, Index
from plait.train.data.prepare import CorpusSettings, prepare
from plait.train.data.tokenizer import ByteTokenizer
from tests.train.data.preparing import BYTES, Untouchable, snapshot, write

PREPARE = (
    "import sys, os; from pathlib import Path; from plait.train.data.prepare import CorpusSettings, prepare; "
    "from plait.train.data.tokenizer import *;"
)


# Damage


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (_flip, "damaged (checksum"),
    "truncated": (lambda shard: os.truncate(shard, 5), "has 5 bytes and the index says"),
    "missing": (Path.unlink, "the file is missing"),
    "extra": (lambda shard: shutil.copy(shard, shard.with_name("train-00009.bin")), "that the index does not list"),
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


@pytest.mark.parametrize("text", ["{}", "", "null", "[" * 100_000, '{"format": Infinity}', "\0"])
def test_an_index_that_cannot_be_read_is_made_anew_loudly(tmp_path: Path, texts: Path, text: str) -> None:
    said: list[str] = []
    first = prepare([texts], BYTES, tmp_path / "corpus", say=said.append)
    intact = snapshot(first.folder)
    (first.folder / "index.json").write_text(text)
    assert prepare([texts], BYTES, tmp_path / "corpus", say=said.append).index == first.index
    assert snapshot(first.folder) == intact
    assert len(said) == 1
    assert re.search(r"index\.json: not a usable corpus index .* The corpus is prepared again", said[0])


def test_an_index_of_another_version_is_refused_and_left(tmp_path: Path, texts: Path) -> None:
    index = prepare([texts], BYTES, tmp_path / "corpus").folder / "index.json"
    index.write_text(index.read_text().replace('"version": 2', '"version": 3'))
    before = index.read_text()
    with pytest.raises(DataError, match=r"index\.json: version 3, and this Plait reads version 2; delete the folder"):
        prepare([texts], Untouchable(), tmp_path / "corpus")
    assert index.read_text() == before


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


@pytest.mark.parametrize("where, name, replacement", [(shards, "FileIO", _full_device), (os, "fsync", _no_space)])
def test_a_full_disk_leaves_nothing_and_the_older_corpus(
    tmp_path: Path,
    texts: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: object,
    name: str,
    replacement: Callable[..., object],
) -> None:
    older = prepare([texts / "00.txt"], BYTES, tmp_path / "corpus", CorpusSettings(eval_fraction=0)).index
    before = snapshot(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, replacement)
        with pytest.raises(
            DataError, match=r"corpus: the disk is full: this corpus needs about \d+\.\d MB and .* MB were free"
        ):
            prepare([texts], BYTES, tmp_path / "corpus")
    assert snapshot(tmp_path) == before
    assert Corpus.open(tmp_path / "corpus").index == older


def test_an_interruption_leaves_nothing(tmp_path: Path, texts: Path) -> None:
    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([texts], BYTES, tmp_path / "corpus", progress=interrupt)
    assert {path.name for path in tmp_path.iterdir()} == {"texts", ".corpus.lock"}


def _start(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PREPARE + code, *map(str, arguments)]
    return subprocess.Popen(
        command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )


@pytest.mark.system
def test_processes_at_once_and_one_killed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    write(
        tmp_path / "texts",
        {str(number): rng.integers(32, 127, 20_000, dtype=np.uint8).tobytes() for number in range(100)},
    )
    call = "prepare([sys.argv[1]], ByteTokenizer(), Path(sys.argv[2]), CorpusSettings(shard_tokens=50_000)"
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
    corpus = prepare([tmp_path / "texts"], Untouchable(), tmp_path / "corpus", CorpusSettings(shard_tokens=50_000))
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
        found.append(prepare([texts], BYTES, tmp_path / "corpus", CorpusSettings(shard_tokens=500)).index.source)

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
