"""Errors for unknown arguments: names of other libraries are answered with the name used here."""

import difflib
import functools
import inspect
import types
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

from zonal.errors import ArgumentError

T = TypeVar("T", bound=Callable[..., Any])

_MASKS = (
    "key_padding_mask (bool, True = real token), causal=True, cu_seqlens for packed documents, "
    "or key_bias for one number per key"
)
_LAYOUT = "tensors are (batch, heads, tokens, dim) here, and (batch, tokens, dim) for layers"
_WEIGHTS = "the full matrix of weights is never computed; see zonal.theory.heads and `zonal explain --model`"
# (names in other libraries, names here, advice): the first name here that the call takes is suggested, else the advice
_TABLE: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("is_causal use_causal_mask", ("causal",), "pass causal= to zonal.attention and to layers"),
    ("attn_mask attn_bias mask attention_mask src_mask", (), f"there is no mask of pairs; use {_MASKS}"),
    ("padding_mask src_key_padding_mask", ("key_padding_mask",), f"masks are {_MASKS}"),
    (
        "dropout_p dropout attention_dropout attn_dropout",
        ("dropout",),
        "dropout of weights is an argument of zonal.attention and nn.Attention",
    ),
    ("embed_dim hidden_size d_model n_embd model_dim", ("dim",), "the width is the dim of the layer or the model"),
    (
        "num_heads n_heads nhead n_head num_attention_heads",
        ("heads",),
        "the number of heads is axis 1 of q, and heads of a layer",
    ),
    (
        "num_kv_heads n_kv_heads num_key_value_heads n_head_kv",
        ("kv_heads",),
        "the number of key heads is axis 1 of k, and kv_heads of a layer",
    ),
    ("kdim head_k_dim qk_head_dim", ("qk_dim", "key_dim"), "the size of keys is the last axis of k"),
    ("vdim head_v_dim v_head_dim", ("head_dim", "value_dim"), "the size of values is the last axis of v"),
    ("need_weights average_attn_weights output_attentions return_weights", (), _WEIGHTS),
    ("batch_first head_first layout", (), _LAYOUT),
    ("enable_gqa", (), "k and v may always have fewer heads than q; leave it out"),
    ("softmax_scale sm_scale scaling", ("scale",), "pass scale= to zonal.attention or to the operator"),
    (
        "window_size sliding_window window",
        (),
        "a window belongs to the operator: softmax(prior=zonal.prior.Window(left=…))",
    ),
    ("alibi_slopes", (), "slopes belong to the operator: softmax(prior=zonal.prior.ALiBi())"),
    (
        "cu_seqlens_q cu_seqlens_k seq_offsets",
        ("cu_seqlens",),
        "cu_seqlens gives the borders of documents packed along the tokens",
    ),
    (
        "past_key_value past_key_values initial_state kv_cache",
        ("memory",),
        "earlier keys and values are in a zonal.Memory",
    ),
    (
        "use_cache output_final_state",
        ("return_memory",),
        "zonal.attention and layers return their memory with return_memory=True",
    ),
    ("num_layers num_hidden_layers n_layer n_layers depth", ("layers",), "the layers of a model are a list of specs"),
    ("max_position_embeddings max_seq_len block_size seq_len", ("max_len", "length"), "lengths are not limited"),
    ("query", ("q", "x"), ""),
    ("key", ("k",), ""),
    ("value", ("v",), ""),
    ("hidden_states", ("x",), ""),
    ("input_ids", ("tokens",), ""),
    ("norm_first", ("residual",), "how blocks are composed is a model's residual"),
    ("eos_token_id", ("stop",), ""),
)
_FOREIGN = {name: (here, advice) for names, here, advice in _TABLE for name in names.split()}


class UnknownArgumentError(ArgumentError, TypeError):
    """A call was given an argument that it does not have."""


def unknown_argument(call: str, name: str, known: Collection[str]) -> UnknownArgumentError:
    """The error for an unknown argument: it suggests the name used here for another library's, else the nearest."""
    if name in _FOREIGN:
        here, about = _FOREIGN[name]
        found = next((each for each in here if each in known), None)
        hint = (
            f"It is called {found} here" + (f"; masks are {_MASKS}." if found == "key_padding_mask" else ".")
            if found
            else f"{about[:1].upper()}{about[1:]}."
        )
    else:
        near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
        hint = f"Did you mean {near[0]}?" if near else ""
    return UnknownArgumentError(
        " ".join(f"{call}: there is no argument {name!r}. {hint} It takes: {', '.join(known)}.".split())
    )


def known_names(subject: T) -> T:
    """Decorator: a function, or a class with its public methods, that refuses unknown arguments and lists its own.

    Signatures, type hints and documentation stay those of what is decorated.
    """
    if isinstance(subject, type):
        for name, member in list(vars(subject).items()):
            if isinstance(member, types.FunctionType) and (name == "__init__" or not name.startswith("_")):
                setattr(subject, name, known_names(member))
        return cast(T, subject)
    function = cast(Callable[..., Any], subject)
    parameters = inspect.signature(function).parameters
    if hasattr(function, "__wrapped__") or any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return subject
    known = tuple(name for name in parameters if name != "self")
    valid = frozenset(known)
    call = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        if given and not valid.issuperset(given):
            raise unknown_argument(call, next(name for name in given if name not in valid), known)
        return function(*args, **given)

    return cast(T, checked)


__all__ = ["UnknownArgumentError", "known_names", "unknown_argument"]
