"""``plait data``: sources tokenised once, and what is told of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.train.data.corpus import Corpus
from plait.train.data.prepare import CorpusSettings, prepare
from plait.train.data.tokenizer import ByteTokenizer
from tests.support.command import plait

TIER = "unit"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    rows = [{"text": f"document {number} " * (number + 1), "id": number} for number in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / ".hidden").write_text("no")
    return tmp_path / "a.jsonl"


def test_sources_are_prepared_once_and_shown(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "corpus"
    for _ in range(2):
        done = plait("data", "prepare", str(texts), "--out", str(out), "--eval-fraction", "0", "--json")
        assert done.returncode == 0, done.stderr
        (found,) = json.loads(done.stdout)["corpora"]
        assert (found["split"], found["documents"]) == ("train", 20)
    corpus = Corpus.open(out)
    assert found["tokens"] == corpus.num_tokens("train")
    shown = plait("data", "show", str(out), "--document", "3", "--json")
    assert shown.returncode == 0, shown.stderr
    told = json.loads(shown.stdout)
    (row,) = told["splits"]
    assert told["samples"] == [repr("document 3 " * 4)]
    assert (row["documents"], row["shortest"], row["longest"]) == (20, 12, 12 * 20 + 1)
    assert "documents end with 256" in plait("data", "show", str(out)).stdout


def test_a_prepared_corpus_is_a_source_of_a_job(texts: Path, tmp_path: Path) -> None:
    assert (
        plait("data", "prepare", str(texts), "--out", str(tmp_path / "corpus"), "--eval-fraction", "0.3").returncode
        == 0
    )
    (tmp_path / "job.toml").write_text(
        '[model]\nfamily = "gpt"\nhidden = 8\nnum_layers = 1\nnum_heads = 1\n'
        f'[data]\ntext = "corpus"\nsequence_length = 8\n[train]\nsteps = 3\n[run]\nfolder = "{tmp_path}/runs"\n'
    )
    done = plait("data", "prepare", str(tmp_path / "job.toml"), "--json")
    assert done.returncode == 0, done.stderr
    assert {row["folder"] for row in json.loads(done.stdout)["corpora"]} == {str(tmp_path / "corpus")}
    assert plait("train", str(tmp_path / "job.toml"), "--dry-run").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("prepare", "none.txt", "--out", "x"), "none.txt: no such file or folder"),
        (("prepare", "a.jsonl"), "--out: is missing"),
        (("prepare", "a.jsonl", "--out", "x", "--text-key", "body"), "have no 'body', but 'text', 'id'"),
        (("prepare", "a.jsonl", "--out", "x", "--tokenizer", "none.json"), "none.json: no such tokenizer file"),
        (("prepare", "a.jsonl", "--out", "x", "--eval-fraction", "2"), "eval_fraction"),
        (("show", "corpus", "--document", "20"), "--document: 20 is none of the 20 documents of corpus. Use 0 to 19"),
        (("show", "corpus", "--document", "-1"), "--document: -1 is none of the 20 documents"),
        (("prepare", "corpus", "--out", "x"), "corpus: is a prepared corpus already; name it as data.text"),
        (("show", "."), "is no prepared corpus and no folder of a run"),
    ],
)
def test_a_mistake_is_one_paragraph(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if "corpus" in arguments:
        prepare([texts], ByteTokenizer(), tmp_path / "corpus", CorpusSettings(eval_fraction=0))
    done = plait("data", *arguments)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
