"""The streaming path by a compiled kernel on the CPU: a few tokens absorbed and read in one pass over a memory of sums.

A decoder's step is short, so that planning it costs more than running it: ``again`` repeats a step of which nothing but the numbers changed.
"""

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from zonal.algebra import Operator
from zonal.algebra.anchor import Count, Raw, Row
from zonal.algebra.operator import Bound
from zonal.algebra.score import Fused
from zonal.execution import native
from zonal.execution.call import Call
from zonal.features import feature_map
from zonal.kernels import native as native_kernels
from zonal.kernels import transforms
from zonal.kernels.cpp import decode_library
from zonal.kernels.cpp.decode_library import Decoder, DecodeSpec
from zonal.memory import FeatureSums, Memory
from zonal.memory.form import Form

MOST_TOKENS = 16
"""Past this many tokens the kernel for whole sequences (``native_sums``) shares more work between them."""
_KEPT = 64


def refusal(call: Call, kind: str) -> str | None:
    """Why torch's verbs of a memory of this kind run in the kernel's place, or None."""
    if torch.compiler.is_compiling() or transforms.active():
        return "a call that is traced or transformed needs operations of torch"
    bound, (_, _, queries, keys, dim, value_dim) = call.bound, call.shape
    reason = native_kernels.unfit(call.device.type, call.coefficients.dtype, ("cpu", "meta"))
    if reason is not None:
        return reason
    if kind != "features":
        return f"a memory of kind {kind!r} is not in it"
    if call.chunk is not None:
        return "a memory that waits for whole chunks is not in it"
    if type(bound.anchor) not in (Row, Count, Raw):
        return f"anchor {type(bound.anchor).__name__} is not in it"
    if not call.bias.empty or call.visibility.key_mask is not None or call.visibility.packed:
        return "log priors (decay, key biases), key masks and packed documents are not in it"
    if not 1 <= queries <= MOST_TOKENS or queries != keys:
        return (
            f"it takes 1 to {MOST_TOKENS} new tokens with a query each, this call has {queries} queries and {keys} keys"
        )
    if min(dim, value_dim) < 1:
        return f"key and value dimensions must be at least 1, this call has {dim} and {value_dim}"
    if torch.is_grad_enabled() and (call.requires_grad or call.coefficients.requires_grad):
        return "it has no gradients, and this call may be asked for some (torch.no_grad says that it is not)"
    return native_kernels.missing(decode_library.CODE, decode_library.SOURCE)


class _Kept(NamedTuple):
    """A decoder and what it was made from. fused: None where the score prepares queries and keys; fixed: its operator has learned nothing."""

    decoder: Decoder
    bound: Bound
    fused: Fused | None
    temperature: Tensor | None
    fixed: bool

    def good(self, bound: Bound, fused: Fused | None) -> bool:
        """Whether the operator's numbers are still those."""
        if (
            bound.coefficients is not self.bound.coefficients
        ):  # the operator keeps them while what it learned stays the same
            return False
        now = _temperature(fused)
        return now is None if self.temperature is None else now is not None and torch.equal(now, self.temperature)


# of each operator, by (heads, key heads, key dim, value dim, batch, scale, whether the score prepares), and by what ``again`` has before it
_made: WeakKeyDictionary[Operator, dict[tuple[object, ...], _Kept]] = WeakKeyDictionary()


def _temperature(fused: Fused | None) -> Tensor | None:
    return fused.scale if fused is not None and isinstance(fused.scale, Tensor) else None


def streaming(call: Call, memory: FeatureSums) -> tuple[Tensor, Memory]:
    """y (B, H, T, P) and the memory after the call's tokens, for a call that is not refused. Raises: BuildError when the kernel does not compile."""
    batch, heads, _, _, _, value_dim = call.shape
    scale = None if call.raw is None else call.raw.scale
    fused = None if call.raw is None else call.bound.score.fused(call.head_dim, call.bound.score_params, scale)
    kept = _decoder(call, (heads, call.bound.kv_heads, call.head_dim, value_dim, batch, scale, call.raw is None), fused)
    q, k, v = call.tokens if fused is None or call.raw is None else call.raw[:3]
    if q.dtype not in decode_library.DTYPES:
        q, k, v = q.float(), k.float(), v.float()
    stepped = _step(kept.decoder, memory, q, k, v)
    assert stepped is not None  # ``refusal`` has looked at the environment
    return call.scaled(stepped[0]), stepped[1]


def _decoder(call: Call, key: tuple[object, ...], fused: Fused | None) -> _Kept:
    operator = call.operator
    known = _made.setdefault(operator, {})
    kept = known.get(key)
    if kept is not None and kept.good(call.bound, fused):
        return kept
    if kept is not None or len(known) >= _KEPT:  # what the operator learned has changed, or there is no room
        known.clear()
    bound, features = call.bound, feature_map(call.bound.link)
    assert features is not None
    batch, heads, _, _, dim, value_dim = call.shape
    plain = Fused(False, 0.0, 1.0) if fused is None else fused
    spec = DecodeSpec(
        (batch, heads, bound.kv_heads, dim, value_dim), features.degree, features.lowest,
        "row" if call.tags.normalises else "count" if isinstance(bound.anchor, Count) else "raw", bound.link.positive, call.include_self, plain.normalise, plain.eps,
    )  # fmt: skip
    with torch.no_grad():
        monomials = (
            torch.tensor([0.0, 1.0], dtype=torch.float32).view(2, 1, 1, 1)
            if features.trivial
            else bound.link.monomials(bound.coefficients)
        )
        weights = features.scale(monomials.float(), dim)
        scale = (
            plain.scale if isinstance(plain.scale, Tensor) else torch.full((heads,), plain.scale, dtype=torch.float32)
        )
        decoder = Decoder(spec, scale, weights)
    fixed = not any(True for _ in operator.parameters()) and not any(True for _ in operator.buffers())
    temperature = _temperature(fused)
    kept = known[key] = _Kept(
        decoder, bound, fused, None if temperature is None else temperature.detach().clone(), fixed
    )
    return kept


def _step(decoder: Decoder, memory: FeatureSums, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Memory] | None:
    """None when the environment has switched the kernels off since the decoder was made."""
    found = decoder(q, k, v, memory.state.contiguous(), memory.count, memory.padding.contiguous())
    return None if found is None else (found[0], memory.moved(q.shape[2], found[1]))


def again(
    q: Tensor, k: Tensor, v: Tensor, operator: Operator, memory: Memory, scale: float | None
) -> tuple[Tensor, Memory] | None:
    """A causal call without masks and priors of its own as it ran before, or None: then it goes the usual way, where everything is checked.

    That this operator and these shapes are not refused was found when their decoder was made; what may differ from call to call is looked at here.
    """
    if type(memory) is not FeatureSums or memory.operator is not operator or not native.plain(q, k, v):
        return None
    known = _made.get(operator)
    if known is None:
        return None
    state, dtype, form = memory.state, q.dtype, memory.form
    kept = known.get((q.shape, k.shape, v.shape, scale, form))
    if kept is None:
        kept = _fitting(known, q, k, v, form, scale)
        if kept is None:
            return None
    if (
        not dtype is k.dtype is v.dtype
        or dtype not in decode_library.DTYPES
        or state.dtype is not torch.float32
        or not state.is_cpu
    ):
        return None
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or state.requires_grad or not kept.fixed
    ):
        return None
    bound = kept.bound
    if not kept.fixed:
        bound = operator.bind(bound.heads, bound.kv_heads)
        if not kept.good(bound, bound.score.fused(form.key_dim, bound.score_params, scale)):
            return None
    if kept.fused is not None:
        return _step(kept.decoder, memory, q, k, v)
    if torch.is_autocast_enabled("cpu"):
        return None
    score, params = bound.score, bound.score_params
    stepped = _step(
        kept.decoder,
        memory,
        score.prepare_query(q.float(), params, scale),
        score.prepare_key(k.float(), params),
        v.float(),
    )
    return None if stepped is None else (stepped[0].to(dtype), stepped[1])


def _fitting(
    known: dict[tuple[object, ...], _Kept], q: Tensor, k: Tensor, v: Tensor, form: Form, scale: float | None
) -> _Kept | None:
    """The decoder for tensors of these shapes, if there is one; the next ones of the same find it at once."""
    if q.ndim != 4:
        return None
    (batch, heads, key_dim, value_dim, _, _), (_, query_heads, tokens, _) = form, q.shape
    kept = known.get((query_heads, heads, key_dim, value_dim, batch, scale, False))
    if kept is None or not 1 <= tokens <= MOST_TOKENS:
        return None
    if (
        q.shape != (batch, query_heads, tokens, key_dim)
        or k.shape != (batch, heads, tokens, key_dim)
        or v.shape != (batch, heads, tokens, value_dim)
    ):
        return None
    if len(known) < _KEPT:
        known[(q.shape, k.shape, v.shape, scale, form)] = kept
    return kept


__all__ = ["MOST_TOKENS", "again", "refusal", "streaming"]
