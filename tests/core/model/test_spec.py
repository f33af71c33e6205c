from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.base.env import specs_folder
from plait.core.base.errors import JobError
from plait.core.model.spec import MOST_PARAMETERS, ModelSpec, RopeScaling

PRESETS = specs_folder() / "models"
TINY: dict[str, Any] = {
    "family": "llama",
    "num_layers": 1,
    "hidden": 32,
    "num_heads": 4,
    "ffn_hidden": 64,
    "vocab": 50,
    "max_sequence": 16,
}

SCALING: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_positions": 8192,
}

NOMINAL = {
    "125m": 125e6,
    "350m": 350e6,
    "760m": 760e6,
    "1.3b": 1.3e9,
    "2.7b": 2.7e9,
    "6.7b": 6.7e9,
    "13b": 13e9,
    "30b": 30e9,
    "175b": 175e9,
}


@pytest.mark.parametrize(("name", "count"), NOMINAL.items())
def test_gpt3_presets_have_the_size_of_their_name(name: str, count: float) -> None:
    assert ModelSpec.preset(f"gpt3-{name}", PRESETS).num_parameters == pytest.approx(count, rel=0.02)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_parallel_block_has_one_norm_and_one_bias(family: str) -> None:
    from plait.core.parallel.strategy import Strategy
    from plait.train.model.pieces import pieces

    spec = ModelSpec.from_dict(TINY | {"family": family, "parallel_block": True, "num_layers": 2})
    assert spec.num_parameters == sum(math.prod(piece.shape) for piece in pieces(spec, Strategy(), 0))


def _reference_count(spec: ModelSpec) -> int:
    """Parameters of the model that transformers builds from the same shapes, without memory for
    any."""
    import torch
    import transformers

    if spec.family == "gpt":
        config: Any = transformers.GPT2Config(
            vocab_size=spec.vocab,
            n_positions=spec.max_sequence,
            n_embd=spec.hidden,
            n_layer=spec.num_layers,
            n_head=spec.num_heads,
        )
        build: Callable[[Any], torch.nn.Module] = transformers.GPT2LMHeadModel
    else:
        config = transformers.LlamaConfig(
            vocab_size=spec.vocab,
            hidden_size=spec.hidden,
            intermediate_size=spec.ffn_hidden,
            num_hidden_layers=spec.num_layers,
            num_attention_heads=spec.num_heads,
            num_key_value_heads=spec.num_kv_heads,
            max_position_embeddings=spec.max_sequence,
            tie_word_embeddings=bool(spec.tied_embeddings),
        )
        build = transformers.LlamaForCausalLM
    with torch.device("meta"):
        model = build(config)
    return sum(parameter.numel() for parameter in model.parameters())  # a tied weight counts once


@pytest.mark.parametrize("name", ["gpt3-125m", "gpt3-1.3b", "gpt3-13b", "llama2-7b", "llama3-8b", "llama3-70b"])
def test_presets_count_as_transformers_does(name: str) -> None:
    spec = ModelSpec.preset(name, PRESETS)
    assert spec.num_parameters == _reference_count(spec)


def test_a_u_counts_as_its_parameters_do() -> None:
    from plait.core.parallel.strategy import Strategy
    from plait.train.model.pieces import pieces

    for levels, layers in ((1, 3), (2, 10)):
        spec = ModelSpec(
            family="utransformer", num_layers=layers, levels=levels, hidden=16, num_heads=4, vocab=33, max_sequence=8
        )
        assert spec.num_parameters == sum(math.prod(piece.shape) for piece in pieces(spec, Strategy(), 0))
        assert [spec.level(layer) for layer in range(layers)] == (
            [0, 1, 0] if levels == 1 else [0, 0, 1, 1, 2, 2, 1, 1, 0, 0]
        )


def test_a_model_larger_than_64_bits_can_count_is_refused() -> None:
    def gpt(width: int) -> ModelSpec:
        return ModelSpec(family="gpt", num_layers=1, hidden=width, num_heads=1, vocab=1, max_sequence=1)

    width = math.isqrt(MOST_PARAMETERS // 12)
    assert gpt(width - 2).num_parameters <= MOST_PARAMETERS
    with pytest.raises(
        JobError, match=r"model\.hidden: the model would have 1e\+15 parameters\. Allowed: at most 1e\+15"
    ):
        gpt(width + 1)


def test_every_preset_says_where_its_shapes_come_from() -> None:
    for file in PRESETS.glob("*.toml"):
        assert "arXiv" in file.read_text().splitlines()[0], file.name


# ---- Hugging Face configs ----


def _config(tmp_path: Path, **values: Any) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    return file


def test_a_llama_config_written_by_transformers_reads_back(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 5e5,
    }  # fmt: skip
    config = transformers.LlamaConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=77,
        rms_norm_eps=1e-5,
        rope_parameters=scaling,
    )
    config.save_pretrained(tmp_path)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    expected = ModelSpec(
        family="llama", num_layers=3, hidden=64, num_heads=4, num_kv_heads=2, ffn_hidden=96, vocab=99, max_sequence=77,
        rope_theta=5e5, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
    )  # fmt: skip
    assert ModelSpec.from_huggingface(tmp_path) == expected
    assert ModelSpec.from_huggingface(tmp_path / "config.json") == expected


def test_a_gpt2_config_written_by_transformers_reads_back(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(vocab_size=99, n_positions=20, n_embd=32, n_layer=2, n_head=4).save_pretrained(tmp_path)
    assert ModelSpec.from_huggingface(tmp_path) == ModelSpec(
        family="gpt",
        num_layers=2,
        hidden=32,
        num_heads=4,
        vocab=99,
        max_sequence=20,
        dropout=0.1,
        attention_dropout=0.1,
    )


OLD_LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96,
    "vocab_size": 99, "max_position_embeddings": 77,
}  # fmt: skip


def test_older_llama_configs_split_the_rotary_settings(tmp_path: Path) -> None:
    scaling = {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    spec = ModelSpec.from_huggingface(_config(tmp_path, **OLD_LLAMA, rope_theta=5e5, rope_scaling=scaling))
    assert spec.rope_theta == 5e5
    assert spec.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    assert spec.num_kv_heads == 4


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"hidden_size": 10**400}, "hidden_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"attention_dropout": 1.5}, "attention_dropout"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"head_dim": [16]}, "head_dim"),
        ({"rope_scaling": "llama3"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": ["llama3"]}}, "rope_scaling"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"model_type": "gpt2", "n_layer": 1e12, "n_embd": 8, "n_head": 2, "n_positions": 8}, "n_layer"),
        ({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 8, "n_inner": "x"}, "n_inner"),
    ],
)
def test_what_no_config_may_say_is_refused_by_its_own_key(tmp_path: Path, change: dict[str, Any], key: str) -> None:
    base = {"vocab_size": 99} if change.get("model_type") == "gpt2" else OLD_LLAMA
    file = _config(tmp_path, **base | change)
    with pytest.raises(JobError) as caught:
        ModelSpec.from_huggingface(file)
    assert (caught.value.file, caught.value.key) == (str(file), key)
    assert len(str(caught.value)) < len(str(file)) + 300


@given(
    changes=st.dictionaries(
        st.sampled_from([*OLD_LLAMA, "rope_scaling", "rope_parameters", "head_dim", "rms_norm_eps"]),
        st.one_of(
            st.none(), st.booleans(), st.floats(), st.integers(), st.text(max_size=9),
            st.lists(st.integers(), max_size=2), st.just({"rope_type": "llama3", "factor": "x"}),
            st.dictionaries(st.sampled_from(["type", "factor", "rope_theta"]), st.floats() | st.text(max_size=5)),
        ),
        min_size=1,
        max_size=3,
    )
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_a_hostile_config_gives_a_model_or_one_paragraph(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]
) -> None:
    file = _config(tmp_path_factory.mktemp("hostile"), **OLD_LLAMA | changes)
    with contextlib.suppress(JobError):
        assert ModelSpec.from_huggingface(file).num_parameters > 0


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "3",
        "[]",
        "null",
        '{"rope_theta": Infinity}',
        '{"rms_norm_eps": NaN}',
        '{"n_layer": ' + "9" * 5000 + "}",
        "\ud800",
    ],
)
def test_what_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(JobError, match="Hugging Face config"):
        ModelSpec.from_huggingface(tmp_path)


# ---- plain values ----


def test_plain_values_round_trip() -> None:
    for file in PRESETS.glob("*.toml"):
        spec = ModelSpec.preset(file.stem, PRESETS)
        assert ModelSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_heads": 5}, "num_heads"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"family": "rnn"}, "family"),
        ({"levels": 1}, "levels"),
        ({"family": "utransformer"}, "levels"),
        ({"family": "utransformer", "levels": 3}, "num_layers"),
        ({"hidden": "32"}, "hidden"),
        ({"hidden": True}, "hidden"),
        ({"hidden": 0}, "hidden"),
        ({"ffn_hidden": 0}, "ffn_hidden"),
        ({"dropout": 1.0}, "dropout"),
        ({"head_size": 5}, "head_size"),
        ({"layers": 5}, "layers"),
        ({"rope_scaling": {"factor": 8.0}}, "rope_scaling.low_freq_factor"),
        ({"rope_scaling": 3}, "rope_scaling"),
        ({"rope_scaling": SCALING | {"factor": math.nan}}, "rope_scaling.factor"),
        ({"rope_scaling": SCALING | {"factor": "8"}}, "rope_scaling.factor"),
        ({"rope_scaling": SCALING | {"high_freq_factor": math.inf}}, "rope_scaling.high_freq_factor"),
        ({"rope_scaling": SCALING | {"low_freq_factor": 4.0}}, "rope_scaling.low_freq_factor"),
        ({"rope_scaling": SCALING | {"low_freq_factor": 0.0}}, "rope_scaling.low_freq_factor"),
        ({"rope_scaling": SCALING | {"original_max_positions": 8192.0}}, "rope_scaling.original_max_positions"),
        ({"rope_scaling": SCALING | {"original_max_positions": -1}}, "rope_scaling.original_max_positions"),
        *(
            ({"norm_eps": value}, "norm_eps")
            for value in (math.nan, math.inf, -1e-5, 0.0, 1e300, 10**400, "1e-5", True)
        ),
        *(({"rope_theta": value}, "rope_theta") for value in (math.nan, math.inf, -1.0, 0.0, 10**400, None)),
        *(({"dropout": value}, "dropout") for value in (math.nan, math.inf, -0.1, 10**400, "0.1")),
        *(({"attention_dropout": value}, "attention_dropout") for value in (math.nan, 1)),
        *(({"num_layers": value}, "num_layers") for value in (1e8, 2.0, math.nan, 10**12, -(10**400), None)),
        *(({"vocab": value}, "vocab") for value in (1e3, 2**31)),
    ],
)
def test_contradictions_are_refused_by_key(change: dict[str, Any], key: str) -> None:
    with pytest.raises(JobError) as caught:
        ModelSpec.from_dict(TINY | change)
    assert caught.value.key == f"model.{key}"
