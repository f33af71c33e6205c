"""Data at addresses are fetched once, go on where they were cut off, and are read like files."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from plait.core.base.errors import DataError
from plait.core.job.settings import DataSection
from plait.train.data.sets import training_sets
from plait.train.data.sources import fetched, is_address
from tests.train.data.preparing import BYTES, documents


@pytest.fixture
def store() -> Iterator[MemoryFileSystem]:
    system = fsspec.filesystem("memory")
    system.store.clear()
    for name, content in (("a.jsonl", b'{"text": "one"}\n'), ("sub/b.txt", b"two"), ("sub/c.txt", b"three")):
        system.pipe(f"/bucket/{name}", content)
    yield system
    system.store.clear()


def test_a_folder_and_a_file_are_fetched(store: MemoryFileSystem, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    folder = fetched("memory://bucket", tmp_path, lambda done, total: calls.append((done, total)))
    assert calls[-1] == (24, 24)
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("[!.]*") if path.is_file()}
    assert files == {"a.jsonl": b'{"text": "one"}\n', "sub/b.txt": b"two", "sub/c.txt": b"three"}
    assert fetched("memory://bucket/sub/b.txt", tmp_path).read_bytes() == b"two"


def test_an_address_is_a_source(store: MemoryFileSystem, tmp_path: Path) -> None:
    data = DataSection(text="memory://bucket", eval_fraction=0)
    (one,) = training_sets(data, tmp_path / "corpus")
    said: list[str] = []
    corpus = one.prepare(BYTES, said.append)
    assert documents(corpus, "train") == [b"one", b"two", b"three"]
    store.store.clear()
    store.pipe("/bucket/a.jsonl", b'{"text": "one"}\n')
    (one,) = training_sets(DataSection(text="memory://bucket/a.jsonl", eval_fraction=0), tmp_path / "other")
    assert documents(one.prepare(BYTES, said.append), "train") == [b"one"]


class _Cut(io.BytesIO):
    """A connection that ends after ten bytes."""

    def read(self, size: int | None = -1) -> bytes:
        if self.tell() >= 10:
            raise OSError("connection reset")
        return super().read(10)


def test_what_was_cut_off_goes_on(store: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(range(97, 97 + 25))
    store.pipe("/bucket/long.txt", content)
    address, read = "memory://bucket/long.txt", list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "open", lambda self, name, mode: _Cut(content))
        with pytest.raises(DataError, match=r"long\.txt: cannot be fetched: connection reset; check the address"):
            fetched(address, tmp_path)
    opened = MemoryFileSystem.open

    def counting(self: Any, name: str, mode: str, **more: Any) -> Any:
        file = opened(self, name, mode, **more)
        seek = file.seek
        file.seek = lambda at, *more: read.append(at) or seek(at, *more)  # pyright: ignore[reportAttributeAccessIssue]
        return file

    monkeypatch.setattr(MemoryFileSystem, "open", counting)
    assert fetched(address, tmp_path).read_bytes() == content
    assert 10 in read, "not from the beginning"
    read.clear()
    assert fetched(address, tmp_path).read_bytes() == content
    assert not read, "it is there"
    store.pipe("/bucket/long.txt", content[::-1] + b"!")
    assert fetched(address, tmp_path).read_bytes() == content[::-1] + b"!"


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("memory://bucket/none.txt", "no such file or folder; correct the address"),
        ("nothing://x/y", "Protocol not known: nothing"),
        ("zip://a.txt::file:///nothing/there.zip", "no such file or folder"),
    ],
)
def test_what_cannot_be_fetched_is_named(store: MemoryFileSystem, tmp_path: Path, address: str, says: str) -> None:
    with pytest.raises(DataError) as caught:
        fetched(address, tmp_path)
    assert str(caught.value).startswith(f"{address}: ")
    assert says in str(caught.value)


def test_a_missing_client_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_client(address: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", no_client)
    with pytest.raises(DataError, match=r"to access S3; install it \(pip install 'plait\[addresses\]'\)"):
        fetched("s3://bucket/x", tmp_path)
    assert is_address("s3://bucket/x") and not is_address("/a/b")
