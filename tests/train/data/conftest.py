"""Small corpora of numbers, made once, and a folder of texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from plait.train.data import tables
from plait.train.data.corpus import Corpus
from plait.train.data.prepare import CorpusSettings, prepare
from plait.train.data.rendering import Renderer
from tests.train.data.preparing import BYTES, write


@pytest.fixture(autouse=True)
def in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unit tests render chats and read tables without the processes that have limits
    (``test_rendering.py`` and ``test_tables.py`` try them)."""
    if request.node.get_closest_marker("system") is None:
        monkeypatch.setattr(tables, "table", tables.read)
        monkeypatch.setattr(Renderer, "rendered", lambda self, *given: self.template.rendered(*given))


def make(folder: Path, tokens: int, *, shard_tokens: int = 1 << 20) -> Corpus:
    """A train split of ``tokens`` tokens of which no two neighbourhoods are alike (the last is
    end-of-text)."""
    folder.mkdir(exist_ok=True)
    text = np.random.default_rng(7).integers(32, 127, tokens - 1, dtype=np.uint8).tobytes()
    (folder / "text.txt").write_bytes(text)
    return prepare(
        [folder / "text.txt"],
        BYTES,
        folder / f"corpus-{shard_tokens}",
        CorpusSettings(eval_fraction=0, shard_tokens=shard_tokens),
    )


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Corpus]:
    root, made = tmp_path_factory.mktemp("corpora"), dict[int, Corpus]()

    def of_size(tokens: int) -> Corpus:
        if tokens not in made:
            made[tokens] = make(root / str(tokens), tokens)
        return made[tokens]

    return of_size


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write(tmp_path / "texts", {f"{number:02d}": f"text number {number}\n".encode() * 20 for number in range(30)})
