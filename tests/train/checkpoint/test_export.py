"""Exported folders, read by transformers: equal logits, equal token ids, or one clear refusal
beforehand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.base.errors import CheckpointError, JobError, LaunchError
from plait.train.checkpoint.export import export_run, tokenizer_files
from plait.train.checkpoint.folder import file_of
from plait.train.comm.wire import NullWire
from plait.train.data.tokenizer import ByteTokenizer, load_tokenizer
from plait.train.model.transformer import Transformer
from tests.train.checkpoint.test_huggingface import run
from tests.train.checkpoint.writing import GPT, LLAMA, write_run
from tests.train.data.test_tokenizer import write_tokenizer

TOKENS = torch.randint(0, 257, (2, 8), generator=torch.Generator().manual_seed(3))
SCALING = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_positions": 4}


def assert_same(out: Path, model: Transformer) -> Any:
    """transformers computes what we do; returns its model."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    with torch.no_grad():
        found = theirs(TOKENS).logits
    expected = run(model, NullWire(), TOKENS)[0][..., : model.spec.vocab]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    return theirs


SHAPES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "a head size of its own": {**LLAMA, "head_size": 6, "num_kv_heads": 2},
    "an odd hidden size": {**LLAMA, "hidden": 15, "num_heads": 3, "head_size": 4, "num_kv_heads": 1},
    "whole numbers where transformers wants fractions": {
        **LLAMA,
        "rope_theta": 10,
        "rope_scaling": SCALING,
    },
    "tied, and a padded vocabulary": {**LLAMA, "tied_embeddings": True, "vocab": 301},
    "gpt": {**GPT, "dropout": 0.1, "attention_dropout": 0.2},
    "gpt untied": {**GPT, "hidden": 15, "num_heads": 3, "ffn_hidden": 7, "tied_embeddings": False},
}


@pytest.mark.parametrize("shape", list(SHAPES))
def test_transformers_computes_the_same(tmp_path: Path, shape: str) -> None:
    models = write_run(tmp_path / "run", SHAPES[shape], steps=(1, 2))
    assert export_run(tmp_path / "run", tmp_path / "out") == (2, ())
    theirs = assert_same(tmp_path / "out", models[2])
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == 256
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_a_run_in_double_precision(tmp_path: Path) -> None:
    models = write_run(tmp_path / "run", LLAMA, precision="fp64", steps=(1,))
    export_run(tmp_path / "run", tmp_path / "out")
    assert assert_same(tmp_path / "out", models[1]).dtype == torch.float64


def test_an_older_step(tmp_path: Path) -> None:
    models = write_run(tmp_path / "run", LLAMA, steps=(1, 20, 300))
    assert export_run(tmp_path / "run", tmp_path / "out", 20) == (20, ())
    assert_same(tmp_path / "out", models[20])
    with pytest.raises(CheckpointError, match=r"step-00000002: no complete .*The folder also holds steps 1, 20, 300$"):
        export_run(tmp_path / "run", tmp_path / "other", 2)
    assert not (tmp_path / "other").exists()


def test_a_folder_that_belongs_to_a_run_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "run", LLAMA, steps=(1,))
    (tmp_path / "plan.json").write_bytes((tmp_path / "run" / "plan.json").read_bytes())  # no run: out may be here
    run, checkpoint = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000001"
    (tmp_path / "link").symlink_to(run)
    shutil.copytree(checkpoint, tmp_path / "copy")
    there = sorted(tmp_path.rglob("*"))
    for out, says in (
        (run, "is the folder of a run"),
        (tmp_path / "link", "is the folder of a run"),
        (tmp_path / "other" / ".." / "run" / "out", f"lies in the run {run}"),
        (run / "checkpoints", f"lies in the run {run}"),
        (checkpoint, "is the folder of a checkpoint"),
        (tmp_path / "copy", "is the folder of a checkpoint"),
        (tmp_path / "copy" / "out", "lies in the checkpoint"),
    ):
        with pytest.raises(JobError, match=f"OUT: .* {says}"):
            export_run(run, out)
    assert sorted(tmp_path.rglob("*")) == there
    write_run(tmp_path / "second", LLAMA, steps=(1,))
    with pytest.raises(JobError, match="lies in the run"):
        export_run(tmp_path / "second", run / "out")
    assert export_run(run, tmp_path / "out").step == 1


def test_a_folder_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    write_run(tmp_path / "run", LLAMA, steps=())
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "out", Path("/proc/out")):
        with pytest.raises(LaunchError, match=rf"{out}/config\.json cannot be written"):
            export_run(tmp_path / "run", out)


@pytest.mark.parametrize("step", [-1, 0, 10**23])
def test_a_number_that_is_no_step_is_refused(tmp_path: Path, step: int) -> None:
    write_run(tmp_path / "run", LLAMA, steps=(1,))
    with pytest.raises(JobError, match=r"--step: .* is no step\. Allowed: 1 to 2147483647"):
        export_run(tmp_path / "run", tmp_path / "out", step)


@pytest.mark.parametrize(
    "shape, says",
    [
        ({**LLAMA, "hidden": 18, "head_size": 4}, r"no Llama with a hidden size \(18\) that its 4 heads do not divide"),
        ({**GPT, "head_size": 6}, "no GPT-2 of 4 heads of size 6"),
        ({**LLAMA, "parallel_block": True}, "no llama model with parallel blocks"),
        ({**GPT, "family": "utransformer", "levels": 1, "num_layers": 3}, "no U-Transformer"),
    ],
)
def test_what_transformers_has_not_is_refused_first(tmp_path: Path, shape: dict[str, Any], says: str) -> None:
    write_run(tmp_path / "run", shape, steps=(1,))
    shutil.rmtree(tmp_path / "run" / "checkpoints")  # so early that weights are not even looked for
    with pytest.raises(CheckpointError, match=says):
        export_run(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint(tmp_path: Path) -> None:
    models = write_run(tmp_path / "run", LLAMA, steps=(1, 2))
    file = tmp_path / "run" / "checkpoints" / "step-00000002" / file_of(0)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"step-00000002/rank-00000\.safetensors: damaged.*also holds step 1"):
        export_run(tmp_path / "run", tmp_path / "out", 2)
    assert not (tmp_path / "out").exists()
    step, (warning,) = export_run(tmp_path / "run", tmp_path / "out")
    assert step == 1
    assert str(file) in warning and "step 1 is used instead" in warning
    assert_same(tmp_path / "out", models[1])
    assert file.exists(), "an export changes nothing in the run"


def test_a_run_without_checkpoints(tmp_path: Path) -> None:
    write_run(tmp_path / "run", LLAMA, steps=())
    with pytest.raises(CheckpointError, match="holds no complete checkpoint yet"):
        export_run(tmp_path / "run", tmp_path / "out")


# ---- tokenizers ----


@pytest.fixture(scope="module")
def their_bytes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The byte tokenizer, as transformers reads it."""
    folder = tmp_path_factory.mktemp("bytes")
    for name, content in tokenizer_files(ByteTokenizer()).items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 257}))
    return transformers.AutoTokenizer.from_pretrained(folder)


@settings(max_examples=300)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_has_the_same_bytes(their_bytes: Any, text: str) -> None:
    ids = ByteTokenizer().encode(text).tolist()
    assert their_bytes(text)["input_ids"] == ids
    assert their_bytes.decode(ids) == text


def test_the_end_of_text_is_no_text(their_bytes: Any) -> None:
    assert (len(their_bytes), their_bytes.eos_token_id) == (257, 256)
    for text in (their_bytes.eos_token, f"a {their_bytes.eos_token}b", "".join(map(chr, range(300)))):
        assert their_bytes(text)["input_ids"] == ByteTokenizer().encode(text).tolist()
    assert their_bytes.decode([104, 105, 256], skip_special_tokens=True) == "hi"


@pytest.mark.parametrize("beside", [None, {"eos_token": "<stop>", "model_max_length": 77}])
def test_a_tokenizer_file_goes_along(tmp_path: Path, beside: dict[str, Any] | None) -> None:
    file = write_tokenizer(tmp_path / "tokenizer.json", special=("<|endoftext|>", "<stop>"))
    if beside:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(beside))
    ours = load_tokenizer(file)
    write_run(tmp_path / "run", LLAMA, tokenizer=str(file), steps=(1,))
    assert export_run(tmp_path / "run", tmp_path / "out").warnings == ()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "the cat sat on the mat, naïve <|endoftext|> and so on"
    assert theirs(text)["input_ids"] == ours.encode(text).tolist()
    assert theirs.eos_token_id == ours.end_of_text
    assert theirs.eos_token == (beside["eos_token"] if beside else "<|endoftext|>")
    assert not beside or theirs.model_max_length == 77
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == ours.end_of_text
    assert load_tokenizer(tmp_path / "out").fingerprint == ours.fingerprint


SAMPLING = {"temperature": 0.6, "top_p": 0.95, "do_sample": True}
IDS = {"eos_token_id": [7, 256], "pad_token_id": 3, "suppress_tokens": [1]}


@pytest.mark.parametrize("other", [False, True])
def test_settings_of_generation_go_along(tmp_path: Path, other: bool) -> None:
    """With ids of tokens, if they are the tokenizer's."""
    base = tmp_path / "base"
    base.mkdir()
    file = write_tokenizer(base / "tokenizer.json", special=("<|endoftext|>", "<stop>"))
    (base / "generation_config.json").write_text(json.dumps(SAMPLING | IDS))
    name = "bytes" if other else str(file)
    write_run(tmp_path / "run", LLAMA, tokenizer=name, steps=(1,), init_from=str(base) if other else None)
    warnings = export_run(tmp_path / "run", tmp_path / "out").warnings
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    end = load_tokenizer(name).end_of_text
    lost = f"eos_token_id, pad_token_id, suppress_tokens of {base}/generation_config.json are ids of another tokenizer"
    assert found == SAMPLING | ({"eos_token_id": end} if other else IDS | {"eos_token_id": [end, 7, 256]})
    assert [lost in one for one in warnings] == [True] * other
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.6
    (base / "generation_config.json").write_text("[")
    (warning,) = export_run(tmp_path / "run", tmp_path / "again").warnings
    assert "generation_config.json cannot be read" in warning


def test_dropout_for_which_a_config_has_no_place_is_said(tmp_path: Path) -> None:
    write_run(tmp_path / "run", {**LLAMA, "dropout": 0.25}, steps=(1,))
    (warning,) = export_run(tmp_path / "run", tmp_path / "out").warnings
    assert "model.dropout = 0.25" in warning


def test_a_tokenizer_that_is_gone_costs_the_tokenizer_only(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "tokenizer.json")
    write_run(tmp_path / "run", {**LLAMA, "vocab": 301}, tokenizer=str(file), steps=(1,))
    file.unlink()
    (warning,) = export_run(tmp_path / "run", tmp_path / "out").warnings
    assert str(file) in warning and "has no tokenizer" in warning
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.eos_token_id is None
