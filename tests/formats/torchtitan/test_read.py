"""What torchtitan takes where its configurations say nothing, keeps in memory, and cuts into
stages."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.formats.base.parsed_config import ParsedConfig
from plait.formats.torchtitan.read import file_stages
from tests.plan.told_files import point, told

MODEL = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\n{}\n[parallelism]\n{}\n{}'
BASE = """
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_8b as base
def planned():
    config = base()
    config.model_spec = model_registry("8B")
    {}
    return config
"""
OWN = """
from torchtitan.models.llama3 import model_registry
def planned():
    return Trainer.Config(model_spec=model_registry("8B"), {})
"""


def toml(folder: Path, training: str = "", parallelism: str = "", more: str = "") -> ParsedConfig:
    return told(folder, "titan.toml", MODEL.format(training, parallelism, more))


def module(folder: Path, settings: str, text: str = OWN) -> ParsedConfig:
    return told(folder, "mine.py", text.format(settings))


@pytest.mark.parametrize("said", ["", "steps = 10", "local_batch_size = 8\nseq_len = 2048"])
def test_a_replica_has_8_sequences_of_2048_tokens_unless_its_toml_says_otherwise(tmp_path: Path, said: str) -> None:
    one = toml(tmp_path, said)
    job = one.job(["cluster.ranks=8"])
    assert (job.train.micro_batch_size, job.train.global_batch_size, job.data.sequence_length) == (8, 64, 2048)
    notes = [note for note in one.notes if "has a default for" in note]
    assert bool(notes) == ("local" not in said)
    assert not notes or "training.local_batch_size = 8, training.seq_len = 2,048" in notes[0]


def test_a_module_s_own_configuration_has_the_same_defaults(tmp_path: Path) -> None:
    one = module(tmp_path, "training=TrainingConfig(seq_len=4096)")
    job = one.job(["cluster.ranks=8"])
    assert (job.train.micro_batch_size, job.train.global_batch_size, job.data.sequence_length) == (8, 64, 4096)
    piped = module(tmp_path, "parallelism=ParallelismConfig(pipeline_parallel_degree=2)").job(["cluster.ranks=8"])
    assert (piped.train.micro_batch_size, piped.train.global_batch_size) == (1, 32)


def test_older_keys_stand_for_what_has_a_default(tmp_path: Path) -> None:
    one = toml(tmp_path, "batch_size = 2\ncompile = true")
    assert one.local_batch == 2 and not [note for note in one.notes if "compile" in note]


def test_what_another_module_may_say_is_asked_for(tmp_path: Path) -> None:
    one, given = module(tmp_path, "config.training.steps = 1", BASE), ["cluster.ranks=8"]
    for key, value in (("data.sequence_length", 8192), ("train.global_batch_size", 16)):
        with pytest.raises(JobError) as error:
            one.job(given)
        assert error.value.key == key
        given.append(f"{key}={value}")
    assert one.job(given).train.micro_batch_size == 2
    one = module(tmp_path, "config.training.global_batch_size = 16", BASE)
    with pytest.raises(JobError) as error:
        one.job(given[:2])
    assert error.value.key == "train.micro_batch_size"


def test_what_is_computed_has_no_default(tmp_path: Path) -> None:
    one = module(tmp_path, 'training=TrainingConfig(local_batch_size=int(os.environ["N"]), seq_len=f(2))')
    assert one.local_batch == 0 and one.get("data.sequence_length") is None
    assert one.unknown == [
        "training.local_batch_size = int(...) (computed)", "training.seq_len = f(...) (computed)",
    ]  # fmt: skip


@pytest.mark.parametrize("given", ["training=ours", "training=made()", "training=TrainingConfig(**ours)", "**ours"])
def test_tables_that_nobody_reads_have_no_defaults(tmp_path: Path, given: str) -> None:
    one = module(tmp_path, given)
    assert one.local_batch == 0 and one.get("data.sequence_length") is None
    assert one.unknown or given == "training=made()"


@pytest.mark.parametrize(
    ("training", "parallelism", "more", "options"),
    [
        ("", "", "", {}),
        ('dtype = "float32"', "", "", {}),
        ('dtype = "bfloat16"', "", "", {"parameter_bytes": 2.0, "optimizer_bytes": 4.0, "states_moved": 0.5}),
        ('dtype = "bfloat16"', "data_parallel_shard_degree = 1\ndata_parallel_replicate_degree = 8", "",
         {"parameter_bytes": 2.0, "main_gradient_bytes": 2.0, "optimizer_bytes": 4.0, "states_moved": 0.5}),
        ('dtype = "bfloat16"', "data_parallel_shard_degree = 1\npipeline_parallel_degree = 2", "",
         {"parameter_bytes": 2.0, "optimizer_bytes": 4.0, "states_moved": 0.5}),
        ("", "", '[optimizer]\nimplementation = "fused_opt_states_bf16"',
         {"parameter_bytes": 4.0, "optimizer_bytes": 4.0, "states_moved": 20 / 28}),
    ],
)  # fmt: skip
def test_states_of_half_the_bytes(
    tmp_path: Path, training: str, parallelism: str, more: str, options: dict[str, float]
) -> None:
    one = toml(tmp_path, training, parallelism, more)
    kinds = ("parameter_bytes", "main_gradient_bytes", "optimizer_bytes", "states_moved")
    assert {key: value for key, value in one.options.items() if key in kinds} == options
    assert one.unmodelled == [] and "training.dtype" not in one.harmless
    counted = any("are counted as the fp32" in note for note in one.notes)
    assert counted == ("bfloat16" in training and parallelism == "")


PIPED = "pipeline_parallel_degree = 4\npipeline_parallel_schedule = '{}'\n"
LAYERS = "parallelism.pipeline_parallel_layers_per_stage"
EACH = "pipeline_parallel_layers_per_stage = {}\n"
NONE_LESS = "pipeline_parallel_first_stage_less_layers = 0\npipeline_parallel_last_stage_less_layers = 0\n"


@pytest.mark.parametrize(
    ("schedule", "more", "virtual", "sizes"),
    [
        ("Interleaved1F1B", "", 2, [4, 5, 4, 4, 4, 4, 4, 3]),
        ("Interleaved1F1B", EACH.format(3), 3, [2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 2, 1]),
        ("Interleaved1F1B", EACH.format(4) + NONE_LESS, 2, [4] * 8),
        ("1F1B", "", 1, [8, 9, 8, 7]),
        ("1F1B", EACH.format(9), 1, [8, 9, 8, 7]),
    ],
)
def test_embedding_and_head_count_among_the_layers_of_stages(
    tmp_path: Path, schedule: str, more: str, virtual: int, sizes: list[int]
) -> None:
    one = toml(tmp_path, "local_batch_size = 12\nseq_len = 2048", PIPED.format(schedule) + more)
    assert point(one, "cluster.ranks=8")["virtual"] == virtual and one.runs
    assert [stage.num_layers for stage in one.runs.options.stages(32, len(sizes))] == sizes
    uneven = [note for note in one.notes if "predicted with equal ones" in note]
    assert bool(uneven) == (min(sizes) < max(sizes))


@pytest.mark.parametrize(
    ("training", "parallelism", "key", "problem"),
    [
        ("local_batch_size = 0", "", "training.local_batch_size", "0 is not positive"),
        ('dtype = "float16"', "", "training.dtype", "'float16' is unknown. Use bfloat16, float32"),
        ("", PIPED.format("1F1B") + "pipeline_parallel_microbatch_size = 0",
         "parallelism.pipeline_parallel_microbatch_size", "0 is not positive"),
        ("", "tensor_parallel_degree = 0", "parallelism.tensor_parallel_degree", "0 is not positive"),
        ("", "enable_async_tensor_parallel = true", "parallelism.enable_async_tensor_parallel", "needs compile.enable"),
        ("", "data_parallel_shard_degree = 4", "cluster.ranks", "8 ranks are not tp x pp x cp x dp = 4"),
        ("", "expert_parallel_degree = 4", "strategy.ep", "expert_parallel_degree = 4: experts are not read"),
        ("", PIPED.format("1F1B") + EACH.format(0), LAYERS, "0 is not positive"),
        ("", PIPED.format("Interleaved1F1B") + EACH.format(4), LAYERS, "are 9 stages of 4, no multiple of 4 ranks"),
        ("", PIPED.format("Interleaved1F1B") + EACH.format(9), LAYERS, "1 a rank where the schedule has 2 or more"),
        ("", PIPED.format("1F1B") + EACH.format(3), LAYERS, "3 a rank where the schedule has 1"),
        ("", PIPED.format("ZBVZeroBubble") + EACH.format(3), LAYERS, "3 a rank where the schedule has 2"),
        ("", PIPED.format("1F1B") + "pipeline_parallel_last_stage_less_layers = 12",
         "parallelism.pipeline_parallel_last_stage_less_layers", "12 is more than the 11 layers of a stage"),
    ],
)  # fmt: skip
def test_what_torchtitan_refuses_is_refused_by_its_key(
    tmp_path: Path, training: str, parallelism: str, key: str, problem: str
) -> None:
    with pytest.raises(JobError) as error:
        toml(tmp_path, training, parallelism).job(["cluster.ranks=8"])
    assert error.value.key == key and problem in str(error.value)


def test_parts_of_a_file_are_its_stages(tmp_path: Path) -> None:
    ends = [0, 7, 15, 23, 25, 27, 28, 30, 32]
    parts: list[list[str]] = [[f"layers.{layer}" for layer in range(*cut)] for cut in pairwise(ends)]
    one = toml(tmp_path, "", PIPED.format("Interleaved1F1B") + f"module_fqns_per_model_part = {parts}")
    assert one.get("strategy.virtual_stages") == 2 and "ends_count" not in one.options
    assert file_stages({"first": ends}) == [7, 8, 8, 2, 2, 1, 2, 2] and file_stages({"first": ["a"]}) == []
    one = module(tmp_path, "parallelism=ParallelismConfig(pipeline_parallel_degree=4, "
                           "module_fqns_per_model_part=[[f'layers.{i}'] for i in N])")  # fmt: skip
    assert "module_fqns_per_model_part" in " ".join(one.unknown)


def test_what_is_gathered_in_every_forward_of_a_pipeline_is_named(tmp_path: Path) -> None:
    always = 'fsdp_reshard_after_forward = "always"\n'
    assert toml(tmp_path, "", always).unmodelled == []
    piped = toml(tmp_path, "", always + PIPED.format("1F1B"))
    assert piped.unmodelled == ["parallelism.fsdp_reshard_after_forward = always"]


@pytest.mark.parametrize(
    ("more", "noted"),
    [
        ("", True),
        ("[compile]\nenable = false", True),
        ("[compile]\nenable = true", False),
        ('[compile]\nenable = true\ncomponents = ["loss"]', True),
        ('[compile]\nenable = true\ncomponents = ["model", "loss"]', False),
    ],
)
def test_runs_that_are_not_compiled_are_said_to_be_predicted_as_if_they_were(
    tmp_path: Path, more: str, noted: bool
) -> None:
    one = toml(tmp_path, more=more)
    assert any("without compile.enable" in note for note in one.notes) == noted
    assert one.unmodelled == (["compile.components = ['loss']"] if '["loss"]' in more else [])


def test_another_module_s_compilation_is_not_guessed(tmp_path: Path) -> None:
    for line, noted in (("", False), ("config.compile.enable = False", True), ("config.compile.enable = True", False)):
        one = module(tmp_path, line or "pass", BASE)
        assert any("without compile.enable" in note for note in one.notes) == noted


def test_cuda_graphs_are_on_in_a_module_that_does_not_put_them_off(tmp_path: Path) -> None:
    on = "training.disable_cuda_graphs = False (steps are captured)"
    assert module(tmp_path, "").unmodelled == [on] and toml(tmp_path).unmodelled == []
    assert module(tmp_path, "training=TrainingConfig(disable_cuda_graphs=True)").unmodelled == []
    assert module(tmp_path, "config.training.steps = 1", BASE).unmodelled == []
    piped = module(tmp_path, "parallelism=ParallelismConfig(pipeline_parallel_degree=2)")
    assert piped.unmodelled == [] and "refuses CUDA graphs with a pipeline" in " ".join(piped.notes)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ('[debug]\ndeterministic = true', "debug.deterministic = True"),
        ('[debug]\ndeterministic = false', ""),
        ("[debug]\nseed = 1", ""),
        ('[optimizer]\nname = "Muon"', "optimizer.name = Muon (AdamW is predicted)"),
        ('[optimizer]\nname = "Adam"\nimplementation = "fused"', ""),
        ('[optimizer]\nimplementation = "foreach"', "optimizer.implementation = foreach"),
        ("[optimizer]\nearly_step_in_backward = true", "optimizer.early_step_in_backward = True"),
        ('[compile]\nbackend = "eager"', "compile.backend = eager"),
        ('[compile]\nbackend = "inductor"', ""),
        ("[activation_checkpoint]\nearly_stop = false\npreserve_rng_state = true", ""),
    ],
)  # fmt: skip
def test_what_changes_nothing_as_torchtitan_has_it_is_named_where_it_is_other(
    tmp_path: Path, more: str, named: str
) -> None:
    one = toml(tmp_path, more=more)
    assert one.unmodelled == ([named] if named else []) and one.unknown == []


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ('attn_backend="varlen"', "model_spec.attn_backend = varlen"),
        ("converters=[LoRAConverter.Config(rank=8)]", "the converter LoRAConverter.Config"),
        ("converters=[Float8LinearConverter.Config()]", "recipe_name = rowwise (counted as one scale a tensor)"),
        ('converters=[Float8LinearConverter.Config(recipe_name="tensorwise")]', ""),
        ("converters=[Float8GroupedExpertsConverter.Config()]", ""),
    ],
)
def test_what_a_model_is_made_of_is_named(tmp_path: Path, spec: str, named: str) -> None:
    text = OWN.replace('"8B")', f'"8B", {spec})')
    one = module(tmp_path, "training=TrainingConfig(disable_cuda_graphs=True)", text)
    assert one.unmodelled == ([named] if named else [])
    assert one.get("train.precision") == ("fp8" if "Linear" in spec else "bf16-mixed")


def test_a_toml_s_8_bits_have_a_scale_a_tensor(tmp_path: Path) -> None:
    one = told(tmp_path, "titan.toml", MODEL.replace('"8B"', '"8B"\nconverters = ["float8"]').format("", "", ""))
    assert one.get("train.precision") == "fp8" and one.unmodelled == []


@pytest.mark.parametrize(
    ("loss", "chunks", "noted"),
    [
        ("", None, True),
        ("loss=ChunkedLossWrapper.Config(num_chunks=4)", 4, False),
        ("loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config())", None, False),
        ("loss=CrossEntropyLoss.Config()", 1, False),
    ],
)
def test_parts_of_a_module_s_loss(tmp_path: Path, loss: str, chunks: Any, noted: bool) -> None:
    one = module(tmp_path, loss)
    assert one.options.get("loss_chunks") == chunks
    assert any("names no loss" in note for note in one.notes) == noted
