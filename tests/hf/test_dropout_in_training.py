"""Models of transformers with dropout of attention weights: converted layers drop as the original does, in training
only.
"""

import copy
from typing import Any

import pytest
import torch
import transformers
from small_llama import SIZES

from zonal import hf
from zonal.errors import ArgumentError

_HEADS: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", SIZES | {"attention_dropout": 0.4}),
    "GPT2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.4}),
    "OPT": ("OPTForCausalLM", _HEADS | {"ffn_dim": 48, "word_embed_proj_dim": 32, "attention_dropout": 0.4}),
    "Bert": ("BertForMaskedLM", _HEADS | {"intermediate_size": 48, "attention_probs_dropout_prob": 0.4}),
}


def made(kind: str) -> Any:
    torch.manual_seed(0)
    name, sizes = KINDS[kind]
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=29, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes
    )
    return getattr(transformers, name)(config)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_weights_are_dropped_in_training_and_none_in_evaluation(kind: str) -> None:
    original, tokens = made(kind), torch.randint(3, 29, (2, 12))
    model = copy.deepcopy(original)
    original.set_attn_implementation("eager")
    hf.convert(model, "softmax")
    found = []
    for each in (original, model):
        torch.manual_seed(1)
        logits = each.train()(tokens).logits
        logits.square().mean().backward()
        gradient = next(value.grad for value in each.parameters() if value.grad is not None)
        found.append((logits, gradient, each.eval()(tokens).logits))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[1][0], found[1][2], atol=1e-3)


def test_operators_by_name_drop_too() -> None:
    hf.register()
    model, tokens = made("Llama"), torch.randint(3, 29, (2, 12))
    model.set_attn_implementation("zonal:squared_affine")
    assert torch.equal(model.eval()(tokens).logits, model(tokens).logits)
    assert not torch.equal(model.train()(tokens).logits, model(tokens).logits)


def test_a_memory_in_training_is_refused() -> None:
    model, tokens = made("Llama"), torch.randint(3, 29, (2, 12))
    hf.convert(model, "squared_affine", cache="memory")
    with pytest.raises(ArgumentError, match=r"dropout=0\.4.*use_cache=False, or call model\.eval\(\)"):
        model.train()(tokens, **{hf.CACHE: hf.MemoryCache()})
    model.eval()(tokens, **{hf.CACHE: hf.MemoryCache()})
