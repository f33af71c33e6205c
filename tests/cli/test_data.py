"""``plait data``: sources tokenised once, and what is told of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.train.data.corpus import Corpus
from tests.support.command import plait, succeed

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
        done = succeed("data", "prepare", str(texts), "--out", str(out), "eval_fraction=0", "--json")
        (found,) = json.loads(done.stdout)["corpora"]
        assert (found["split"], found["documents"]) == ("train", 20)
    corpus = Corpus.open(out)
    assert found["tokens"] == corpus.num_tokens("train")
    shown = succeed("data", "show", str(out), "--document", "3", "--json")
    told = json.loads(shown.stdout)
    (row,) = told["splits"]
    assert told["samples"] == [repr("document 3 " * 4)]
    assert (row["documents"], row["shortest"], row["longest"]) == (20, 12, 12 * 20 + 1)
    assert "documents end with 256" in plait("data", "show", str(out)).stdout


def test_a_prepared_corpus_is_a_source_of_a_job(texts: Path, tmp_path: Path) -> None:
    succeed("data", "prepare", str(texts), "--out", str(tmp_path / "corpus"), "eval_fraction=0.3")
    (tmp_path / "job.toml").write_text(
        '[model]\nfamily = "gpt"\nhidden = 8\nnum_layers = 1\nnum_heads = 1\n'
        f'[data]\ntext = "corpus"\nsequence_length = 8\n[train]\nsteps = 3\n[run]\nfolder = "{tmp_path}/runs"\n'
    )
    done = succeed("data", "prepare", str(tmp_path / "job.toml"), "--json")
    assert {row["folder"] for row in json.loads(done.stdout)["corpora"]} == {str(tmp_path / "corpus")}
    succeed("train", str(tmp_path / "job.toml"), "--dry-run")
