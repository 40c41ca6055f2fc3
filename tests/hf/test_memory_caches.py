"""Converted models that keep memories in place of keys and values: the same logits as a full pass, constant bytes,
beams, padding, assisted generation, and what is refused.
"""

import copy
from typing import Any

import pytest
import torch
import transformers
from small_llama import SIZES, decoder

from zonal import hf
from zonal.errors import ArgumentError


def llama(operator: Any = "squared_affine", **conversion: Any) -> Any:
    model = decoder("Llama", **SIZES)
    hf.convert(model, operator, cache="memory", **conversion)
    return model


def drawn(*shape: int) -> torch.Tensor:
    return torch.randint(1, 29, shape, generator=torch.Generator().manual_seed(1))


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Up to rounding, which two layers with large weights amplify: 4e-5 for squared-affine sums with AVX-512."""
    return bool((found - wanted).abs().max() <= 1e-4 * wanted.abs().max())


@pytest.mark.parametrize(
    "operator",
    [
        "squared_affine",
        "softmax",
        "ska(power=1)",
        "retention",
        "sko",
        "local_global(window=4, far='hedgehog(size=6)', first=2)",
    ],
)
@torch.no_grad()
def test_a_text_in_pieces_says_what_it_says_in_one(operator: str) -> None:
    model, tokens = llama(operator), drawn(2, 23)
    wanted = model(tokens).logits
    cache = hf.MemoryCache()
    found = [
        model(piece, **{hf.CACHE: cache}).logits for piece in tokens.split([9, 1, 1, 8, 4], dim=1)
    ]  # several tokens after a filled cache, too
    assert close(torch.cat(found, 1), wanted)
    assert cache.get_seq_length() == 23
    assert cache.memory().count == 23


@torch.no_grad()
def test_bytes_do_not_grow_where_the_operator_has_a_constant_memory() -> None:
    model = llama("squared_affine")
    cache = hf.MemoryCache()
    sizes = []
    for _ in range(3):
        model(drawn(2, 50), **{hf.CACHE: cache})
        sizes.append(cache.memory().nbytes)
    assert len(set(sizes)) == 1
    hybrid = llama("squared_affine", layers=[1])
    cache = hf.MemoryCache()
    hybrid(drawn(2, 50), **{hf.CACHE: cache})
    first = [layer.nbytes for layer in cache.memory().layers]
    hybrid(drawn(2, 50), **{hf.CACHE: cache})
    second = [layer.nbytes for layer in cache.memory().layers]
    assert second[0] == 2 * first[0]  # softmax keeps keys and values
    assert second[1] == first[1]


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_starts_with_a_memory(beams: int) -> None:
    model, tokens = llama(), drawn(2, 11)
    plain: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams}
    wanted = model.generate(tokens, use_cache=False, **plain)
    found = model.generate(tokens, return_dict_in_generate=True, **plain)
    assert isinstance(found[hf.CACHE], hf.MemoryCache)
    assert torch.equal(found.sequences, wanted)


def test_padding_on_the_left_says_what_a_row_says_alone() -> None:
    model, tokens = llama(), drawn(2, 14)
    real = torch.arange(14) >= torch.tensor([[0], [5]])
    both = model.generate(tokens, attention_mask=real.long(), max_new_tokens=8, do_sample=False)
    alone = model.generate(tokens[1:, 5:], max_new_tokens=8, do_sample=False)
    assert torch.equal(both[1, 14:], alone[0, 9:])


@torch.no_grad()
def test_an_assistant_gives_tokens_back() -> None:
    model, assistant, tokens = llama(), llama("retention"), drawn(1, 11)
    wanted = model.generate(tokens, max_new_tokens=15, do_sample=False)
    assert torch.equal(model.generate(tokens, max_new_tokens=15, do_sample=False, assistant_model=assistant), wanted)
    assert torch.equal(model.generate(tokens, max_new_tokens=15, do_sample=False, prompt_lookup_num_tokens=3), wanted)
    filled = hf.MemoryCache()
    model(tokens[:, :6], **{hf.CACHE: filled})
    with pytest.raises(ArgumentError, match=r"assisted generation begins without a cache.* holds 6 tokens"):
        model.generate(tokens, max_new_tokens=3, do_sample=False, prompt_lookup_num_tokens=3, **{hf.CACHE: filled})
    cache = hf.MemoryCache()
    cache.activate_past_recording()
    model(tokens[:, :6], **{hf.CACHE: cache})
    model(tokens[:, 6:], **{hf.CACHE: cache})
    cache.crop(-7)
    assert cache.get_seq_length() == 4
    again = model(tokens[:, 4:], **{hf.CACHE: cache}).logits
    assert close(again, model(tokens).logits[:, 4:])
    with pytest.raises(ArgumentError, match=r"9 of 16 tokens were read before the cache recorded"):
        cache.crop(-16)
    more = drawn(1, 2)  # the refused call has changed nothing
    assert cache.get_seq_length() == 11
    expected = model(torch.cat([tokens, more], 1)).logits[:, 11:]
    assert close(model(more, **{hf.CACHE: cache}).logits, expected)
    with pytest.raises(ArgumentError, match="call activate_past_recording"):
        hf.MemoryCache().crop(-1)


@torch.no_grad()
def test_a_fork_goes_on_by_itself() -> None:
    model, tokens = llama(), drawn(1, 20)
    cache = hf.MemoryCache()
    model(tokens[:, :10], **{hf.CACHE: cache})
    copy = cache.fork()
    model(drawn(1, 5), **{hf.CACHE: copy})
    assert (cache.get_seq_length(), copy.get_seq_length()) == (10, 15)
    assert close(model(tokens[:, 10:], **{hf.CACHE: cache}).logits, model(tokens).logits[:, 10:])
    cache.reset()
    assert close(model(tokens, **{hf.CACHE: cache}).logits, model(tokens).logits)


@torch.no_grad()
def test_the_cache_of_a_conversion_is_saved(tmp_path: Any) -> None:
    model, tokens = llama(layers={1: "retention"}), drawn(1, 9)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert [own.name for own in hf.operators(again)] == ["softmax", "retention"]
    found = again.generate(tokens, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    assert isinstance(found[hf.CACHE], hf.MemoryCache)
    with pytest.raises(ArgumentError, match="cache_implementation is for keys and values"):
        again.generate(tokens, max_new_tokens=3, cache_implementation="static", do_sample=False)


def test_layers_by_index_by_mapping_and_by_function() -> None:
    for layers in ([0], {0: "retention"}, lambda index: "retention" if index == 0 else None):
        model = llama("retention", layers=layers)
        assert [own.name for own in hf.operators(model)] == ["retention", "softmax"]
    for layers in ([2], [-1], [False, True], {}, [], {"0": "sko"}, 0, lambda index: None):
        with pytest.raises(ArgumentError, match="layers must name some of the layers 0 to 1"):
            llama(layers=layers)
    for given in ({"layers": {0: None}}, {"operator": None}, {"operator": lambda scale: "sko"}):
        with pytest.raises(ArgumentError, match=r"an operator, a spec such as 'sko', or a function .* LlamaAttention"):
            llama(**given)


@torch.no_grad()
def test_a_layer_that_reads_twice_is_refused() -> None:
    model = decoder("DiffLlama", **SIZES)
    wanted = model(drawn(1, 7)).logits
    hf.convert(model, "softmax", cache="memory")
    assert close(model(drawn(1, 7), use_cache=False).logits, wanted)
    with pytest.raises(ArgumentError, match=r"tokens of layer 0 are read a second time .* cache='keys'"):
        model(drawn(1, 7), **{hf.CACHE: hf.MemoryCache()})


@torch.no_grad()
def test_a_copied_cache_goes_on_by_itself() -> None:
    """``copy.deepcopy`` of a prefix's cache is transformers' way to use it several times."""
    model, tokens = llama(), drawn(2, 12)
    prefix = hf.MemoryCache()
    model(tokens[:, :7], **{hf.CACHE: prefix})
    again = copy.deepcopy(prefix)
    first, second = (model(tokens[:, 7:], **{hf.CACHE: cache}).logits for cache in (prefix, again))
    assert torch.equal(first, second)
    assert prefix.get_seq_length() == again.get_seq_length() == 12


@torch.no_grad()
def test_a_copied_cache_reports_and_records_as_the_first() -> None:
    model, tokens = llama("softmax"), drawn(2, 9)
    cache = hf.MemoryCache()
    cache.activate_past_recording()
    model(tokens[:, :5], **{hf.CACHE: cache})
    cache.report = {1: True}
    again = copy.deepcopy(cache)
    model(tokens[:, 5:], **{hf.CACHE: again})
    assert list(again.readings) == [1]
    again.crop(-2)
    assert (again.get_seq_length(), cache.get_seq_length()) == (7, 5)


@torch.no_grad()
def test_what_a_cache_does_not_take() -> None:
    plain, cache = decoder("Llama", **SIZES), hf.MemoryCache()
    with pytest.raises(ArgumentError, match=r"Convert the model with zonal.hf.convert"):
        plain(drawn(1, 5), **{hf.CACHE: cache})
    model, cache = llama(), hf.MemoryCache()
    model(drawn(2, 5), **{hf.CACHE: cache})
    size = cache.memory().nbytes
    with pytest.raises(ArgumentError, match="holds 2 sequences, and the call is of 3"):
        model(drawn(3, 1), **{hf.CACHE: cache})
    with pytest.raises(ArgumentError, match="layer 0 was made by operator 'squared_affine' of another model"):
        llama("sko")(drawn(2, 1), **{hf.CACHE: cache})
    assert (cache.get_seq_length(), cache.memory().nbytes) == (5, size)
    with pytest.raises(ArgumentError, match="ZonalCache: this cache is for the models of this library"):
        model(drawn(2, 1), **{hf.CACHE: hf.ZonalCache()})
    for shape in ((2, 4), (2, 7), (1, 6)):  # after 5 tokens, 1 or 6 may be given
        with pytest.raises(ArgumentError, match=r"attention_mask must be \(batch, tokens\) = \(2, 6\)"):
            model(drawn(2, 1), **{hf.CACHE: cache}, attention_mask=torch.ones(shape))
    with pytest.raises(ArgumentError, match="Call the model with it"):
        hf.MemoryCache().memory()
    with pytest.raises(ArgumentError, match="unknown cache 'memories'"):
        hf.convert(plain, "sko", cache="memories")  # type: ignore[arg-type]


def encoder(kind: str) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 29, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "attention_probs_dropout_prob": 0.0, "attention_dropout": 0.0, "initializer_range": 0.3, "pad_token_id": 0,
    }  # fmt: skip
    if kind == "DistilBert":
        sizes |= {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 48}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    return getattr(transformers, f"{kind}ForMaskedLM")(config).eval()


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "DistilBert"])
@torch.no_grad()
def test_encoders_say_the_same(kind: str, tmp_path: Any) -> None:
    model = encoder(kind)
    tokens = drawn(2, 17)
    real = torch.arange(17) < torch.tensor([[17], [9]])
    wanted = [model(tokens).logits, model(tokens, attention_mask=real.long()).logits[real]]
    hf.convert(model)
    found = [model(tokens).logits, model(tokens, attention_mask=real.long()).logits[real]]
    assert all(close(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))
    first, second = hf.convert(model, "performer")
    assert hf.operators(model) == [first, second]
    drawn_by_first, drawn_by_second = (next(own.buffers()) for own in (first, second))
    assert not torch.equal(drawn_by_first, drawn_by_second)
    hf.convert(model, "sinkhorn")  # a bidirectional layer has room for plans
    other = model(tokens).logits
    assert not close(other, wanted[0])
    model.save_pretrained(tmp_path)
    assert torch.equal(transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)(tokens).logits, other)
    with pytest.raises(ArgumentError, match="cache='memory' is for decoders"):
        hf.convert(model, "sko", cache="memory")


DECODERS: dict[str, dict[str, Any]] = {
    "OPT": {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "word_embed_proj_dim": 32, "attention_dropout": 0.0, "dropout": 0.0, "max_position_embeddings": 64},
    "GPTNeoX": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                "attention_dropout": 0.0},
    "Gemma2": SIZES | {"attn_logit_softcapping": None, "sliding_window": 6},
    "Qwen3": SIZES,
    "Phi3": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "attention_dropout": 0.0, "resid_pdrop": 0.0},
    "Phi": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "attention_dropout": 0.0},
    "StableLm": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 4},
}  # fmt: skip


@pytest.mark.parametrize("kind", DECODERS)
@torch.no_grad()
def test_decoders_say_the_same_with_keys_and_with_memories(kind: str) -> None:
    """Phi, StableLM and GPT-NeoX turn a part of each head by position, a half or a quarter."""
    model, tokens = decoder(kind, **DECODERS[kind]), drawn(2, 17)
    wanted = model(tokens).logits
    said = model.generate(tokens, max_new_tokens=9, do_sample=False)
    hf.convert(model, "softmax", cache="memory")
    assert close(model(tokens).logits, wanted)
    assert torch.equal(model.generate(tokens, max_new_tokens=9, do_sample=False), said)


def test_soft_caps_are_refused_before_anything_changes() -> None:
    model = decoder("Gemma2", **SIZES)
    with pytest.raises(ArgumentError, match="caps its logits"):
        hf.convert(model)
    assert type(model) is transformers.Gemma2ForCausalLM
    assert model.config._attn_implementation != "zonal"
