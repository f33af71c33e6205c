"""Mistakes in jobs: refused with the file, the key, the value and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.core.base.errors import JobError
from plait.core.job.spec import Job
from tests.core.conftest import MODEL

MISTAKES = {
    "train.stepz = 3": "did you mean 'steps'",
    "trian.steps = 3": "trian | did you mean 'train'",
    "train.steps = -3": "-3 is not allowed. Allowed: a whole number of at least 1",
    'train.steps = "3"': '"3" is not allowed',
    "train.steps = true": "true is not allowed",
    "train.steps = 1.0": "1.0 is not allowed",
    "train.learning_rate = true": "a number above 0",
    "train.learning_rate = inf": "inf is not finite",
    "train.adam_betas = [0.9]": "a list of 2, each a number of at least 0 and below 1",
    "train.adam_betas = [0.9, 1.5]": "1.5 is not allowed",
    'train.weight_decay_of = {"embeding.*" = 0}': "did you mean 'embedding.weight'",
    'train.weight_decay_of = {"*.bias" = 0, "*.biass" = 0}': "is called '*.biass'",
    'train.lr_decay_style = "inverse_sqrt"': 'Write "inverse-square-root"',
    'train.precision = "fp16"': '"fp16" is not supported: its gradients need loss scaling. Write "bf16-mixed"',
    "train.seed = 2020-01-01": "2020-01-01 is not allowed",
    "train.micro_batch_size = 3\ntrain.global_batch_size = 8": (
        "not a multiple of micro_batch_size x dp = 3 x 1. Use 6 or 9, or set train.micro_batch_size=2"
    ),
    "train.micro_batch_size = 3\nstrategy.dp = 2\ntrain.global_batch_size = 8": "not a multiple",
    "train.micro_batch_size = 8\ntrain.global_batch_size = 4": "not a multiple",
    "train.steps = 5\ntrain.warmup_steps = 6": "6 exceeds steps = 5",
    "train.min_learning_rate = 1.0": "exceeds learning_rate",
    "train = 3": "3 is not a table",
    "data.sequence_length = 4096": "exceeds the model's max_sequence = 2048",
    "data.text = [1]": "a text or a list, each a text",
    "data.text = []": "[] is not allowed",
    'data.text = ""': "is empty",
    "strategy.tp = 5": "5 does not divide num_heads = 12. Use 1, 2, 3, 4, 6 or 12.",
    "strategy.slices.batch = 9": "9 slices of a micro-batch of 1",
    "strategy.slices.batch = 0": "0 is not allowed",
    'strategy.slices = "many"': '"many" is not allowed. Allowed: "auto" or { batch',
    "strategy.slices.p3 = 1": "Known here: batch, columns",
    'strategy.sequence_parallel = "yes"': 'true or false or "auto"',
    'strategy.overlap.shard = "some"': '"none" or "forward" or "backward" or "both" or "auto"',
    'strategy.recompute = "some"': '"none" or "selective" or "full" or "layer" or { kind',
    'strategy.recompute.kind = "full"\nstrategy.recompute.layers = -1': "-1 is not allowed",
    'strategy.pp = 2\nstrategy.recompute = {kind = "full", layers = 99}': "strategy.recompute.layers | Use 12",
    'strategy.pp = 2\nstrategy.schedule = "zb-v"\nstrategy.virtual_stages = 3': "2 stages per rank, not 3. Use 2, or",
    'strategy.pp = 2\nstrategy.schedule = "1f1b"\nstrategy.virtual_stages = 2': (
        '1 stage per rank, not 2. Use 1, or set strategy.schedule="interleaved"'
    ),
    'run.name = "a/b"': "is no name for a folder",
}
MODELS = {
    "": "[model] | is missing",
    "model = 3": "3 is not a table",
    'model.preset = "gpt3-125"': "did you mean 'gpt3-125m'",
    "model.preset = 3": "3 is not a text",
    'model.preset = "gpt3-125m"\nmodel.huggingface = "x"': "Leave it out",
    'model.preset = "gpt3-125m"\nmodel.num_layres = 3': "did you mean 'num_layers'",
    'model.preset = "gpt3-125m"\nmodel.num_layers = "3"': '"3" is not allowed. Allowed: a whole number',
    'model.family = "gpt"\nmodel.hidden = 8': "model.num_layers | is missing",
    'model.family = "gpt"\nmodel.hiden = 8': "did you mean 'hidden'",
    'modle.preset = "gpt3-125m"': "modle | unknown key (did you mean",
}


@pytest.mark.parametrize("text", [*MISTAKES, *MODELS])
def test_a_mistake_names_file_key_value_and_what_is_allowed(job_file, text: str) -> None:
    """The last line's key, where none stands before the words."""
    key, _, words = (MISTAKES | MODELS)[text].rpartition(" | ")
    file = job_file(f"{text}\n{MODEL * (text in MISTAKES)}")
    with pytest.raises(JobError, match=re.escape(words)) as caught:
        Job.read(file)
    assert (caught.value.file, caught.value.key) == (str(file), key or text.splitlines()[-1].partition(" = ")[0])


def test_an_error_in_a_file_that_the_job_names_is_about_that_file(job_file, tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        Job.read(job_file('[model]\nhuggingface = "config.json"'))
    assert caught.value.file == str(tmp_path / "config.json")


TYPED = {
    "train.steps=100000000000000000000000": "100000000000000000000000 is not allowed.*at most 2147483647",
    "train.seed=9223372036854775808": "Allowed: a whole number, at most 9223372036854775807",
    "data.seed=-9223372036854775809": "Allowed: a whole number, at least -9223372036854775808",
    "run.timeout=1e300": r"1e\+300 is not allowed",
    f"train.steps=0x{'f' * 5000}": "a number of 20000 bits is not allowed",
    f"model.preset=[0x{'f' * 5000}]": "a list with a number that is too long",
    f"run.name={'x' * 300}": "has a name of 300 bytes. Allowed: names of at most 255",
    'run.name="a\\nb"': "holds a line break",
    'run.name="a\\u001b[31m"': "holds a line break, or another character",
    'run.name=" "': "' ' is no name for a folder",
    f"run.folder={'x/' * 2000}": "has 4000 bytes",
    'run.folder=""': "is empty",
    'data.text=["a", ""]': "is empty",
    'data.text="a\\u0000"': "holds a zero byte",
    f"model.huggingface={'x' * 300}": "has a name of 300 bytes",
    "model.preset=../jobs/quickstart": "no model preset '../jobs/quickstart'",
    "model.preset=../models/gpt3-125m": r"no model preset .*did you mean 'gpt3-125m'",
    f"model.preset={'x' * 300}": "no model preset",
    "train.init_from=a\udcff": "is not UTF-8",
    "model.dropout=nan": "nan is not finite. Allowed: a number of at least 0 and below 1",
    "model.norm_eps=nan": "nan is not finite. Allowed: a number above 0 and below 1",
    "model.hidden=nan": "nan is not finite. Allowed: a whole number of at least 1",
    "model.window=nan": "nan is not finite. Allowed: a whole number of at least 0",
    "plan.memory_margin=inf": "inf is not finite. Allowed: a number of at least 0 and b",
}


@pytest.mark.parametrize("setting", TYPED)
def test_values_that_cannot_be_are_refused_by_name(job_file, setting: str) -> None:
    with pytest.raises(JobError, match=TYPED[setting]) as caught:
        Job.read(job_file(MODEL), [setting]).model_spec(16)
    assert caught.value.file == "command line" and (caught.value.key or setting) in setting


def test_a_name_may_be_left_out(job_file) -> None:
    job = Job.read(job_file(MODEL), ["run.name= "])
    assert job.run.name == ""
    with pytest.raises(JobError, match=r"run\.name"):
        job.named("two\nlines")
    assert job.changed(["run.name=one"]).named("two\nlines").run.name == "one"


def test_stages_that_a_schedule_has_may_be_said(job_file: Callable[[str], Path]) -> None:
    for told in (
        '"zb-v"\nvirtual_stages = 2',
        '"zb-v"',
        '"interleaved"\nvirtual_stages = 3',
        '"auto"\nvirtual_stages = 2',
    ):
        Job.read(job_file(f"{MODEL}[strategy]\npp = 2\nschedule = {told}\n"))


def test_what_computes_wrong_numbers_is_planned_and_never_trained() -> None:
    model = {"family": "gpt", "num_layers": 1, "hidden": 8, "num_heads": 2, "vocab": 16, "max_sequence": 8}
    for overlap in ("no-communication", {"tp": "no-communication"}):
        strategy = {"tp": 2, "overlap": overlap}
        job = Job.from_dict({"model": model, "data": {"sequence_length": 8}, "strategy": strategy})
        with pytest.raises(JobError, match="would train a wrong model") as refused:
            job.check_trains(job.model_spec(16))
        assert refused.value.key == "strategy.overlap"
