"""Arguments by the names that other libraries have for them: refused with the name that they have here."""

import difflib
import functools
import inspect
import types
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

from zonal.errors import ArgumentError

T = TypeVar("T", bound=Callable[..., Any])

_MASKS = "key_padding_mask (bool, True = real token), causal=True, cu_seqlens for packed documents, or key_bias for a number a key"
_LAYOUT = "tensors are (batch, heads, tokens, dim) here, and (batch, tokens, dim) for layers"
# another library's name → the names here, the first that a call takes being meant, and what to know where it takes none
_FOREIGN: dict[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(("is_causal", "use_causal_mask"), (("causal",), "the causal rule is an argument of zonal.attention and of layers, causal=")),
    **dict.fromkeys(("attn_mask", "attn_bias", "mask", "attention_mask", "src_mask"), ((), f"there is no mask of pairs; give {_MASKS}")),
    **dict.fromkeys(("padding_mask", "src_key_padding_mask"), (("key_padding_mask",), f"masks are {_MASKS}")),
    **dict.fromkeys(("dropout_p", "dropout", "attention_dropout", "attn_dropout"), ((), "attention has no dropout here; leave it out")),
    **dict.fromkeys(("embed_dim", "hidden_size", "d_model", "n_embd", "model_dim"), (("dim",), "the width is the layer's or the model's dim")),
    **dict.fromkeys(("num_heads", "n_heads", "nhead", "n_head", "num_attention_heads"), (("heads",), "the number of heads is axis 1 of q, and a layer's heads")),
    **dict.fromkeys(
        ("num_kv_heads", "n_kv_heads", "num_key_value_heads", "n_head_kv"), (("kv_heads",), "the number of key heads is axis 1 of k, and a layer's kv_heads")
    ),
    **dict.fromkeys(("kdim", "head_k_dim", "qk_head_dim"), (("qk_dim", "key_dim"), "the size of keys is the last axis of k")),
    **dict.fromkeys(("vdim", "head_v_dim", "v_head_dim"), (("head_dim", "value_dim"), "the size of values is the last axis of v")),
    **dict.fromkeys(("need_weights", "average_attn_weights", "output_attentions", "return_weights"), ((), "weights are never made whole; see zonal.nn.evidence and `zonal explain --model`")),
    **dict.fromkeys(("batch_first", "head_first", "layout"), ((), _LAYOUT)),
    "enable_gqa": ((), "k and v may have fewer heads than q without being asked; leave it out"),
    **dict.fromkeys(("softmax_scale", "sm_scale", "scaling"), (("scale",), "the scale is zonal.attention's scale, or the operator's")),
    **dict.fromkeys(("window_size", "sliding_window", "window"), ((), "a window belongs to the operator: softmax(prior=zonal.prior.Window(left=…))")),
    "alibi_slopes": ((), "slopes belong to the operator: softmax(prior=zonal.prior.ALiBi())"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seq_offsets"), (("cu_seqlens",), "documents packed along the tokens are told by cu_seqlens")),
    **dict.fromkeys(("past_key_value", "past_key_values", "initial_state", "kv_cache"), (("memory",), "what came before is a zonal.Memory")),
    **dict.fromkeys(("use_cache", "output_final_state"), (("return_memory",), "calls of zonal.attention and of layers return what they keep with return_memory=True")),
    **dict.fromkeys(("num_layers", "num_hidden_layers", "n_layer", "n_layers", "depth"), (("layers",), "a model's layers are a list of specs")),
    **dict.fromkeys(("max_position_embeddings", "max_seq_len", "block_size", "seq_len"), (("max_len", "length"), "lengths are not limited")),
    "query": (("q", "x"), ""), "key": (("k",), ""), "value": (("v",), ""), "hidden_states": (("x",), ""), "input_ids": (("tokens",), ""),
    "norm_first": (("residual",), "how blocks are composed is a model's residual"), "eos_token_id": (("stop",), ""),
}  # fmt: skip


class UnknownArgumentError(ArgumentError, TypeError):
    """An argument of a name that the call does not have."""


def unknown_argument(call: str, name: str, known: Collection[str]) -> UnknownArgumentError:
    """The error for it: the name used here where another library's was given, else the nearest."""
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
    """A function, or a class with its constructor and public methods, that refuses arguments of unknown names with the names that it knows.

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
        if not valid.issuperset(given):
            raise unknown_argument(call, next(name for name in given if name not in valid), known)
        return function(*args, **given)

    return cast(T, checked)


__all__ = ["UnknownArgumentError", "known_names", "unknown_argument"]
