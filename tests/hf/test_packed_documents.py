"""Converted models on documents packed into rows: each gives what it gives alone, with every operator, and what cannot
be packed is refused.
"""

from typing import Any

import pytest
import torch
import transformers
from small_llama import SIZES, decoder
from torch import Tensor

from zonal import hf
from zonal.errors import ArgumentError
from zonal.mechanisms import names

LENGTHS = (5, 1, 9, 4)


def tokens(length: int = sum(LENGTHS), rows: int = 1) -> Tensor:
    return torch.randint(1, 29, (rows, length), generator=torch.Generator().manual_seed(1))


def positions(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def model(kind: str = "Llama", **options: Any) -> Any:
    return decoder(kind, **SIZES | options)


def each_alone(made: Any, row: Tensor, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.cat([made(part, use_cache=False).logits for part in row.split(lengths, dim=1)], 1)


def close(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).abs().max() <= 5e-5 * wanted.abs().max())


# what a decoder of transformers cannot have
OTHERS = {"sinkhorn", "hyperbolic_transport", "hierarchical", "rewa_categorical", "rewa_topological", "rewa_operator"}


@pytest.mark.parametrize("operator", ["exact", *sorted({*names()} - OTHERS)])
@torch.no_grad()
def test_each_document_is_as_if_alone(operator: str) -> None:
    made = model()
    hf.convert(made) if operator == "exact" else hf.convert(made, operator)
    packed = made(tokens(), position_ids=positions(), use_cache=False).logits
    assert close(packed, each_alone(made, tokens()))
    assert not close(packed, made(tokens(), use_cache=False).logits)


DECODERS: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 3},
    "Gemma2": {"attn_logit_softcapping": None, "sliding_window": 3},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
             "initializer_range": 0.3},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32, "attention_dropout": 0.0, "dropout": 0.0},
    "GPTNeoX": {"attention_dropout": 0.0},
    "Qwen3": {},
    "Phi3": {"attention_dropout": 0.0, "resid_pdrop": 0.0},
}  # fmt: skip


@pytest.mark.parametrize("kind", DECODERS)
@torch.no_grad()
def test_each_kind_of_decoder_packs(kind: str) -> None:
    made = decoder(kind, **DECODERS[kind]) if kind == "GPT2" else model(kind, **DECODERS[kind])
    rows = tokens(rows=2)
    if kind == "OPT":  # which transformers itself does not pack
        hf.convert(made, "softmax")
        with pytest.raises(ArgumentError, match="give each document a row"):
            made(rows, position_ids=positions().expand(2, -1), use_cache=False)
        return
    theirs = made(rows, position_ids=positions().expand(2, -1), use_cache=False).logits
    hf.convert(made, "softmax")
    found = made(rows, position_ids=positions().expand(2, -1), use_cache=False).logits
    assert close(found, theirs)
    assert close(found[1:], each_alone(made, rows[1:]))


def test_gradients_are_those_of_each_document() -> None:
    made = model()
    hf.convert(made, "squared_affine", layers=[1])
    gradients = []
    for logits in (made(tokens(), position_ids=positions(), use_cache=False).logits, each_alone(made, tokens())):
        made.zero_grad()
        logits.square().sum().backward()
        gradients.append([value.grad.clone() for value in made.parameters()])
    assert all(close(*pair) for pair in zip(*gradients, strict=True))


@torch.no_grad()
def test_an_operator_by_name_packs() -> None:
    hf.register()
    made = model()
    made.set_attn_implementation("zonal:squared_affine")
    packed = made(tokens(), position_ids=positions(), use_cache=False).logits
    assert close(packed, each_alone(made, tokens()))


@torch.no_grad()
def test_the_collator_of_transformers_packs() -> None:
    made = model()
    hf.convert(made, "retention")
    documents = tokens()[0].split(LENGTHS)
    batch = transformers.DataCollatorWithFlattening()([{"input_ids": part.tolist()} for part in documents])
    found = made(**batch, use_cache=False)
    assert close(found.logits, each_alone(made, tokens()))
    assert found.loss > 0


@torch.no_grad()
def test_documents_that_would_see_each_other_are_refused() -> None:
    made = model()
    hf.convert(made, "softmax", cache="memory")
    for given in ({}, {hf.CACHE: hf.MemoryCache()}, {"attention_mask": torch.ones_like(tokens())}):
        with pytest.raises(ArgumentError, match=r"one sequence for packed documents.*Pass use_cache=False and"):
            made(tokens(), position_ids=positions(), **given)
    padded = torch.ones_like(tokens())
    padded[:, :4] = 0  # padding has any positions
    made(tokens(), attention_mask=padded, position_ids=(padded.cumsum(1) - 1).clamp_min(0))


@torch.no_grad()
def test_offsets_of_documents_without_positions_are_refused() -> None:
    """Kernels that take no mask read them; operators would let each document see those before it."""
    made = model()
    hf.convert(made, "softmax")
    starts = torch.tensor([0, 5, 19], dtype=torch.int32)
    given = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 14, "max_length_k": 14}
    with pytest.raises(ArgumentError, match=r"only given cu_seq_lens_q. Give position_ids that start again from 0"):
        made(tokens(), use_cache=False, **given)
    found = made(tokens(), position_ids=positions((5, 14)), use_cache=False, **given).logits
    assert close(found, each_alone(made, tokens(), (5, 14)))
    one = {**given, "cu_seq_lens_q": starts[::2], "cu_seq_lens_k": starts[::2]}
    assert close(made(tokens(), use_cache=False, **one).logits, made(tokens()).logits)
