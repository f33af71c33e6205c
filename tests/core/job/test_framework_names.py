"""Other frameworks' names: one table, of which errors, look-ups and a page of the documents are
made."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from plait.cli.main import app
from plait.core.base.errors import JobError
from plait.core.job.advice import changed
from plait.core.job.framework_names import PEERS, VALUES, key_of
from plait.core.job.reference import PEERS_COMMAND, SettingsTable, coming_from, look_up, reference
from plait.core.job.spec import Job
from plait.core.model.huggingface import without_a_key
from plait.core.model.spec import ModelSpec
from plait.formats.megatron.flags import FLAGS, RENAMED

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "coming-from.md"
MODEL = {"preset": "gpt3-125m"}
OWN = {key.name for table in reference() for key in table.keys}
NAMES = [(name, key) for key, row in PEERS.items() for names in row[:-1] for name in names.split()]


def test_the_page_is_made_of_the_table() -> None:
    assert DOCS.read_text() == coming_from(), f"run: {PEERS_COMMAND}"


def test_every_key_is_one_and_no_name_means_two() -> None:
    assert set(PEERS) <= OWN
    assert {key for key, _ in VALUES} <= set(PEERS)
    assert [pair for pair in NAMES if key_of(pair[0]) != pair[1]] == []


def test_no_name_is_a_key_of_another_section() -> None:
    """Else that key would be refused."""
    sections = {key.partition(".")[0] for key in OWN} - {"recipe", "slurm", "kubernetes"}
    plain = [(name.replace("-", "_"), key) for name, key in NAMES]
    assert [(name, key) for name, key in plain for one in sections if key != f"{one}.{name}" in OWN] == []
    assert [name for name, _ in plain if name in sections] == []


def test_megatrons_names_are_its_flags() -> None:
    written = {name for row in PEERS.values() for name in row.megatron.split()}
    assert len(written) > 50
    assert [name for name in written if not FLAGS.knows(name) and name not in RENAMED] == []


def test_transformers_names_are_its_own() -> None:
    transformers = pytest.importorskip("transformers")
    known = {field.name for field in fields(transformers.TrainingArguments)}
    for config in (transformers.LlamaConfig(), transformers.GPT2Config(), transformers.DeepseekV3Config(),
                   transformers.MixtralConfig(), transformers.MistralConfig(), transformers.Qwen3Config(),
                   transformers.Qwen2MoeConfig()):  # fmt: skip
        known |= set(config.to_dict()) | set(config.attribute_map)
    elsewhere = {"max_length", "tokenizer_name_or_path", "model_name_or_path"}  # arguments of trl and of its examples
    written = {name for row in PEERS.values() for name in row.transformers.split()}
    assert written - known - elsewhere == set()


@pytest.mark.parametrize("section", ["", "model", "train", "strategy", "training", "parallelism"])
def test_every_name_is_told_its_key_wherever_it_is_written(section: str) -> None:
    for name, key in NAMES:
        for spelled in {name, name.replace("-", "_")}:
            at = f"{section}.{spelled}" if section else spelled
            if at == key:
                continue
            with pytest.raises(JobError) as refused:
                Job.from_dict(changed({"model": MODEL}, {at: 1}))
            assert refused.value.key == at
            assert f"is called {key} here" in str(refused.value)


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe"])
def test_every_key_of_a_config_is_one_or_told_what_it_is(kind: str) -> None:
    """Whoever copies config.json into [model] is never left with a list of keys."""
    config = getattr(pytest.importorskip("transformers"), f"{kind}Config")()
    named = set(config.to_dict()) | set(config.attribute_map) | {"architectures", "torch_dtype", "rope_scaling"}
    assert len(named) > 25
    for name in sorted(named - {field.name for field in fields(ModelSpec)}):
        with pytest.raises(JobError, match=r"is called|is a key of config\.json") as refused:
            Job.from_dict({"model": {**MODEL, name: 1}})
        assert refused.value.key == f"model.{name}"
        told = str(refused.value)
        assert "unknown key" not in told and ("is called" in told or "Leave it out" in told)


def test_a_key_of_a_config_is_told_how_a_whole_one_is_read() -> None:
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"hidden_size": 8}, True), ({"hidden_act": "silu"}, True), ({"dim": 8}, False),
        ({"num_local_experts": 8}, False), ({"hidden_size": 8, "huggingface": "x"}, False),
    ]  # fmt: skip
    for values, says in cases:
        with pytest.raises(JobError) as refused:
            Job.from_dict({"model": values})
        assert ('is read with huggingface = "FOLDER"' in str(refused.value)) == says
    assert [field.name for field in fields(ModelSpec) if without_a_key(field.name)] == []


@pytest.mark.parametrize("command", ["train", "plan"])
def test_flags_of_others_are_told_the_key_and_hide_no_option(command: str) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    options = {word for option in group.commands[command].params for word in option.opts if word.startswith("--")}
    assert len(options) > 5
    assert {key_of(option) for option in options} == {None}
    for name, key in NAMES:
        with pytest.raises(JobError, match=f"--{name}: is a setting, no option. Write {key}=2"):
            group.commands[command].make_context(command, ["job.toml", f"--{name}", "2"])


@pytest.mark.parametrize(("key", "theirs", "own"), [(*at, own) for at, own in VALUES.items()])
def test_values_of_others_are_told_ours(key: str, theirs: str, own: str) -> None:
    with pytest.raises(JobError, match=f'{key}: "{theirs}" is called "{own}" here. Write "{own}"'):
        Job.from_dict(changed({"model": MODEL}, {key: theirs}))
    Job.from_dict(changed({"model": MODEL}, {key: own}))


def test_a_name_that_is_looked_up_is_told_its_key() -> None:
    ours = {own.rpartition(".")[2] for own in OWN}
    for name, key in NAMES:
        if name in ours:
            assert not isinstance(look_up(name), SettingsTable)
        else:
            with pytest.raises(JobError, match=f"is called {key} here. Ask for {key}"):
                look_up(name)
