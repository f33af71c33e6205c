"""A loop of one's own under torchrun: what ``plait train`` computes, and what transformers
computes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from plait.core.job.spec import Job
from tests.support.peers import Peer
from tests.support.ports import own_port
from tests.support.runs import curve, train, write_job

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"

SAME_TOKENS = """
import sys
from pathlib import Path
import plait
from plait.core.job.plan import RunSettings
from plait.train.data.stream import Stream

job, corpus, *overrides = sys.argv[1:]
with plait.Engine(job, overrides) as engine:
    stream, sizes = Stream.open(RunSettings.of(engine.job), Path(corpus)).train, engine.job.train.batches
    engine.load()
    while engine.done < engine.job.train.steps and not engine.stopping:
        taken = stream.take(sizes.before(engine.done), engine.batch_size)
        engine.step(taken.tokens, taken.targets, starts=taken.starts)
        if engine.done % 5 == 0:
            engine.save()
    engine.save(wait=True)
"""

OWN_WEIGHTS = """
import sys
import torch
from safetensors.torch import save_file
import plait

job, out, *overrides = sys.argv[1:]
with plait.Engine(job, overrides) as engine:
    chance = torch.Generator().manual_seed(1)
    tokens = torch.randint(engine.job.model["vocab"], (8, 17), generator=chance)
    labels = tokens[:, 1:].clone()
    labels[:, :3] = -100
    weights = torch.randn(8, 16, generator=chance, dtype=torch.float64)
    logprobs = engine.logprobs(tokens[:, :-1], labels)
    found = {"tokens": tokens, "labels": labels, "weights": weights, "logprobs": logprobs}
    starts = torch.tensor([[0] * 6 + [6] * 10]).expand(8, 16).contiguous()
    apart = engine.logprobs(tokens[:, :-1], tokens[:, 1:], starts=starts)
    loss = engine.evaluate(tokens, starts=starts)
    assert abs(loss + apart.mean().item()) < 1e-12 and abs(engine.evaluate(tokens) - loss) > 1e-6
    found["apart"] = apart
    before = engine.state_dict("huggingface")
    parts = engine.state_dict("sharded")
    assert parts and all(tensor.shape == box.shape for boxes in parts.values() for box, tensor in boxes)
    engine.step(tokens[:, :-1], labels, weights=weights, divisor=7.0)
    after = engine.state_dict("huggingface")
    if engine.rank == 0:
        rate = engine.job.train.learning_rate
        found |= {f"gradient.{name}": (before[name] - after[name]) / rate for name in before}
        found |= {f"weight.{name}": before[name] for name in before}
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, out)
    else:
        assert before == {} == after
"""

TINY = """
[model]
family = "llama"
hidden = 16
num_heads = 4
num_kv_heads = 2
num_layers = 2
ffn_hidden = 32
vocab = 257
[data]
sequence_length = 16
[train]
steps = 3
global_batch_size = 8
micro_batch_size = 2
learning_rate = 0.5
precision = "fp64"
clip_grad = 0
weight_decay = 0
optimizer = "sgd"
sgd = { momentum = 0.0 }
[strategy]
slices = { batch = 1 }
"""


def torchrun(ranks: int, script: Path, *arguments: str | Path, errors: bool = False) -> str:
    """What a script prints that ranks have run; with errors, where warnings stand, too."""
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={own_port()}"]
    done = subprocess.run(
        [sys.executable, *launch, str(script), *map(str, arguments)],
        capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr * errors


RAMP = "train.rampup_batch_size={ start = 4, increment = 4, samples = 12 }"
WAYS = {
    "one size": ["strategy.dp=2", "strategy.shard=zero2", "train.micro_batch_size=2"],
    "a ramp through a pipeline": ["strategy.pp=2", "strategy.tp=2", "train.micro_batch_size=1", RAMP,
                                  "train.global_batch_size=12"],
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_loop_of_ones_own_is_plait_train_bit_for_bit(tmp_path: Path, way: str) -> None:
    """Under tensor and data parallelism, sharded, in several micro-batches, in steps that grow;
    interrupted and gone on with."""
    job = write_job(tmp_path, steps=8)
    shape = [*WAYS[way], "strategy.slices.batch=1", "train.eval_every=0", "train.lr_decay_steps=8"]
    train(job, *shape)
    script = tmp_path / "loop.py"
    script.write_text(SAME_TOKENS)
    corpus, runs = tmp_path / "runs" / "job" / "corpus", f"run.folder={tmp_path / 'runs'}"
    for steps in (5, 8):
        torchrun(4, script, job, corpus, runs, "run.name=own", *shape, f"train.steps={steps}")
    assert curve(job) == curve(job, "own")
    theirs, ours = (tmp_path / "runs" / name / "checkpoints" / "step-00000008" for name in ("job", "own"))
    files = sorted(file.name for file in theirs.glob("*.safetensors"))
    assert files and files == sorted(file.name for file in ours.glob("*.safetensors"))
    assert all((theirs / name).read_bytes() == (ours / name).read_bytes() for name in files)


@pytest.mark.parametrize("strategy", ["tp=1 dp=1", "tp=2 dp=2 shard=fsdp", "pp=2 cp=2 slices.batch=2"])
def test_weights_a_token_and_log_probabilities_are_those_of_transformers(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "job.toml").write_text(TINY)
    script, out = tmp_path / "loop.py", tmp_path / "found.safetensors"
    script.write_text(OWN_WEIGHTS)
    keys = [f"strategy.{one}" for one in strategy.split()]
    ranks = 1 if strategy == "tp=1 dp=1" else 4
    torchrun(ranks, script, tmp_path / "job.toml", out, f"run.folder={tmp_path / 'runs'}", *keys)
    found = load_file(out)
    model = Peer(Job.read(tmp_path / "job.toml").model_spec(257)).model
    model.load_state_dict({name.removeprefix("weight."): t for name, t in found.items() if name.startswith("weight.")})
    with mock.patch.object(torch, "float32", torch.float64):
        logits = model(found["tokens"][:, :-1]).logits
        apart = [model(found["tokens"][:, one]).logits for one in (slice(6), slice(6, 16))]
    own = torch.cat(apart, 1).log_softmax(-1).gather(-1, found["tokens"][:, 1:, None])[..., 0]
    assert (own - found["apart"]).abs().max() < 1e-9, "attention stops at documents' ends"
    labels = found["labels"]
    counts = labels != -100
    each = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] * counts
    assert (each - found["logprobs"]).abs().max() < 1e-9
    (-(each * found["weights"]).sum() / 7.0).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        scale = parameter.grad.abs().max().item()
        assert (found[f"gradient.{name}"] - parameter.grad).abs().max().item() < 1e-9 * max(scale, 1e-3), name


def test_the_examples_run(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("".join(f"line {i} says {i * 7 % 97}\n" for i in range(300)))
    (tmp_path / "job.toml").write_text(TINY)
    runs = f"run.folder={tmp_path / 'runs'}"
    common = (tmp_path / "job.toml", text, runs, "train.learning_rate=0.01", "train.optimizer=adamw")
    assert "after 2 steps" in torchrun(2, EXAMPLES / "finetune.py", *common, "train.steps=2", "strategy.tp=2")
    said = torchrun(2, EXAMPLES / "finetune.py", *common, "strategy.dp=2")
    assert "resuming after step 2" in said and "after 3 steps" in said
    said = torchrun(1, EXAMPLES / "token_weights.py", tmp_path / "job.toml", runs, "run.name=weights")
    assert "better sequences became more likely" in said


def test_what_is_no_batch_is_refused(tmp_path: Path) -> None:
    import plait
    from plait.core.base.errors import JobError

    (tmp_path / "job.toml").write_text(TINY)
    tokens = torch.zeros(8, 17, dtype=torch.long)
    with plait.Engine(tmp_path / "job.toml", [f"run.folder={tmp_path / 'runs'}"]) as engine:
        for wrong, key in ((tokens[:4], "train.global_batch_size"), (tokens[:, :9], "data.sequence_length"),
                           (tokens + 300, "model.vocab")):  # fmt: skip
            with pytest.raises(JobError) as refused:
                engine.step(wrong)
            assert refused.value.key == key
        with pytest.raises(JobError, match="micro_batch_size"):
            engine.evaluate(tokens[:3])
        assert engine.step(tokens)["step"] == 1


def test_a_step_whose_targets_weigh_nothing_has_no_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import plait

    (tmp_path / "job.toml").write_text(TINY)
    tokens = torch.arange(8 * 16).reshape(8, 16) % 50
    against = torch.ones(8, 16)
    against[::2] = -1
    with plait.Engine(tmp_path / "job.toml", [f"run.folder={tmp_path / 'runs'}"]) as engine:
        folder = engine.run.folder
        ignored = engine.step(tokens, torch.full((8, 16), -100))
        balanced = engine.step(tokens, tokens, weights=against)
        divided = engine.step(tokens, torch.full((8, 16), -100), divisor=7.0)
        assert math.isnan(engine.evaluate(tokens, torch.full((8, 16), -100)))
        assert math.isfinite(engine.step(tokens, tokens)["loss"])
    assert math.isnan(ignored["loss"]) and ignored["norm"] == 0
    assert math.isnan(balanced["loss"]) and balanced["norm"] == 0
    assert divided["loss"] == 0, "a sum over nothing"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] is None for line in lines] == [True, True, False, False]
    said = capsys.readouterr().out
    assert said.count("has no loss: the weights of its targets add up to 0") == 2
    assert "warning: step 1 has no loss" in said and "the evaluation after step 3 has no loss" in said


FORGETFUL = """
import sys
import torch
import plait
from plait.core.base.errors import JobError

job, loads, *overrides = sys.argv[1:]
with plait.Engine(job, overrides) as engine:
    if loads == "loads":
        engine.load()
    try:
        engine.step(torch.zeros(8, 17, dtype=torch.long))
        engine.save(wait=True)
    except JobError as error:
        assert engine.done == 0
        print(f"refused: {error}")
"""


def test_a_loop_that_forgets_to_load_overwrites_no_checkpoint(tmp_path: Path) -> None:
    """And one that goes on with other settings says so, though torchrun started it."""
    (tmp_path / "job.toml").write_text(TINY)
    script, runs = tmp_path / "loop.py", f"run.folder={tmp_path / 'runs'}"
    script.write_text(FORGETFUL)
    job = tmp_path / "job.toml"
    assert "refused" not in torchrun(2, script, job, "forgets", runs, "strategy.dp=2")
    said = torchrun(2, script, job, "forgets", runs, "strategy.dp=2")
    assert said.count("has a checkpoint after step 1, and load() was not called") == 2
    said = torchrun(2, script, job, "loads", runs, "strategy.dp=2", "train.learning_rate=0.25", errors=True)
    assert "refused" not in said
    assert "goes on with other settings: train.learning_rate was 0.5 and is 0.25" in " ".join(said.split())
