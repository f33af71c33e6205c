"""``plait sample``: what a run has learned, whatever shape and tokenizer it was trained with."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from plait.cli.main import main
from tests.support.runs import assert_refused, train, write_job

pytestmark = pytest.mark.slow

PROMPT = "line 7 of"


def sample(run: Path, *options: str, prompt: str = PROMPT) -> subprocess.CompletedProcess[str]:
    """``plait sample`` as a user types it, in this process, which has torch loaded already."""
    argv = ["plait", "sample", str(run), "--prompt", prompt, *options]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        patch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as end:
            main()
    return subprocess.CompletedProcess(argv, int(end.value.code or 0), out.getvalue(), err.getvalue())


def text(run: Path, *options: str) -> str:
    """What it writes."""
    done = sample(run, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_tokenizer(folder: Path) -> Path:
    """A small tokenizer.json whose tokens are pieces of words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    library.train_from_iterator(["line 1 of file 2 says 3"] * 10, trainer)
    library.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tensor-parallel GPT that has learned its text, with checkpoints of steps 60 and 120."""
    job = write_job(tmp_path_factory.mktemp("sample"), steps=120, every=60)
    train(job, "train.eval_every=0", "train.global_batch_size=16")
    return job.parent / "runs" / "job"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of pieces of words in fp64, all its weights sharded."""
    folder = tmp_path_factory.mktemp("sharded")
    job = write_job(folder, steps=12, family="llama", more="ffn_hidden = 64")
    settings = ("strategy.tp=1", "strategy.dp=2", "strategy.shard=fsdp", "train.eval_every=0", "train.precision=fp64")
    train(job, f"data.tokenizer={write_tokenizer(folder)}", "strategy.slices.batch=1", *settings)
    return job.parent / "runs" / "job"


def by_transformers(run: Path, out: Path, tokens: int) -> str:
    """The likeliest continuation, by the exported model."""
    import torch
    import transformers

    from plait.core.job.spec import Job
    from plait.train.checkpoint.export import export_run
    from plait.train.data.tokenizer import load_tokenizer

    export_run(run, out)
    tokenizer = load_tokenizer(Job.read(run / "job.toml").data.tokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    ids: list[int] = tokenizer.encode(PROMPT).tolist()
    with torch.no_grad():
        for _ in range(tokens):
            logits = model(torch.tensor([ids[-model.config.max_position_embeddings :]])).logits
            ids.append(int(logits[0, -1].argmax()))
            if ids[-1] == tokenizer.end_of_text:
                break
    return tokenizer.decode(ids) + "\n"


@pytest.mark.parametrize("run", ["trained", "sharded"])
def test_greedy_text_is_that_of_the_exported_model(run: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder: Path = request.getfixturevalue(run)
    assert text(folder, "--temperature", "0", "--tokens", "30") == by_transformers(folder, tmp_path / "out", 30)


def test_an_older_step_and_the_seed_decide(trained: Path) -> None:
    options = ("--tokens", "40", "--temperature", "1.5")
    one = text(trained, *options)
    assert one == text(trained, *options)
    assert one != text(trained, *options, "--seed", "1")
    assert one != text(trained, *options, "--step", "60")
    assert one.startswith(PROMPT)


@pytest.mark.parametrize(
    ("options", "prompt", "says"),
    [
        (("--tokens", "0"), PROMPT, ("--tokens", "at least 1")),
        (("--temperature", "-1"), PROMPT, ("--temperature", "0 or more")),
        (("--temperature", "nan"), PROMPT, ("--temperature", "0 or more")),
        ((), "", ("--prompt", "empty")),
        ((), "a longer prompt than 16 tokens", ("--prompt", "30 tokens", "at most 16")),
        (("--step", "-1"), PROMPT, ("--step: -1 is no step", "Allowed: 1 to 2147483647")),
        (("--step", "--5"), PROMPT, ("--step: '--5' is no step", "a number, or best")),
        (("--step", "1" * 5000), PROMPT, ("--step: ", "is no step")),
        (("--seed", "9223372036854775808"), PROMPT, ("--seed: 9223372036854775808 is no seed", "Allowed: -9223")),
        (("--seed", "-1" + "0" * 30), PROMPT, ("--seed: a number of 100 bits is no seed",)),
        (("--step", "7"), PROMPT, ("step-00000007", "no complete checkpoint")),
    ],
)
def test_a_mistake_is_one_paragraph(
    trained: Path, options: tuple[str, ...], prompt: str, says: tuple[str, ...]
) -> None:
    done = sample(trained, *options, prompt=prompt)
    assert_refused(done, *says)
    assert done.stdout == ""


def test_no_run_and_no_checkpoint(trained: Path, tmp_path: Path) -> None:
    assert_refused(sample(tmp_path / "nothing"), "no such run folder")
    assert_refused(sample(tmp_path), "holds no run")
    shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("step-*", "corpus"))
    assert_refused(sample(tmp_path / "run"), "no complete checkpoint yet")
