from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.codec.toml_text import read_toml
from plait.core.base.env import specs_folder
from plait.core.base.errors import CheckpointError, DataError, JobError, LaunchError, ScheduleError
from plait.core.job.spec import Job, naming
from plait.core.parallel.strategy import Strategy
from tests.core.conftest import MODEL, made
from tests.support.hugging_face import hugging_face


def test_a_preset_is_all_a_job_needs(job_file) -> None:
    job = Job.read(job_file(MODEL))
    assert job.base_strategy == Strategy()
    assert job.micro_batch == job.train.global_batch_size == 8
    assert job.data.train[0].paths == ("python-stdlib",)


@pytest.mark.parametrize("file", sorted((specs_folder() / "jobs").glob("*.toml")), ids=lambda file: file.stem)
def test_the_jobs_we_ship_are_valid(file: Path, tmp_path: Path) -> None:
    values = read_toml(file)
    if named := values["model"].get("huggingface"):  # which a user brings
        hugging_face(tmp_path / named)
    Job.from_dict(values, tmp_path)


# ---- the model ----


def test_fields_override_the_preset_before_anything_is_derived_from_it() -> None:
    job = Job.from_dict({"model": {"preset": "gpt3-125m", "hidden": 128, "num_heads": 4, "num_layers": 2}})
    spec = job.model_spec(vocab=257)
    assert (spec.hidden, spec.head_size, spec.ffn_hidden, spec.max_sequence) == (128, 32, 512, 2048)


def test_a_vocabulary_is_rounded_up_to_a_multiple() -> None:
    values: dict[str, Any] = {"model": {"preset": "gpt3-125m"}, "data": {"vocab_multiple": 64}}
    assert Job.from_dict(values).model_spec(50_257).vocab == 50_304
    assert Job.from_dict(values).model_spec(50_304).vocab == 50_304
    with pytest.raises(JobError, match=r"data\.vocab_multiple: the model sets the size of its vocabulary") as caught:
        Job.from_dict(values | {"model": {"preset": "gpt3-125m", "vocab": 50_257}})
    assert caught.value.key == "data.vocab_multiple"


def test_the_tokenizer_decides_the_vocabulary_unless_the_job_does() -> None:
    assert Job.from_dict({"model": {"preset": "llama2-7b"}}).model_spec(vocab=257).vocab == 32_000
    job = Job.from_dict({"model": {"preset": "llama2-7b", "vocab": 512}})
    assert job.model_spec(vocab=257).vocab == 512
    with pytest.raises(JobError, match=r"model\.vocab: 512 is less than the tokenizer's 32000 tokens"):
        job.model_spec(vocab=32000)


def test_a_huggingface_config_is_found_beside_the_job_and_decides_the_vocabulary(job_file, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 300, "n_positions": 128}'
    )
    job = Job.read(job_file('[model]\nhuggingface = "config.json"\ndropout = 0.0\n'))
    assert (job.model_spec(vocab=257).vocab, job.model_spec(vocab=257).dropout) == (300, 0.0)


# ---- the strategy ----


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, (1, 1)),
        ({"slices": "auto"}, (1, 1)),
        ({"slices": {"batch": 2, "columns": 4}}, (2, 4)),
        ({"slices": {"batch": 2}}, (2, 1)),
    ],
)
def test_slices_may_be_written_in_several_ways(section: dict[str, Any], expected: tuple[int, int]) -> None:
    whole = {"micro_batch_size": 0}
    strategy = Job.from_dict({"model": {"preset": "gpt3-125m"}, "train": whole, "strategy": section}).base_strategy
    assert (strategy.p1, strategy.p2) == expected


def test_recomputation_may_be_of_some_layers() -> None:
    for asked, kind, layers in (("full", "full", None), ({"kind": "selective", "layers": 2}, "selective", 2)):
        strategy = Job.from_dict({"model": {"preset": "gpt3-125m"}, "strategy": {"recompute": asked}}).base_strategy
        assert (strategy.recompute, strategy.recompute_layers) == (kind, layers)


def test_a_word_alone_is_tensor_parallelisms_overlap() -> None:
    def job(**strategy: Any) -> Job:
        return Job.from_dict({"model": {"preset": "gpt3-125m"}, "strategy": strategy})

    assert job(overlap="sync").base_strategy.shard_overlap == "none"
    assert job(overlap="async").base_strategy.shard_overlap == "both"
    assert job(overlap={"shard": "auto"}).tunes_sharding


def test_compiling_is_asked_for_timed_or_off() -> None:
    def job(**strategy: Any) -> Job:
        return Job.from_dict({"model": {"preset": "gpt3-125m"}, "strategy": strategy})

    assert [job(**one).base_strategy.compile for one in ({}, {"compile": "auto"}, {"compile": True})] == [
        False, False, True,
    ]  # fmt: skip
    assert job(compile="auto").open == ()  # no planner predicts it
    assert job(compile="auto", tp="auto").with_choices_of(job(tp=2, slices={"batch": 1})).strategy.compile == "auto"
    with pytest.raises(JobError, match="compile"):
        job(compile="yes")


# ---- the command line ----


def test_overrides_win_and_their_mistakes_are_the_command_lines(job_file) -> None:
    file = job_file(MODEL + "[train]\nsteps = 5\nmicro_batch_size = 2\n")
    job = Job.read(file, ["train.steps=7", "run.name=7", "strategy.slices.batch=2", "data.text=some text.txt"])
    assert (job.train.steps, job.run.name, job.base_strategy.p1) == (7, "7", 2)
    for setting in ("train.steps=many", "train.stepz=3", "trian.steps=3", "train=3", "nothing", "train.steps.more=1"):
        with pytest.raises(JobError) as caught:
            Job.read(file, [setting])
        assert caught.value.file == "command line", setting


def test_paths_are_meant_from_where_they_are_written(job_file, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    file = job_file(MODEL + '[data]\ntext = ["a", "python-stdlib", "/b"]\n[run]\nfolder = "runs"\n')
    monkeypatch.chdir(elsewhere)
    job = Job.read(file, ["train.init_from=weights"])
    assert job.data.text == (str(tmp_path / "a"), "python-stdlib", "/b")
    assert job.train.init_from == str(elsewhere / "weights")
    assert (job.data.tokenizer, job.run.folder) == ("bytes", "runs")


# ---- values ----

jobs = st.builds(
    lambda steps, rate, names, slices, parallel, name: Job.from_dict(
        {
            "model": {"preset": "gpt3-125m"},
            "data": {"text": names},
            "train": {"steps": steps, "learning_rate": rate, "adam_eps": rate / 1e6, "micro_batch_size": 0},
            "strategy": {"slices": slices, "sequence_parallel": parallel},
            "run": {"name": name},
        }
    ),
    st.integers(1, 2**31 - 1),
    st.floats(1e-300, 1e300, exclude_min=True).filter(lambda x: x / 1e6 > 0),
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), min_size=1, max_size=3),
    st.just("auto") | st.fixed_dictionaries({"batch": st.integers(1, 8), "columns": st.sampled_from([1, 2, 4])}),
    st.booleans() | st.just("auto"),
    st.text(st.characters(codec="utf-8", exclude_characters="/.", exclude_categories=["Cc"])).filter(
        lambda name: bool(name.strip()) or not name
    ),
)


@given(jobs)
def test_a_job_round_trips_through_toml_and_plain_values(tmp_path: Path, job: Job) -> None:
    file = tmp_path / "job.toml"
    file.write_text(job.to_toml(), encoding="utf-8")
    for again in (Job.read(file), Job.from_dict(job.to_dict())):
        assert again == job
        assert again.content_hash == job.content_hash
        assert hash(again) == hash(job)


def test_the_hash_follows_the_content_and_the_fingerprint_only_what_is_computed(job_file) -> None:
    job = Job.read(job_file(MODEL + "[train]\nsteps = 5\nseed = 1\n"))
    same = Job.read(job_file("[train]\nseed = 1\nsteps = 5\n" + MODEL))
    longer = Job.read(job_file(MODEL), ["train.steps=6", "train.seed=1"])
    other = Job.read(job_file(MODEL), ["train.seed=2"])
    assert job.content_hash == same.content_hash
    assert longer.content_hash != job.content_hash
    assert longer.fingerprint == job.fingerprint != other.fingerprint


def test_what_has_changed_is_told_by_key_with_both_values(job_file) -> None:
    job = Job.read(job_file(MODEL))
    other = job.changed(["train.learning_rate=0.01", "train.steps=7", "train.seed=2", "model.vocab=300", "run.name=b"])
    assert [(one.key, one.allowed) for one in other.changes(job)] == [
        ("model.vocab", False), ("train.seed", False), ("train.learning_rate", True),
    ]  # fmt: skip
    assert str(other.changes(job)[1]) == "train.seed was 0 and is 2"
    assert str(job.changes(other)[2]) == "train.learning_rate was 0.01 and is 0.0003"
    assert str(other.changes(job)[0]) == "model.vocab was not set and is 300"
    assert job.changes(job) == ()


@pytest.mark.system
def test_reading_a_job_loads_nothing_heavy() -> None:
    heavy = {"torch", "numpy", "pyarrow", "rich", "typer"}
    code = f"import sys, plait.core.job.spec\nprint(sorted({heavy} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


@pytest.mark.parametrize(("size", "dp", "batch", "micro", "count"), [
    (0, 1, 8, 8, 1), (0, 2, 7, 7, 1), (2, 2, 8, 4, 2), (4, 2, 7, 7, 1), (4, 2, 14, 7, 2), (1, 4, 8, 4, 2),
])  # fmt: skip
def test_a_micro_batch_is_a_replicas(size: int, dp: int, batch: int, micro: int, count: int) -> None:
    train = {"global_batch_size": batch, "micro_batch_size": size}
    job = Job.from_dict({"model": {"preset": "gpt3-125m"}, "train": train, "strategy": {"dp": dp}})
    assert (job.micro_batch, job.num_micro_batches) == (micro, count)


def test_a_job_that_says_null_is_written_without_it() -> None:
    job = Job.from_dict({"model": {"preset": "gpt3-125m", "rope_scaling": None}})
    assert "rope_scaling" not in job.to_toml()


def test_a_change_that_cannot_be_is_the_command_lines_mistake() -> None:
    job = Job.from_dict({"model": {"preset": "gpt3-125m"}})
    assert job.changed(["strategy.tp=4"]).base_strategy.tp == 4
    with pytest.raises(JobError) as caught:
        job.changed(["strategy.tp=5"])
    assert (caught.value.file, caught.value.key) == ("command line", "strategy.tp")
    assert "Use 1, 2, 3, 4, 6 or 12" in str(caught.value)
    with pytest.raises(JobError) as caught:
        job.changed(["strategy.tp"])
    assert caught.value.file == "command line"


def test_an_error_of_what_a_job_names_is_about_its_key(tmp_path: Path) -> None:
    for error, key in (
        (ScheduleError("0F0 occurs twice"), "strategy.schedule"),
        (CheckpointError("is none"), "train.init_from"),
        (DataError("has no tokens"), "data.tokenizer"),
    ):
        with pytest.raises(JobError) as caught, naming(tmp_path / "job.toml"):
            raise error
        assert (caught.value.file, caught.value.key) == (str(tmp_path / "job.toml"), key)
        assert caught.value.problem == str(error)
        with pytest.raises(JobError) as caught, naming("job.toml", [f"{key} = x"]):
            raise error
        assert caught.value.file == "command line"
    with pytest.raises(LaunchError, match=r"^away$"), naming("job.toml"):
        raise LaunchError("away")


def test_where_an_error_was_made_is_said_once() -> None:
    for error, overrides, file in (
        (JobError("bad", key="train.steps"), (), "job.toml"),
        (JobError("bad", key="train.steps"), ("train.steps=3",), "command line"),
        (JobError("bad", key="train.steps"), ("run.name=3",), "job.toml"),
        (JobError("bad", key="train.steps", file="other.toml"), ("train.steps=3",), "other.toml"),
        (JobError("bad", key="--ranks"), (), None),
        (JobError("bad"), (), "job.toml"),
    ):
        with pytest.raises(JobError) as caught, naming("job.toml", overrides):
            raise error
        assert caught.value.file == file


def test_tokens_say_how_many_steps_there_are() -> None:
    train: dict[str, Any] = {"global_batch_size": 4, "tokens": "1M"}
    job = made(train=train, data={"sequence_length": 250}, strategy={})
    assert job.train.steps == 1000
    assert Job.from_dict(job.to_dict()) == job
    assert job.changed(["train.tokens=2e6"]).train.steps == 2000
    assert made(train=train | {"tokens": 1001}, data={"sequence_length": 250}).train.steps == 2
    with pytest.raises(JobError, match=r"train\.steps: 7 conflicts with train\.tokens"):
        made(train=train | {"steps": 7})
    with pytest.raises(JobError, match=r"train\.tokens: 'many' is no count"):
        made(train=train | {"tokens": "many"})
