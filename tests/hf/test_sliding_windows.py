"""Models of transformers with sliding windows: converted layers keep them, in the cache of transformers and in
memories, and an operator that cannot have one is refused by a sentence that names the other layers.
"""

from typing import Any

import pytest
import torch
import transformers
from small_llama import SIZES, decoder
from torch import Tensor

from zonal import hf, prior
from zonal.errors import ArgumentError
from zonal.hf import examine

WINDOW = 5
TYPES = ["sliding_attention", "full_attention"]
# which layers have a window
KINDS = {"Mistral": (True, True), "Gemma2": (True, False), "Gemma3": (True, False)}
# whose attention knows its window only from the config
BY_CONFIG = ("Exaone4", "Qwen2Moe")
SETTINGS: dict[str, dict[str, Any]] = {
    "Mistral": {},
    "Gemma2": {"layer_types": TYPES, "attn_logit_softcapping": None},
    "Gemma3": {"layer_types": TYPES},
    "Exaone4": {"layer_types": TYPES, "use_sliding_window": True},
    "Qwen2Moe": {"layer_types": TYPES, "use_sliding_window": True, "num_experts": 2, "num_experts_per_tok": 1,
                 "moe_intermediate_size": 16},
}  # fmt: skip


def model(kind: str) -> Any:
    return decoder(kind, **SIZES, sliding_window=WINDOW, **SETTINGS[kind])


layerwise = pytest.mark.skipif(
    not hasattr(transformers.PreTrainedConfig, "per_layer_config"), reason="needs configs with sizes of each layer"
)


def gemma4(**others: Any) -> Any:
    sizes: dict[str, Any] = SIZES | {"global_head_dim": 16} | others
    return decoder("Gemma4", **sizes, sliding_window=WINDOW, layer_types=TYPES * (sizes["num_hidden_layers"] // 2))


def drawn(*shape: int) -> Tensor:
    return torch.randint(1, 29, shape, generator=torch.Generator().manual_seed(1))


def close(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).abs().max() <= 5e-5 * wanted.abs().max())


@pytest.mark.parametrize("cache", ["keys", "memory"])
@pytest.mark.parametrize("kind", [*KINDS, *BY_CONFIG])
@torch.no_grad()
def test_windows_are_kept(kind: str, cache: Any) -> None:
    made, tokens = model(kind), drawn(2, 31)
    wanted = made(tokens).logits
    said = made.generate(tokens, max_new_tokens=9, do_sample=False)
    real = torch.arange(31) >= torch.tensor([[0], [7]])
    padded = made(tokens, attention_mask=real.long()).logits[real]
    hf.convert(made, "softmax", cache=cache)
    assert close(made(tokens).logits, wanted)
    assert close(made(tokens, attention_mask=real.long()).logits[real], padded)
    assert torch.equal(made.generate(tokens, max_new_tokens=9, do_sample=False), said)


@layerwise
@torch.no_grad()
def test_layers_may_have_heads_of_other_sizes_and_numbers() -> None:
    model = gemma4(
        hidden_size_per_layer_input=0, num_kv_shared_layers=0, attention_k_eq_v=True, num_global_key_value_heads=1
    )
    tokens = drawn(2, 20)
    wanted = model(tokens).logits
    for cache in ("keys", "memory"):
        hf.convert(model, cache=cache)
        assert close(model(tokens).logits, wanted)
    first = model(tokens[:, :9], **{hf.CACHE: (memory := hf.MemoryCache())}).logits
    assert close(torch.cat([first, model(tokens[:, 9:], **{hf.CACHE: memory}).logits], 1), wanted)
    assert examine.decoding(model, 10, 1)["bytes"] == 4 * 2 * ((WINDOW * 2 * 8) + 10 * 16)


@layerwise
@torch.no_grad()
def test_layers_may_share_keys() -> None:
    """Gemma 4 then goes on with the queries alone whose logits are asked for, and slices the mask for them."""
    shape: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}
    model, tokens = gemma4(**shape, vocab_size_per_layer_input=29), drawn(2, 20)
    real = torch.arange(20) >= torch.tensor([[0], [7]])
    wanted = model(tokens, attention_mask=real.long()).logits
    said = model.generate(tokens, attention_mask=real.long(), max_new_tokens=9, do_sample=False)
    with pytest.raises(ArgumentError, match=r"Gemma4TextAttention in layers \[2, 3\] reads those of earlier layers"):
        hf.convert(model, cache="memory")
    hf.convert(model, "softmax")
    assert close(model(tokens, attention_mask=real.long()).logits[real], wanted[real])
    last = model(tokens, attention_mask=real.long(), logits_to_keep=3).logits
    assert close(last, wanted[:, -3:])
    assert torch.equal(model.generate(tokens, attention_mask=real.long(), max_new_tokens=9, do_sample=False), said)
    with pytest.raises(ArgumentError, match=r"or one that shares its keys \(Gemma 4\).*cache='keys'"):
        model(tokens, **{hf.CACHE: hf.MemoryCache()})


@torch.no_grad()
def test_layers_of_full_attention_may_have_a_window() -> None:
    """MiniMax has a window in all of them, and a recurrence in the others; also when it is converted again."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = SIZES | {"vocab_size": 29, "num_local_experts": 2, "block_size": 8}
    model = transformers.MiniMaxForCausalLM(transformers.MiniMaxConfig(**sizes, sliding_window=WINDOW)).eval()
    tokens = drawn(2, 20)
    wanted = model(tokens).logits
    for _ in range(2):
        hf.convert(model, "softmax")
        assert close(model(tokens).logits, wanted)


@torch.no_grad()
def test_a_window_that_is_not_used_stays_unused_when_a_model_is_converted_again() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = SIZES | {"vocab_size": 29, "ffn_dim": 48, "sliding_window": WINDOW}
    model, tokens = transformers.MoshiForCausalLM(transformers.MoshiConfig(**sizes)).eval(), drawn(2, 20)
    wanted = model(tokens).logits
    for _ in range(2):
        hf.convert(model, "softmax")
        assert close(model(tokens).logits, wanted)


@pytest.mark.parametrize("operator", ["softmax", "squared_affine", "sko", "retention", "ska(power=1)"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_memory_of_a_layer_with_a_window_is_bounded(kind: str, operator: str) -> None:
    made, tokens = model(kind), drawn(1, 40)
    hf.convert(made, operator, cache="memory")
    cache = hf.MemoryCache()
    sizes, found = [], []
    for piece in tokens.split([9, 1, 20, 10], dim=1):
        found.append(made(piece, **{hf.CACHE: cache}).logits)
        sizes.append([layer.nbytes for layer in cache.memory().layers])
    assert close(torch.cat(found, 1), made(tokens).logits)
    for layer, window in enumerate(KINDS[kind]):
        if window:
            assert len({size[layer] for size in sizes}) == 1


@torch.no_grad()
def test_local_global_takes_the_layers_without_a_window() -> None:
    operator = "local_global(window=4)"
    with pytest.raises(ArgumentError, match=r"sliding window of 5 tokens.*layers without one: layers=\[1\]"):
        hf.convert(model("Gemma2"), operator)
    with pytest.raises(ArgumentError, match=r"bounded already. Choose an operator that can have a window"):
        hf.convert(model("Mistral"), operator)
    made, tokens = model("Gemma3"), drawn(1, 60)
    hf.convert(made, operator, layers=[1], cache="memory")
    cache = hf.MemoryCache()
    first = made(tokens[:, :30], **{hf.CACHE: cache}).logits
    size = cache.memory().nbytes
    last = made(tokens[:, 30:], **{hf.CACHE: cache}).logits
    assert cache.memory().nbytes == size  # every layer is bounded now
    assert close(torch.cat([first, last], 1), made(tokens).logits)


@pytest.mark.skipif(not hasattr(transformers, "Lfm3Config"), reason="needs a hybrid with windows")
def test_the_layers_without_a_window_are_counted_among_those_of_attention() -> None:
    kinds = ["conv", "full_attention", "conv", "sliding_attention", "full_attention"]
    words = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = SIZES | words | {"vocab_size": 29, "num_hidden_layers": len(kinds)}
    config: Any = transformers.Lfm3Config(**sizes, sliding_window=WINDOW, layer_types=kinds)
    made, operator = transformers.Lfm3ForCausalLM(config).eval(), "local_global(window=4)"
    with pytest.raises(ArgumentError, match=r"layers without one: layers=\[0, 2\]"):
        hf.convert(made, operator)
    named = [own.name for own in hf.convert(made, operator, layers=[0, 2])]
    assert named == ["local_global", "softmax", "local_global"]


@pytest.mark.parametrize("by_name", [False, True])
@torch.no_grad()
def test_the_window_of_an_encoder_reaches_to_both_sides(by_name: bool) -> None:
    torch.manual_seed(0)
    config = transformers.ModernBertConfig(
        **SIZES | {"vocab_size": 29, "pad_token_id": 0}, local_attention=6, global_attn_every_n_layers=2,
        initializer_cutoff_factor=3.0,
    )  # fmt: skip
    made, tokens = transformers.ModernBertModel(config).eval(), drawn(2, 21)
    real = torch.arange(21) < torch.tensor([[21], [15]])
    wanted = made(tokens, attention_mask=real.long()).last_hidden_state[real]
    if by_name:
        hf.register()
        made.set_attn_implementation("zonal:softmax")
    else:
        assert [own.prior for own in hf.convert(made, "softmax")] == [(), (prior.Window(3, 3),)]
    assert close(made(tokens, attention_mask=real.long()).last_hidden_state[real], wanted)


@torch.no_grad()
def test_a_model_that_takes_a_view_of_its_attention_is_converted() -> None:
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": 29, "kv_channels": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    made, tokens = transformers.JetMoeForCausalLM(transformers.JetMoeConfig(**sizes)).eval(), drawn(2, 9)
    wanted = made(tokens).logits
    hf.convert(made, "softmax")
    assert close(made(tokens).logits, wanted)
    hf.register()
    made.set_attn_implementation("zonal:softmax")
    assert close(made(tokens).logits, wanted)


def test_attention_in_chunks_is_refused() -> None:
    sizes = SIZES | {"vocab_size": 29, "intermediate_size_mlp": 32, "num_local_experts": 2, "num_experts_per_tok": 1}
    made = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**sizes, attention_chunk_size=4))
    with pytest.raises(ArgumentError, match="attention in chunks, which operators do not have"):
        hf.convert(made, "softmax")


def test_learned_sinks_are_refused_by_convert() -> None:
    sizes = SIZES | {"vocab_size": 29, "pad_token_id": 0, "num_local_experts": 2, "num_experts_per_tok": 1}
    made = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, bos_token_id=1, eos_token_id=2))
    with pytest.raises(ArgumentError, match="GptOssAttention has a learned sink per head"):
        hf.convert(made, "softmax")
