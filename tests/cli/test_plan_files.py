"""``plait plan`` of other frameworks' files: what is searched beside them, and what they ask for."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.support.command import plait

TIER = "unit"
SCRIPT = """
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 \\
    --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 64 \\
    --padded-vocab-size 50304 --bf16 --tensor-model-parallel-size 2 --hidden-dropout 0 --attention-dropout 0
"""
TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 2048
[parallelism]
tensor_parallel_degree = 4
"""
DEEPSPEED = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "train_batch_size": 64,
             "train_micro_batch_size_per_gpu": 1}  # fmt: skip
LLAMA = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512,
         "intermediate_size": 512, "max_position_embeddings": 512, "rms_norm_eps": 1e-5}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.sh").write_text(SCRIPT)
    (tmp_path / "titan.toml").write_text(TITAN)
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def plan(folder: Path, *words: object) -> CompletedProcess[str]:
    return plait("plan", *words, "cluster.preset=h100", folder=folder)


def text(found: CompletedProcess[str]) -> str:
    return " ".join((found.stdout + found.stderr).split())


DS_MODEL = ("model.preset=llama3.2-1b", "data.sequence_length=1024")


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (("run.sh",), "--tensor-model-parallel-size 1"),
        (("titan.toml", "cluster.ranks=8"), "parallelism.tensor_parallel_degree = "),
        (("ds.json", "cluster.ranks=8", *DS_MODEL), '"train_micro_batch_size_per_gpu": 8'),
    ],
)
def test_a_file_s_strategy_beside_the_best_that_is_searched(
    folder: Path, words: tuple[str, ...], changed: str
) -> None:
    own = " ".join(plan(folder, *words).stdout.split())
    assert own.endswith("This is the file's own strategy: strategy=auto on the command line searches for a faster one.")
    found = plan(folder, *words, "strategy=auto")
    assert found.returncode == 0 and "As the file has it, a step takes" in text(found)
    assert changed in text(found).partition("the best found takes")[2]
    alone, both = (json.loads(plan(folder, *words, *more, "--json").stdout) for more in ((), ("strategy=auto",)))
    best = both["candidates"][0]
    assert both["as_written"]["own"]["seconds"] == pytest.approx(alone["candidates"][0]["seconds"])
    assert best["seconds"] < both["as_written"]["own"]["seconds"] and len(both["candidates"]) > 1
    assert any(changed in one for one in both["as_written"]["changes"])


def test_a_strategy_of_a_job_is_left_to_the_planner(folder: Path) -> None:
    (folder / "job.toml").write_text(
        '[model]\npreset = "llama3.2-1b"\n[data]\nsequence_length = 1024\n[train]\nglobal_batch_size = 16\n'
        'precision = "bf16-mixed"\n[cluster]\npreset = "h100"\nranks = 8\n[strategy]\ntp = 8\n'
    )
    found = json.loads(plan(folder, "job.toml", "strategy=auto", "--json").stdout)
    assert found["searched"] > 100 and found["candidates"][0]["strategy"]["tp"] == 1


@pytest.mark.parametrize("first", [True, False])
def test_settings_that_end_like_a_file_are_settings(folder: Path, *, first: bool) -> None:
    model = "model.huggingface=config.json"
    words = (model, "ds.json") if first else ("ds.json", model)
    found = plan(folder, *words, "cluster.ranks=8", "data.sequence_length=256")
    assert found.returncode == 0 and "run by DeepSpeed" in text(found), text(found)
