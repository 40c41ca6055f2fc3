"""Scaled angles of rotary positions are those of transformers, in layers, models and their files."""

import json
from typing import Any

import pytest
import torch
from small_llama import SIZES
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from zonal import hf
from zonal.errors import ArgumentError
from zonal.hf import ZonalConfig
from zonal.models import CausalLM, ModelConfig
from zonal.nn import Attention, RopeScaling, Rotary

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, "rope_theta": 10000.0}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "factor": 32.0, "original_max_position_embeddings": 4096, "rope_theta": 10000.0,
    "short_factor": [1.0, 1.05, 1.3], "long_factor": [1.1, 4.0, 60.0],
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
PARAMETERS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": DYNAMIC,
    "llama3": LLAMA3,
    "llama3 of few turns": LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 64, "high_freq_factor": 2.5},
    "yarn": YARN,
    "yarn, betas": YARN | {"beta_fast": 20, "beta_slow": 2, "truncate": False},
    "yarn, attention factor": YARN | {"attention_factor": 1.5},
    "yarn, mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
    "longrope": LONGROPE,
    "longrope of a short text": LONGROPE | {"original_max_position_embeddings": 32768},
    "longrope, attention factor": LONGROPE | {"attention_factor": 1.3},
    "yarn of a short text": YARN | {"original_max_position_embeddings": 64},
}  # fmt: skip
LONGEST = 16384


def config_of(parameters: dict[str, Any], head_dim: int = 64) -> LlamaConfig:
    sizes: dict[str, Any] = SIZES | {"head_dim": head_dim, "vocab_size": 17, "max_position_embeddings": 2048}
    return LlamaConfig(**sizes, rope_parameters=sized(parameters, head_dim))


def sized(parameters: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """The parameters with as many factors of longrope as there are pairs."""
    repeats = -(-head_dim // 6)
    names = ("short_factor", "long_factor")
    return parameters | {name: (parameters[name] * repeats)[: head_dim // 2] for name in names if name in parameters}


def scaling_of(parameters: dict[str, Any], head_dim: int = 64) -> RopeScaling:
    length: dict[str, Any] = {"length": LONGEST} if parameters["rope_type"] in ("dynamic", "longrope") else {}
    length |= {"original_max_position_embeddings": 2048} if parameters is DYNAMIC else {}
    found = RopeScaling.from_config({**sized(parameters, head_dim), **length})
    assert found is not None
    return found


@pytest.mark.parametrize("head_dim", [6, 64, 128])
@pytest.mark.parametrize("name", PARAMETERS)
def test_frequencies_and_amplitude_are_those_of_transformers(name: str, head_dim: int) -> None:
    parameters, scaling = PARAMETERS[name], scaling_of(PARAMETERS[name], head_dim)
    expected, amplitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
        config_of(parameters, head_dim), torch.device("cpu"), seq_len=LONGEST
    )
    found = scaling.frequencies(head_dim, parameters["rope_theta"], torch.device("cpu"))
    torch.testing.assert_close(found.float(), expected, rtol=2e-6, atol=0)
    assert scaling.amplitude == pytest.approx(amplitude, rel=1e-12)


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
def test_queries_are_turned_as_in_transformers(name: str) -> None:
    torch.manual_seed(0)
    parameters = PARAMETERS[name]
    q, k = torch.randn(2, 1, 3, 40, 64)
    cos, sin = LlamaRotaryEmbedding(config_of(parameters))(q, torch.arange(40)[None])
    rotary = Rotary(64, parameters["rope_theta"], scaling_of(parameters))
    for found, expected in zip((rotary(q), rotary(k)), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(rotary(q), Rotary(64, parameters["rope_theta"])(q), atol=1e-3)


@pytest.mark.parametrize("name", ["dynamic", "llama3 of few turns", "yarn of a short text", "longrope"])
def test_pieces_with_memory_equal_one_pass(name: str) -> None:
    torch.manual_seed(0)
    layer = Attention(16, 2, "softmax", rotary=Rotary(8, 10000.0, scaling_of(PARAMETERS[name], 8))).double()
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    first, memory = layer(x[:, :7], return_memory=True)
    second, _ = layer(x[:, 7:], memory)
    torch.testing.assert_close(torch.cat([first, second], 1), layer(x), rtol=1e-9, atol=1e-9)


def test_a_rotary_of_another_size_keeps_its_scaling() -> None:
    shared = Rotary(16, 500.0, scaling_of(YARN))
    layer = Attention(16, 2, "softmax", rotary=shared)
    assert layer.rotary is not None
    assert (layer.rotary.head_dim, layer.rotary.base, layer.rotary.scaling) == (8, 500.0, shared.scaling)


def test_a_model_has_it_in_its_config() -> None:
    shape: dict[str, Any] = {"vocab_size": 17, "dim": 16, "layers": "softmax*2", "heads": 2, "rotary": True}
    config = ModelConfig(**shape, rotary_base=500000.0, rope_scaling=LLAMA3)  # type: ignore[arg-type]
    assert config.rope_scaling == scaling_of(LLAMA3)
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert ZonalConfig(model=config.to_dict()).shape == config
    assert "rope_scaling" not in ModelConfig(**shape).to_dict()
    attention = CausalLM(config).blocks[0].attention
    assert isinstance(attention, Attention)
    assert attention.rotary is not None
    assert attention.rotary.scaling == config.rope_scaling
    long = ModelConfig(**shape, rope_scaling=scaling_of(LONGROPE, 8))
    assert ModelConfig.from_dict(json.loads(json.dumps(long.to_dict()))) == long
    with pytest.raises(ArgumentError, match=r"rope_theta=500000\.0.*pass rotary_base=500000\.0"):
        ModelConfig(**shape, rope_scaling=LLAMA3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="pass rotary=True"):
        ModelConfig(**{**shape, "rotary": False}, rope_scaling=scaling_of(YARN))


@pytest.mark.parametrize("name", ["linear", "dynamic", "llama3 of few turns", "yarn of a short text"])
@torch.no_grad()
def test_a_converted_model_scales_its_angles_once(name: str) -> None:
    """transformers turns queries and keys before the operator gets them."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config_of(PARAMETERS[name], 8)).eval()
    tokens = torch.randint(17, (2, 30))
    expected = model(tokens).logits
    hf.convert(model, "softmax")
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_converted_phi_keeps_memories_where_its_angles_change() -> None:
    """At that length transformers drops the cache, whose keys have other angles, and reads the text again."""
    torch.manual_seed(0)
    parameters = {name: value for name, value in sized(LONGROPE, 8).items() if name != "factor"}
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    config = Phi3Config(
        vocab_size=17, pad_token_id=0, bos_token_id=1, eos_token_id=None, max_position_embeddings=64,
        original_max_position_embeddings=16, **sizes,
        rope_parameters=parameters | {"original_max_position_embeddings": 16},
    )  # fmt: skip
    model: Any = Phi3ForCausalLM(config).eval()
    tokens = torch.randint(2, 17, (2, 10))
    found = RopeScaling.from_config({**(config.rope_parameters or {}), "length": 17}, max_position_embeddings=64)
    assert found is not None
    expected, amplitude = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=17)
    torch.testing.assert_close(found.frequencies(8, 1e4, torch.device("cpu")).float(), expected, rtol=2e-6, atol=0)
    assert found.amplitude == pytest.approx(amplitude, rel=1e-12)
    said = model.generate(tokens, max_new_tokens=12, do_sample=False)
    logits = model(said, use_cache=False).logits
    hf.convert(model, "softmax", cache="memory")
    torch.testing.assert_close(model(said, use_cache=False).logits, logits, rtol=1e-4, atol=1e-4)
    again = model.generate(tokens, max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(again.sequences, said)
    assert isinstance(again[hf.CACHE], hf.MemoryCache)


def test_default_is_no_scaling() -> None:
    assert RopeScaling.from_config({"rope_type": "default", "rope_theta": 10000.0}) is None
    assert RopeScaling.from_config({"type": "linear", "factor": 2}) == RopeScaling(rope_type="linear", factor=2)
    longrope = {name: value for name, value in LONGROPE.items() if name != "factor"}
    found = RopeScaling.from_config({**longrope, "length": 9}, max_position_embeddings=131072)
    assert found == RopeScaling.from_config({**LONGROPE, "length": 9})
    # the length of training and the factor follow from the config's where parameters leave them out
    given = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024}
    found = RopeScaling.from_config(given, max_position_embeddings=4096)
    assert found == RopeScaling(rope_type="yarn", factor=4, original_max_position_embeddings=1024)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "ntk", "factor": 2.0}, "unknown rope_type 'ntk'.*llama3"),
        ({"rope_type": "longrope", "factor": 2.0}, "'longrope' needs original_max_position_embeddings"),
        (LONGROPE, "'longrope' needs length"),
        (LONGROPE | {"length": 8192, "long_factor": [1.0, 0.0]}, r"long_factor must be a list of numbers > 0.*0\.0\]"),
        ({"rope_type": "linear"}, "'linear' needs factor"),
        ({"rope_type": "linear", "factor": 0.5}, "factor must be a number >= 1, received 0.5"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3}, "'linear' has no use for beta_fast. It takes: factor"),
        ({"rope_type": "linear", "factor": 2.0, "faktor": 3}, "unknown key 'faktor'. Did you mean 'factor'"),
        ({"rope_type": "yarn", "factor": 2.0}, "'yarn' needs original_max_position_embeddings"),
        (YARN | {"beta_fast": 1, "beta_slow": 2}, "required beta_slow < beta_fast, received 2 and 1"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "required low_freq_factor < high_freq_factor, received 4.0 and 4.0"),
        (DYNAMIC | {"original_max_position_embeddings": 2048}, "'dynamic' needs length"),
        (DYNAMIC | {"original_max_position_embeddings": 64, "length": 32}, "length must be at least .*, received 32"),
        (YARN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, received 0.5"),
    ],
)
def test_what_has_no_meaning_is_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"RopeScaling.*{message}"):
        RopeScaling.from_config(parameters)
    with pytest.raises(ArgumentError, match="unknown rope_type 'ntk'"):
        RopeScaling(rope_type="ntk", factor=2)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="a factor for each of the 8 pairs of head_dim=16, received 3"):
        Rotary(16, scaling=scaling_of(LONGROPE, 6))
    with pytest.raises(ArgumentError, match="head_dim of at least 4"):
        Rotary(2, scaling=scaling_of(DYNAMIC))
