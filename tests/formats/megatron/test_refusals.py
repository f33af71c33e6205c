"""Megatron-LM's flags that contradict themselves, or are missing: refused by their names."""

from __future__ import annotations

import pytest

from plait.core.base.errors import JobError
from tests.formats.megatron.test_read import flags, read


@pytest.mark.parametrize(
    ("changed", "where", "problem"),
    [
        ({"overlap_param_gather": ""}, "--overlap-param-gather", "is set without --use-distributed-optimizer"),
        ({"rampup_batch_size": "32 32"}, "--rampup-batch-size", "it has 2 numbers"),
        ({"rampup_batch_size": "32 32 1e9"}, "--rampup-batch-size", "'1e9' is not a whole number"),
        ({"fp16": ""}, "--bf16", "conflicts with --fp16"),
        ({"fp4_format": "e2m1", "fp8_format": "hybrid"}, "--fp4-format", "conflicts with --fp8-format"),
        ({"recompute_method": "block"}, "--recompute-method", "conflicts with --recompute-granularity (none)"),
        ({"recompute_granularity": "full"}, "--recompute-granularity", "full is set without --recompute-method"),
        ({"recompute_granularity": "full", "recompute_method": "all"}, "--recompute-method", "'all' is unknown"),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_activations": ""},
         "--recompute-method", "conflicts with --recompute-activations"),
        ({"expert_model_parallel_size": "4"}, "--expert-model-parallel-size", "4 is set without --num-experts"),
        ({"use_torch_fsdp2": "", "pipeline_model_parallel_size": "2"}, "--use-torch-fsdp2",
         "conflicts with --pipeline-model-parallel-size 2"),
        ({"use_torch_fsdp2": "", "use_distributed_optimizer": ""}, "--use-torch-fsdp2",
         "conflicts with --use-distributed-optimizer"),
        ({"num_layers": "-3"}, "--num-layers", "-3 is not positive"),
        ({"hidden_dropout": "-0.1"}, "--hidden-dropout", "-0.1 is negative"),
        ({"hidden_dropout": "nan"}, "--hidden-dropout", "nan is not finite"),
        ({"recompute_granularity": "some"}, "--recompute-granularity", "'some' is unknown"),
        ({"pipeline_model_parallel_size": "3"}, "--num-layers", "8 layers do not divide over 3 stages"),
        ({"pipeline_model_parallel_layout": "'Et*3|t*4L'", "pipeline_model_parallel_size": "2"},
         "--pipeline-model-parallel-layout", "it has 7 layers, not the 8"),
        ({"pipeline_model_parallel_layout": "x"}, "--pipeline-model-parallel-layout", "'x' cannot be read"),
        ({"pipeline_model_parallel_layout": "'((((t)*2000)*2000)*2000)*2000'"}, "--pipeline-model-parallel-layout",
         "cannot be read"),
        ({"num_virtual_stages_per_pipeline_rank": "2", "pipeline_model_parallel_layout": "'Et*4|t*4L'",
          "pipeline_model_parallel_size": "2"}, "--num-virtual-stages-per-pipeline-rank", "conflicts with"),
        ({"num_virtual_stages_per_pipeline_rank": "2"}, "--num-virtual-stages-per-pipeline-rank", "without a pipeline"),
        ({"cp_comm_type": "a2a+p2p", "context_parallel_size": "4"}, "--cp-comm-type", "is set without"),
        ({"context_parallel_size": "4", "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": "2 4"},
         "--hierarchical-context-parallel-sizes", "2 x 4 is not"),
        ({"num_layers": "eight"}, "--num-layers", "'eight' is not a whole number"),
        ({"hidden_size": None}, "--hidden-size", "is missing"),
        ({"tensor_model_parallel_size": "0"}, "--tensor-model-parallel-size", "0 is not positive"),
        ({"micro_batch_size": ""}, "--micro-batch-size", "has no value"),
        ({"global_batch_size": None}, "train.global_batch_size", "does not say"),
        ({"vocab_size": None}, "model.vocab", "does not say how many tokens"),
        ({"nproc_per_node": None}, "cluster.ranks", "does not say how many ranks"),
        ({"tensor_model_parallel_size": "16", "nnodes": None}, "cluster.ranks",
         "it starts 8 ranks, no multiple of tp x pp x cp = 16"),
        ({"num_layers": None}, "model", "does not say the model's shapes"),
        ({"micro_batch_size": None}, "train.micro_batch_size", "does not say how many sequences a micro-batch"),
        ({"pipeline_model_parallel_size": "4", "decoder_first_pipeline_num_layers": "1"},
         "--decoder-first-pipeline-num-layers", "1 of 8 layers leave 7 for 3 other places"),
        ({"pipeline_model_parallel_size": "2", "decoder_last_pipeline_num_layers": "3",
          "num_virtual_stages_per_pipeline_rank": "2"}, "--decoder-last-pipeline-num-layers", "3 layers do not divide"),
    ],
)  # fmt: skip
def test_contradictions_and_what_is_missing_are_refused_by_key(
    changed: dict[str, str | None], where: str, problem: str
) -> None:
    with pytest.raises(JobError) as error:
        read(flags(**changed)).job()
    assert (error.value.file, error.value.key) == ("recipe.sh", where)
    assert problem in str(error.value)


def test_megatron_deepspeed_is_said_to_be_predicted_as_megatron() -> None:
    """As in BLOOM's script, whose 70 layers are cut by types of layers."""
    said = "This is Megatron-DeepSpeed's (--deepspeed); rules and predictions are those of Megatron-LM."
    told = read(flags(deepspeed="", deepspeed_config="ds.json"))
    assert said in told.lines() and told.to_dict()["notes"][0] == said
    assert not any("DeepSpeed" in one for one in read(flags()).lines())
    uneven = flags(deepspeed="", pipeline_model_parallel_size="3")
    with pytest.raises(JobError, match=r"over 3 stages.* then\. This is Megatron-DeepSpeed's.* Megatron-LM\.$"):
        read(uneven)
