"""Token files of other programs give the tokens that they hold, and the documents that they say."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.base.errors import DataError
from plait.train.data import token_files
from plait.train.data.corpus import Corpus
from plait.train.data.prepare import CorpusSettings, prepare
from plait.train.data.stream import Batches
from tests.train.data.preparing import BYTES, take

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
WHOLE = CorpusSettings(pattern="*", eval_fraction=0)


def write_megatron(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "uint16", *, modes: bool = False
) -> Path:
    """Documents of sequences, as Megatron-LM's IndexedDatasetBuilder writes them."""
    sequences = [sequence for document in documents for sequence in document]
    tokens = np.array([token for sequence in sequences for token in sequence], dtype)
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    begins = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)[:-1]]).astype(np.int64)[: len(lengths)]
    indices = np.cumsum([0, *(len(document) for document in documents)], dtype=np.int64)
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[dtype], len(lengths), len(indices))
        + lengths.tobytes() + (begins * tokens.itemsize).tobytes() + indices.tobytes()
        + (bytes(len(lengths)) if modes else b"")
    )  # fmt: skip
    return prefix.with_suffix(".bin")


def read(corpus: Corpus, split: Any = "train") -> list[list[int]]:
    """A split's documents."""
    count = corpus.num_tokens(split)
    tokens = corpus.read(split, 0, count)
    ends = corpus.ends(split, 0, count).tolist()
    assert not count or ends[-1] == count
    return [tokens[first:last].tolist() for first, last in zip([0, *ends], ends, strict=False)]


def draws(seed: int, documents: int = 60) -> list[list[list[int]]]:
    rng = np.random.default_rng(seed)
    return [
        [rng.integers(0, 120, rng.integers(0, 40)).tolist() for _ in range(rng.integers(0, 4))]
        for _ in range(documents)
    ]


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("modes", [False, True])
def test_megatrons_files_give_their_tokens_and_documents(tmp_path: Path, dtype: str, modes: bool) -> None:
    documents = draws(3)
    (tmp_path / "in").mkdir()
    path = write_megatron(tmp_path / "in" / "corpus_text_document", documents, dtype, modes=modes)
    flat = [[token for sequence in document for token in sequence] for document in documents]
    for source in (path, path.with_suffix(".idx"), path.with_suffix(""), tmp_path / "in"):
        corpus = prepare([source], BYTES, tmp_path / "out" / source.name / "c", WHOLE)
        assert read(corpus) == [document for document in flat if document]
        corpus.verify()
        assert sorted(file.name for file in corpus.folder.iterdir()) == ["index.json", "train.ends", "train.spans"]
    assert Corpus.open(corpus.folder).read("train", 5, 90).tolist() == [token for one in flat for token in one][5:95]


def test_sequences_in_any_order_are_read_as_the_index_says(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "x", [[[1, 2, 3]], [[4, 5]], [[6]]], "int32")
    index = bytearray(path.with_suffix(".idx").read_bytes())
    index[34:46] = np.array([2, 1, 3], np.int32).tobytes()
    index[46:70] = np.array([12, 20, 0], np.int64).tobytes()
    path.with_suffix(".idx").write_bytes(index)
    corpus = prepare([path], BYTES, tmp_path / "c", WHOLE)
    assert read(corpus) == [[4, 5], [6], [1, 2, 3]]
    assert corpus.read("train", 1, 4).tolist() == [5, 6, 1, 2]
    batches = Batches(corpus, "train", sequence=2)
    tokens = take(batches, 0, batches.windows).tokens
    assert sorted(tokens.tolist()) == [[1, 2], [4, 5]] or tokens.shape == (2, 2)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_numpy_arrays_give_their_tokens(tmp_path: Path, dtype: str) -> None:
    tokens = np.random.default_rng(5).integers(0, 250, 5000).astype(dtype)
    if dtype != "uint8":
        tokens[[100, 101, 4000]] = BYTES.end_of_text
    np.save(tmp_path / "a.npy", tokens)
    (tmp_path / "b.bin").write_bytes(tokens.tobytes())
    bare = CorpusSettings(eval_fraction=0, dtype=dtype)
    for name, how in (("a.npy", WHOLE), ("b.bin", bare)):
        corpus = prepare([tmp_path / name], BYTES, tmp_path / "out" / name, how)
        assert corpus.read("train", 0, 5000).tolist() == tokens.tolist()
        ends = [5000] if dtype == "uint8" else [101, 102, 4001, 5000]
        assert corpus.ends("train", 0, 5000).tolist() == ends
    np.save(tmp_path / "rows.npy", tokens.reshape(50, 100))
    corpus = prepare([tmp_path / "rows.npy"], BYTES, tmp_path / "rows", WHOLE)
    assert read(corpus) == tokens.reshape(50, 100).tolist()


@given(seed=st.integers(0, 1000), fraction=st.sampled_from([0.1, 0.5]), whole=st.sampled_from([8, 1 << 15]))
@settings(max_examples=25)
def test_each_document_is_on_one_side_and_none_is_lost(
    tmp_path_factory: pytest.TempPathFactory, seed: int, fraction: float, whole: int
) -> None:
    root, documents = tmp_path_factory.mktemp("sides"), draws(seed, 40)
    path = write_megatron(root / "x", [*documents, [[1, 2, 3]], [[4]]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plait.train.data.token_files.WHOLE", whole)
        patch.setattr("plait.train.data.token_files.PIECE", 5)
        try:
            corpus = prepare([path], BYTES, root / "c", CorpusSettings(eval_fraction=fraction))
        except DataError as error:
            assert "fell into the eval split" in str(error)  # noqa: PT017
            return
    flat = [[token for sequence in document for token in sequence] for document in documents]
    sides = [read(corpus, split) for split in ("train", "eval")]
    if whole > 8:
        expected = sorted([*(document for document in flat if document), [1, 2, 3], [4]])
        assert sorted(sides[0] + sides[1]) == expected
    assert sum(map(len, sides[0] + sides[1])) == sum(map(len, flat)) + 4


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda index: index[:20], "is an index of Megatron that is damaged or cut off (20 bytes)"),
        (lambda index: index[:-3], "and its header says"),
        (lambda index: index[:9] + b"\2" + index[10:], "version 2"),
        (lambda index: index[:17] + b"\7" + index[18:], "its data type has the code 7"),
        (lambda index: index[:34] + b"\xff\xff\xff\xff" + index[38:], "sequence 0 is -1 tokens"),
        (lambda index: index[:34] + b"\xff\xff\xff\x7f" + index[38:], "sequence 0 is 2147483647 tokens at byte 0"),
        (lambda index: index[:46] + b"\1" + index[47:], "sequence 0 is 3 tokens at byte 1"),
        (lambda index: index[:-8] + b"\x09" + bytes(7), "do not cover its sequences in order"),
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, edit: Any, says: str) -> None:
    path = write_megatron(tmp_path / "x", [[[1, 2, 3]], [[4, 5]], [[6]]])
    index = path.with_suffix(".idx")
    index.write_bytes(edit(index.read_bytes()))
    with pytest.raises(DataError) as caught:
        prepare([path], BYTES, tmp_path / "c", WHOLE)
    assert str(index) in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize("name", ["x.bin", "x.idx", "x"])
def test_megatrons_older_index_is_named_as_such(tmp_path: Path, name: str) -> None:
    path = write_megatron(tmp_path / "x", [[[1, 2, 3]], [[4, 5]], [[6]]])
    path.with_suffix(".idx").write_bytes(b"TNTIDX\0\0" + np.array([1, 4, 4, 3, 3], np.uint64).tobytes())
    with pytest.raises(DataError, match=r"older form \(TNTIDX\).* write the corpus anew with tools/preprocess_data"):
        prepare([tmp_path / name], BYTES, tmp_path / "c", WHOLE)


def test_what_is_no_token_file_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "float.npy", np.ones(9))
    np.save(tmp_path / "cube.npy", np.ones((2, 2, 2), np.int32))
    np.save(tmp_path / "object.npy", np.array([{}], object), allow_pickle=True)
    np.save(tmp_path / "large.npy", np.array([1, 300]))
    np.save(tmp_path / "negative.npy", np.array([1, -1]))
    np.save(tmp_path / "cut.npy", np.arange(200))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:-5])
    (tmp_path / "alone.bin").write_bytes(bytes(range(200)))
    (tmp_path / "odd.bin").write_bytes(bytes(7))
    cases = {
        "float.npy": "is an array [9] of float64", "cube.npy": "is an array [2, 2, 2] of int32",
        "object.npy": "of object", "large.npy": "has the token 300, and data.tokenizer has 257 tokens, 0 to 256",
        "negative.npy": "has the token -1", "cut.npy": "damaged or cut off", "alone.bin": 'dtype = "uint16"',
    }  # fmt: skip
    for name, says in cases.items():
        with pytest.raises(DataError) as caught:
            prepare([tmp_path / name], BYTES, tmp_path / "c", WHOLE)
        assert says in str(caught.value)
        assert str(tmp_path / name) in str(caught.value)
    with pytest.raises(DataError, match="no whole number of uint16"):
        prepare([tmp_path / "odd.bin"], BYTES, tmp_path / "c", CorpusSettings(eval_fraction=0, dtype="uint16"))
    (tmp_path / "mixed").mkdir()
    np.save(tmp_path / "mixed" / "a.npy", np.arange(100))
    (tmp_path / "mixed" / "b.txt").write_text("text")
    with pytest.raises(DataError, match=r"token files \(NumPy\) and other files \(text\); name them apart"):
        prepare([tmp_path / "mixed"], BYTES, tmp_path / "c", WHOLE)


def test_a_token_file_that_changed_is_prepared_again(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100))
    first = prepare([tmp_path / "a.npy"], BYTES, tmp_path / "c", WHOLE)
    np.save(tmp_path / "a.npy", np.arange(90))
    with pytest.raises(DataError, match="has changed since the corpus was prepared"):
        Corpus.open(first.folder)
    assert prepare([tmp_path / "a.npy"], BYTES, tmp_path / "c", WHOLE).num_tokens("train") == 90


def test_documents_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "SCAN", 7)
    documents = draws(9)
    path = write_megatron(tmp_path / "x", documents)
    flat = [[token for sequence in document for token in sequence] for document in documents]
    assert read(prepare([path], BYTES, tmp_path / "c", WHOLE)) == [document for document in flat if document]


def test_an_index_that_is_none_is_named(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "x", [[[1, 2, 3]], [[4, 5]], [[6]]])
    for begin in (b"", b"XMIDIDX\0\0"):
        path.with_suffix(".idx").write_bytes(begin)
        with pytest.raises(DataError, match=r"has beside it x\.idx, which does not begin as an index .*fetch it again"):
            prepare([path], BYTES, tmp_path / "c", WHOLE)
