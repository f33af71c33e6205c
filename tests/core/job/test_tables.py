"""Settings without their table: the error names the setting that was meant, as it is written
there."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.core.base.errors import JobError
from plait.core.job.spec import Job

TIER = "unit"
JOB = '[model]\npreset = "gpt3-125m"\n'
TYPED = {
    "steps=10": "steps: stands without its table. Write train.steps=10.",
    "step=10": "step: is not a setting; train.steps is. Write train.steps=10.",
    "preset=h100": "preset: stands without its table. Write model.preset=h100 or cluster.preset=h100.",
    "cluster=h100": 'cluster: "h100" is not a table. Write cluster.preset=h100.',
    "model=llama3-8b": 'model: "llama3-8b" is not a table. Write model.preset=llama3-8b.',
    "train=3": "train: 3 is not a table. Write train.KEY=VALUE; plait job train lists its keys.",
    "strategy=tp2": 'strategy: "tp2" is not a table. Write strategy=auto to have all of it searched, or its keys',
    "train.tp=2": "train.tp: unknown key. Write strategy.tp.",
    "lr=3": "lr: is called train.learning_rate here.",
    "optimizer.lr=3": "optimizer.lr: is called train.learning_rate here. Write train.learning_rate.",
}
HUB = {
    "meta-llama/Meta-Llama-3-8B": "model.preset=llama3-8b",
    "mistralai/Mixtral-8x7B-v0.1": "model.preset=mixtral-8x7b",
    "Qwen/Qwen2.5-7B-Instruct": "model.preset=qwen2.5-7b",
    "openai-community/gpt2": "model.huggingface=FOLDER",
}


def read(folder: Path, text: str, *words: str) -> str:
    (folder / "job.toml").write_text(text)
    with pytest.raises(JobError) as caught:
        Job.read(folder / "job.toml", words).model_spec(1)
    return str(caught.value)


@pytest.mark.parametrize("word", TYPED)
def test_a_setting_on_the_command_line_is_told_in_full(tmp_path: Path, word: str) -> None:
    assert read(tmp_path, JOB, word).startswith(f"command line: {TYPED[word]}")


def test_a_setting_in_a_file_is_told_its_table(tmp_path: Path) -> None:
    assert "steps: stands without its table. Write steps = 10 below [train]." in read(tmp_path, f"steps = 10\n{JOB}")
    assert 'Write preset = "x" below [model].' in read(tmp_path, 'model = "x"')


@pytest.mark.parametrize("name", HUB)
def test_a_name_of_a_hub_is_not_downloaded(tmp_path: Path, name: str) -> None:
    found = read(tmp_path, f'[model]\npreset = "{name}"')
    assert f"'{name}' is a name of a model hub, and nothing is downloaded" in found and HUB[name] in found
