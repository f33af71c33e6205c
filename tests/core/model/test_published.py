"""Presets of published models: parameters to the last one, of what is described and of what is said
to be missing.

Published counts are those of the released weights (Hugging Face's model pages, ``safetensors``;
tied weights once)."""

from __future__ import annotations

import pytest

from plait.core.base.env import specs_folder
from plait.core.base.errors import JobError
from plait.core.model.spec import ModelSpec

PUBLISHED = {
    "llama2-7b": 6_738_415_616, "llama3-8b": 8_030_261_248, "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400, "llama3.2-3b": 3_212_749_824, "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672, "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688, "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648, "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264, "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2b": 2_506_172_416, "gemma-7b": 8_537_680_896, "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984, "gemma2-27b": 27_227_128_320, "gemma3-1b": 999_885_952,
    "gemma3-12b": 11_766_034_176, "gemma3-27b": 27_009_346_304, "mistral-7b": 7_241_732_096,
    "mistral-nemo-12b": 12_247_782_400, "mistral-small-24b": 23_572_403_200, "mistral-large-123b": 122_610_069_504,
    "deepseek-v3": 671_026_419_200, "mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_630_071_296,
    "olmoe-1b-7b": 6_919_161_856, "qwen1.5-moe-a2.7b": 14_315_784_192,
}  # fmt: skip


def missing(model: ModelSpec) -> int:
    """Parameters of what a preset says to be without, by hand."""
    counts = {
        "norms of queries and keys over all heads": model.num_layers * 2 * model.hidden,
        "norms after sublayers": model.num_layers * 2 * model.hidden,
        "biases of the router": model.num_expert_layers * (model.experts.count if model.experts else 0),
    }
    return sum(counts.get(part, 0) for part in model.without)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_parameters_of_the_released_weights(name: str) -> None:
    model = ModelSpec.preset(name, specs_folder() / "models")
    assert model.num_parameters + missing(model) == PUBLISHED[name]
    assert missing(model) < PUBLISHED[name] / 1000


def test_what_is_missing_is_read_back_and_written_only_where_something_is() -> None:
    folder = specs_folder() / "models"
    gemma, llama = ModelSpec.preset("gemma2-9b", folder), ModelSpec.preset("llama3-8b", folder)
    assert ModelSpec.from_dict(gemma.to_dict()) == gemma
    assert gemma.to_dict()["without"] == gemma.without
    assert "without" not in llama.to_dict()


def test_latent_attention_by_hand() -> None:
    """DeepSeek-V3: queries by way of 1,536 numbers, keys and values by way of 512, beside 64 that
    are rotated and that all heads share; 37B parameters are active; scores have 192 numbers a head,
    values 128."""
    model = ModelSpec.preset("deepseek-v3", specs_folder() / "models")
    assert model.experts
    down, up = 7168 * (1536 + 512 + 64), 1536 * 128 * 192 + 512 * 128 * 256
    assert model.parameters_of("attn") == down + up + 128 * 128 * 7168 + 7168 + 1536 + 512
    idle = (model.experts.count - model.experts.per_token) * model.expert_parameters(2048)
    assert 37e9 < model.num_parameters - model.num_expert_layers * idle < 38e9
    scores = model.attention_flops(4096) - model.product_flops(4096, "attn")
    assert scores == 2 * 4096**2 * 128 * (192 + 128)
    assert ModelSpec.from_dict(model.to_dict()) == model


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"kv_lora_rank": 0}, "model.kv_lora_rank"), ({"q_lora_rank": 0}, "model.q_lora_rank"),
        ({"num_kv_heads": 8}, "model.num_kv_heads"), ({"qk_norm": True}, "model.qk_norm"),
        ({"window": 4}, "model.window"), ({"qkv_bias": True}, "model.qkv_bias"),
    ],
)  # fmt: skip
def test_what_latent_attention_cannot_have(changed: dict[str, int], key: str) -> None:
    values = ModelSpec.preset_values("deepseek-v3", specs_folder() / "models")
    with pytest.raises(JobError) as refused:
        ModelSpec.from_dict(values | changed)
    assert refused.value.key == key
