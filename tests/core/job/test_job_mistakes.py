"""Mistakes in jobs: refused with the file, the key, the value and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.core.base.errors import JobError
from plait.core.job.spec import Job
from tests.core.conftest import MODEL


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("[train]\nstepz = 3", "train.stepz", "did you mean 'steps'"),
        ("[trian]\nsteps = 3", "trian", "did you mean 'train'"),
        ("[train]\nsteps = -3", "train.steps", "-3 is not allowed. Allowed: a whole number of at least 1"),
        ('[train]\nsteps = "3"', "train.steps", '"3" is not allowed'),
        ("[train]\nsteps = true", "train.steps", "true is not allowed"),
        ("[train]\nsteps = 1.0", "train.steps", "1.0 is not allowed"),
        ("[train]\nlearning_rate = true", "train.learning_rate", "a number above 0"),
        ("[train]\nlearning_rate = inf", "train.learning_rate", "inf is not finite"),
        ("[train]\nadam_betas = [0.9]", "train.adam_betas", "a list of 2, each a number of at least 0 and below 1"),
        ("[train]\nadam_betas = [0.9, 1.5]", "train.adam_betas", "1.5 is not allowed"),
        ('[train.weight_decay_of]\n"embeding.*" = 0', "train.weight_decay_of", "did you mean 'embedding.weight'"),
        ('[train.weight_decay_of]\n"*.bias" = 0\n"*.biass" = 0', "train.weight_decay_of", "is called '*.biass'"),
        ('[train]\nlr_decay_style = "inverse_sqrt"', "train.lr_decay_style", 'Write "inverse-square-root"'),
        ('[train]\nprecision = "fp16"', "train.precision", 'Allowed: "fp32" or "bf16-mixed" or "fp64"'),
        ("[train]\nseed = 2020-01-01", "train.seed", "2020-01-01 is not allowed"),
        (
            "[train]\nglobal_batch_size = 8\nmicro_batch_size = 3",
            "train.global_batch_size",
            "not a multiple of micro_batch_size x dp = 3 x 1. Use 6 or 9, or set train.micro_batch_size=2",
        ),
        ("[train]\nsteps = 5\nwarmup_steps = 6", "train.warmup_steps", "6 exceeds steps = 5"),
        ("[train]\nmin_learning_rate = 1.0", "train.min_learning_rate", "exceeds learning_rate"),
        ("[data]\nsequence_length = 4096", "data.sequence_length", "exceeds the model's max_sequence = 2048"),
        ("[data]\ntext = [1]", "data.text", "a text or a list, each a text"),
        ("[data]\ntext = []", "data.text", "[] is not allowed"),
        ("[strategy]\ntp = 5", "strategy.tp", "5 does not divide num_heads = 12. Use 1, 2, 3, 4, 6 or 12."),
        ("[strategy]\nslices = { batch = 9 }", "strategy.slices.batch", "9 slices of a micro-batch of 1"),
        ('[strategy]\nslices = "many"', "strategy.slices", '"many" is not allowed. Allowed: "auto" or { batch'),
        ("[strategy]\nslices = { p3 = 1 }", "strategy.slices.p3", "Known here: batch, columns"),
        ("[strategy]\nslices = { batch = 0 }", "strategy.slices.batch", "0 is not allowed"),
        ("[strategy]\nslices = { p1 = 2 }", "strategy.slices.p1", "is called strategy.slices.batch now"),
        ('[strategy]\noverlap = "none"', "strategy.overlap", '"none" is called "no-communication" now'),
        ('[strategy]\nsequence_parallel = "yes"', "strategy.sequence_parallel", 'true or false or "auto"'),
        (
            '[strategy]\noverlap = { shard = "some" }',
            "strategy.overlap.shard",
            '"none" or "forward" or "backward" or "both" or "auto"',
        ),
        (
            '[strategy]\nrecompute = "some"',
            "strategy.recompute",
            '"none" or "selective" or "full" or "layer" or { kind',
        ),
        ('[strategy]\nrecompute = { kind = "full", layers = -1 }', "strategy.recompute.layers", "-1 is not allowed"),
        ('[run]\nname = "a/b"', "run.name", "is no name for a folder"),
    ],
)
def test_a_mistake_names_file_key_value_and_what_is_allowed(job_file, text: str, key: str, words: str) -> None:
    file = job_file(f"{MODEL}\n{text}\n")
    with pytest.raises(JobError) as caught:
        Job.read(file)
    assert (caught.value.file, caught.value.key) == (str(file), key)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("", "[model]", "is missing"),
        ("model = 3", "model", "3 is not a table"),
        ('train = 3\n[model]\npreset = "gpt3-125m"', "train", "3 is not a table"),
        ('[model]\npreset = "gpt3-125"', "model.preset", "did you mean 'gpt3-125m'"),
        ("[model]\npreset = 3", "model.preset", "3 is not a text"),
        ('[model]\npreset = "gpt3-125m"\nhuggingface = "x"', "model.huggingface", "Leave it out"),
        ('[model]\npreset = "gpt3-125m"\nnum_layres = 3', "model.num_layres", "did you mean 'num_layers'"),
        (
            '[model]\npreset = "gpt3-125m"\nnum_layers = "3"',
            "model.num_layers",
            '"3" is not allowed. Allowed: a whole number',
        ),
        ('[model]\nfamily = "gpt"\nhidden = 8', "model.num_layers", "is missing"),
    ],
)
def test_a_mistake_about_the_model_names_the_key(job_file, text: str, key: str, words: str) -> None:
    with pytest.raises(JobError) as caught:
        Job.read(job_file(text))
    assert caught.value.key == key
    assert words in str(caught.value)


def test_an_error_in_a_file_that_the_job_names_is_about_that_file(job_file, tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        Job.read(job_file('[model]\nhuggingface = "config.json"'))
    assert caught.value.file == str(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("data.sequence=32", "data.sequence_length"),
        ("train.batch=4", "train.global_batch_size"),
        ("train.micro_batch=4", "train.micro_batch_size"),
        ('train.dtype="bf16"', "train.precision"),
        ("strategy.sp=2", "strategy.cp"),
        ('strategy.sp_kind="ring"', "strategy.cp_comm_type"),
        ("strategy.interleave=2", "strategy.virtual_stages"),
    ],
)
def test_an_old_name_is_refused_with_the_new_one(job_file, old: str, new: str) -> None:
    with pytest.raises(JobError, match=rf"{re.escape(old.partition('=')[0])}: is called {re.escape(new)} now"):
        Job.read(job_file(MODEL), [old])


@pytest.mark.parametrize(("size", "dp", "batch"), [(3, 1, 8), (4, 1, 6), (3, 2, 8), (8, 1, 4)])
def test_a_batch_that_is_no_multiple_is_refused(size: int, dp: int, batch: int) -> None:
    train = {"global_batch_size": batch, "micro_batch_size": size}
    with pytest.raises(JobError, match=r"train\.global_batch_size.*not a multiple"):
        Job.from_dict({"model": {"preset": "gpt3-125m"}, "train": train, "strategy": {"dp": dp}})


# ---- what a stranger types ----


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (
            "train.steps=100000000000000000000000",
            "train.steps: 100000000000000000000000 is not allowed.*at most 2147483647",
        ),
        (
            "train.global_batch_size=2147483648",
            "train.global_batch_size: 2147483648 is not allowed.*at most 2147483647",
        ),
        ("strategy.dp=100000000000000000000000", "strategy.dp: 100000000000000000000000 is not allowed"),
        ("train.seed=9223372036854775808", "train.seed: .*Allowed: a whole number, at most 9223372036854775807"),
        ("data.seed=-9223372036854775809", "data.seed: .*Allowed: a whole number, at least -9223372036854775808"),
        ("run.timeout=1e300", r"run.timeout: 1e\+300 is not allowed"),
        ("run.metrics_port=65536", "run.metrics_port: 65536 is not allowed.*at most 65535"),
        (f"train.steps=0x{'f' * 5000}", "train.steps: a number of 20000 bits is not allowed"),
        (f"model.preset=[0x{'f' * 5000}]", "model.preset: a list with a number that is too long"),
        (f"run.name={'x' * 300}", "run.name: has a name of 300 bytes. Allowed: names of at most 255"),
        ('run.name="a\\nb"', "run.name: .*holds a line break"),
        ('run.name="a\\u001b[31m"', "run.name: .*holds a line break, or another character"),
        ("run.name= ", None),
        ('run.name=" "', "run.name: ' ' is no name for a folder"),
        (f"run.folder={'x' * 300}", "run.folder: has a name of 300 bytes"),
        (f"run.folder={'x/' * 2000}", "run.folder: has 4000 bytes"),
        ('run.folder=""', "run.folder: is empty"),
        ('data.text=""', "data.text: is empty"),
        ('data.text=["a", ""]', "data.text: is empty"),
        ('data.text="a\\u0000"', "data.text: .*holds a zero byte"),
        (f"data.text={'x' * 300}", "data.text: has a name of 300 bytes"),
        (f"model.huggingface={'x' * 300}", "model.huggingface: has a name of 300 bytes"),
        ("model.preset=../jobs/quickstart", "model.preset: no model preset '../jobs/quickstart'"),
        ("model.preset=../models/gpt3-125m", r"no model preset .*did you mean 'gpt3-125m'"),
        (f"model.preset={'x' * 300}", "model.preset: no model preset"),
        ("train.init_from=a\udcff", "is not UTF-8"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(job_file, setting: str, says: str | None) -> None:
    file = job_file(MODEL)
    if says is None:
        assert Job.read(file, [setting]).run.name == ""
        return
    with pytest.raises(JobError, match=says) as caught:
        Job.read(file, [setting])
    assert caught.value.file == "command line"


def test_a_path_that_cannot_be_is_refused_in_its_file(job_file) -> None:
    file = job_file(MODEL + '[data]\ntext = ""\n')
    with pytest.raises(JobError, match="is empty") as caught:
        Job.read(file)
    assert (caught.value.file, caught.value.key) == (str(file), "data.text")


def test_a_job_file_whose_name_is_no_name_for_a_run_is_refused(job_file) -> None:
    job = Job.read(job_file(MODEL))
    with pytest.raises(JobError, match=r"run\.name"):
        job.named("two\nlines")
    assert job.changed(["run.name=one"]).named("two\nlines").run.name == "one"


@pytest.mark.parametrize(
    ("strategy", "key", "words"),
    [
        ('schedule = "zb-v"\nvirtual_stages = 3', "strategy.virtual_stages", "2 stages a rank, not 3. Use 2, or"),
        (
            'schedule = "1f1b"\nvirtual_stages = 2',
            "strategy.virtual_stages",
            '1 stage a rank, not 2. Use 1, or set strategy.schedule="interleaved"',
        ),
        ('recompute = { kind = "full", layers = 99 }', "strategy.recompute.layers", "Use 12"),
    ],
)
def test_what_stages_cannot_be(job_file: Callable[[str], Path], strategy: str, key: str, words: str) -> None:
    file = job_file(f"{MODEL}[strategy]\npp = 2\n{strategy}\n")
    with pytest.raises(JobError, match=re.escape(words)) as caught:
        Job.read(file)
    assert (caught.value.file, caught.value.key) == (str(file), key)


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


@pytest.mark.parametrize(
    ("text", "key"),
    [('[modle]\npreset = "gpt3-125m"', "modle"), ('[model]\nfamily = "gpt"\nhiden = 8', "model.hiden")],
)
def test_a_misspelt_name_of_what_is_missing_is_named(job_file, text: str, key: str) -> None:
    with pytest.raises(JobError, match=r"unknown key.*did you mean") as caught:
        Job.read(job_file(text)).model_spec(16)
    assert caught.value.key == key


def test_numbers_of_a_model_that_are_not_finite(job_file) -> None:
    for name, allowed in (
        ("dropout", "a number of at least 0 and below 1"), ("norm_eps", "a number above 0 and below 1"),
        ("hidden", "a whole number of at least 1"), ("window", "a whole number of at least 0"),
    ):  # fmt: skip
        with pytest.raises(JobError, match=f"model.{name}: nan is not finite. Allowed: {allowed}."):
            Job.read(job_file(MODEL), [f"model.{name}=nan"]).model_spec(16)
    with pytest.raises(JobError, match=r"plan.memory_margin: inf is not finite. Allowed: a number of at least 0 and b"):
        Job.read(job_file(MODEL), ["plan.memory_margin=inf"])
