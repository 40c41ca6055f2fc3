"""Steps of a decoder that are set up once, on the CPU: a few tokens absorbed into a memory and read.

Compiled kernels pass over sums over features once a step, also over those before a window; a step of ridge statistics
takes O(r^2). Torch's fused attention reads the keys and values of softmax attention.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal import torch_func
from zonal.algebra.anchor import Ridge
from zonal.algebra.bound import Bound
from zonal.algebra.prior import Causal
from zonal.algebra.score import Clipped
from zonal.algebra.score.base import prepared_keys
from zonal.execution.call import Call
from zonal.execution.numbers import Numbers
from zonal.execution.paths import tile
from zonal.execution.paths.ridge import clipped_of, multiplied, other_ridge, query_scale
from zonal.features.serve import powers_of
from zonal.formula import FORMULAS
from zonal.kernels.abi import empty
from zonal.kernels.decode import FAMILY as SUMS
from zonal.kernels.decode import Decoder as Kernel
from zonal.kernels.decode import DecodeSpec, Maps, Window, WindowSpec
from zonal.kernels.native import Family, Reason
from zonal.kernels.op import plain, recorded
from zonal.kernels.ridge_decode import DTYPES as RIDGE_DTYPES
from zonal.kernels.ridge_decode import FAMILY as RIDGE
from zonal.kernels.ridge_decode import LATE, Stepper
from zonal.memory import KeyValues, Memory
from zonal.memory.inverse import REMAKE, Inverse, ridge_version
from zonal.memory.ridge import GramStatistics
from zonal.memory.sums import Sums as MemorySums
from zonal.memory.sums import fading
from zonal.memory.tokens import Tokens
from zonal.memory.whitened import width_of
from zonal.memory.windowed import WindowedSums, far_of
from zonal.tracing import traced

MOST_FADED = 12.0
"""After more nats of decay than this in one call torch's steps of ridge statistics run: what is left is too small for
updates.
"""
_SETTLE = 6.0  # nats of decay after which pending updates of ridge statistics are added to the sums
MOST_TOKENS = 16
"""Past this many tokens the kernel for whole sequences (``sums``) shares more work between them."""


def sums_refusal(call: Call) -> Reason:
    """Why the kernel of sums does not take a few tokens after a memory, or None."""
    memory = call.memory
    if call.held is None and call.tags.cancels:
        return "sums for this call alone may cancel, and are float64"
    if isinstance(memory, MemorySums) and recorded([memory.state]):
        return "it has no gradients, and the memory may be asked for some"
    if memory is not None and memory.form.statistics != torch.float32:
        return "it is for sums in float32, and the memory holds others"
    return _refusal(SUMS, call, ("features", "decayed"), tile.other_anchor)


def window_refusal(call: Call) -> Reason:
    """Why the kernel of a window and sums does not take a few tokens after a memory, or None."""
    memory = call.memory
    if isinstance(memory, WindowedSums):
        kept = [x for x in (memory.tokens, memory.opening) if x is not None]
        if recorded([memory.state, *(x for tokens in kept for x in tokens[:2])]):
            return "it has no gradients, and the memory may be asked for some"
        if any(tokens.key_bias is not None for tokens in kept):
            return "the memory keeps key biases, which are not in it"
        if memory.form.dtype != call.dtype:
            return f"the memory keeps keys in {memory.form.dtype}, and this call has them in {call.dtype}"
    return _refusal(SUMS, call, ("windowed",), _other_kernels)


def ridge_refusal(call: Call) -> Reason:
    """Why the kernel of ridge statistics does not take a few tokens after a memory, or None."""
    if isinstance(call.memory, GramStatistics) and recorded([call.memory.gram, call.memory.cross]):
        return "it has no gradients, and the memory may be asked for some"
    return _refusal(RIDGE, call, ("ridge", "fading"), other_ridge)


def keys_refusal(call: Call) -> Reason:
    """Why torch's fused attention does not take a token after kept keys and values, or None."""
    memory = cast(KeyValues, call.memory)
    room = memory.buffer.room
    if not call.dtype is memory.form.dtype is torch.float32 or call.shape.queries != 1:
        return "it takes one token in float32 after keys in float32"
    if recorded([room.k, room.v]):
        return "it has no gradients, and the memory may be asked for some"
    if call.log_decay is not None or memory.biased or room.mask is not None:
        return "decays, key biases and padding are not in it"
    return _unfit(call, ("keys",), _not_softmax)


def _not_softmax(call: Call) -> Reason:
    """The refusal of other weights than exp(q . k) over its sum in a row, of prepared q and k, and of priors."""
    bound, tags = call.bound, call.tags
    exponential = bound.score.bilinear and tile.code_of(bound.link) == FORMULAS["exp"]
    if not exponential or tags.reduction != "row" or tags.top or not call.include_self:
        return "it computes softmax attention alone"
    plain_priors = all(isinstance(prior, Causal) for prior in bound.priors) and bound.slopes is None
    return None if plain_priors else "windows and biases of the distance are not in it"


def _other_kernels(call: Call) -> Reason:
    """The refusal of other kernels in a window and before it than those that the kernel computes."""
    bound, far, scale = call.bound, far_of(call.bound).bound, None if call.raw is None else call.raw.scale
    fused = bound.score.fused(call.head_dim, bound.score_params, scale)
    if fused is None or fused.normalise or tile.code_of(bound.link) != FORMULAS["exp"]:
        return "the kernel of its window is not the exponential of a plain dot product"
    if _product(far, call.head_dim, None) is None:
        return f"its far score {type(far.score).__name__} is neither a dot product nor made of features of one layer"
    return None


def _refusal(family: Family, call: Call, kinds: tuple[str, ...], other: Callable[[Call], Reason]) -> Reason:
    """The refusal of a family that takes memories of these kinds. other: of operators."""
    return family.refusal(call.device.type, call.coefficients.dtype, lambda: _unfit(call, kinds, other))


def _unfit(call: Call, kinds: tuple[str, ...], other: Callable[[Call], Reason]) -> Reason:
    # as they came: this kernel prepares them itself
    if traced() or torch_func.forward() or any(type(x) not in (Tensor, torch.nn.Parameter) for x in call.given):
        return "a call that is traced or transformed, or has subclasses of tensors, needs operations of torch"
    if call.kind not in kinds:
        return f"a memory of kind {call.kind!r} is not in it"
    reason = other(call)
    if reason is not None:
        return reason
    if call.chunk is not None:
        return "a memory that waits for whole chunks is not in it"
    if call.key_bias is not None or call.visibility.key_mask is not None or call.visibility.packed:
        return "key biases, key masks and packed documents are not in it"
    queries, keys = call.shape.queries, call.shape.keys
    if not 1 <= queries <= MOST_TOKENS or queries != keys:
        return (
            f"it takes 1 to {MOST_TOKENS} new tokens with a query each, this call has {queries} queries and {keys} keys"
        )
    if call.recorded:
        return "it has no gradients, and this call may be asked for some (torch.no_grad says that it is not)"
    return tile.empty_rows(call)


class _Product(NamedTuple):
    """A score as the kernel of sums computes it from raw queries and keys: scale f(q) . f(k), f the identity or, if
    ``normalise``, x / |x|; or with ``maps`` phi(scale q) . phi(k). scale: (H,) or a number.
    """

    scale: Tensor | float
    normalise: bool = False
    maps: Maps | None = None


def _product(bound: Bound, dim: int, scale: float | None) -> _Product | None:
    """The score for vectors of ``dim`` numbers; None = torch prepares queries and keys."""
    fused = bound.score.fused(dim, bound.score_params, scale)
    if fused is not None:
        return _Product(fused.scale, fused.normalise)
    layers = bound.score.layers(dim, bound.score_params, scale)
    return None if layers is None else _Product(1.0, maps=Maps(*layers))


def _weights(bound: Bound, dim: int) -> Tensor:
    """The link's coefficient of each feature's power, (H or 1, features). dim: of prepared vectors."""
    features = powers_of(bound.link)
    trivial = torch.tensor([0.0, 1.0], dtype=torch.float32, device="cpu").view(2, 1, 1, 1)
    monomials = trivial if features.trivial else bound.link.monomials(bound.coefficients)
    return features.scale(monomials.float(), dim)


def _by_head(x: Tensor | float, heads: int) -> Tensor:
    return (x if isinstance(x, Tensor) else torch.tensor([x], dtype=torch.float32, device="cpu")).float().expand(heads)


class Compiled:
    """What the compiled steps of all memories share: their tokens so far, and which tensors the next step takes without
    being prepared and planned again.
    """

    def __init__(self, call: Call, memory: Memory) -> None:
        shape = call.shape
        self.operator, self.bound = call.operator, call.bound
        self.heads, self.scale, self.dtype = shape.heads, None if call.raw is None else call.raw.scale, call.dtype
        self.sizes = shape.batch, call.bound.kv_heads, call.head_dim, shape.value_dim
        self._numbers = Numbers(call.operator)
        self._count = memory.count

    @property
    def count(self) -> int:
        """Tokens so far, padding included."""
        return self._count

    def takes(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> bool:
        """Whether the kernel runs a step of these tensors with the numbers that it has."""
        batch, kv_heads, dim, value_dim = self.sizes
        if q is None or k is None or v is None:  # plain() passes over None; other values are refused by it
            return False
        if scale != self.scale or not plain(q, k, v) or q.ndim != 4:
            return False
        dtype, tokens, numbers = self.dtype, q.shape[2], self._numbers
        if (
            not 1 <= tokens <= MOST_TOKENS
            or q.shape != (batch, self.heads, tokens, dim)
            or k.shape != (batch, kv_heads, tokens, dim)
            or v.shape != (batch, kv_heads, tokens, value_dim)
            or not q.dtype is k.dtype is v.dtype is dtype
        ):
            return False
        if torch.is_grad_enabled() and (not numbers.none or q.requires_grad or k.requires_grad or v.requires_grad):
            return False
        return numbers.none or not numbers.changed(self.operator)

    def prepared(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors in float32, with queries and keys prepared by the score."""
        score, params = self.bound.score, self.bound.score_params
        with torch.autocast("cpu", enabled=False):
            q, k = score.prepare_query(q.float(), params, self.scale), prepared_keys(score, k.float(), params)
            return q, k, v.float()


class KeySteps(Compiled):
    """Keys and values that torch's fused attention reads, one token a step."""

    def __init__(self, call: Call, memory: KeyValues) -> None:
        super().__init__(call, memory)
        self._held, self._grouped = memory, call.bound.groups > 1

    def takes(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> bool:
        return super().takes(q, k, v, scale) and q.shape[2] == 1

    def step(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> Tensor | None:
        """y (B, H, 1, P). log_decay is None: operators that fade are refused."""
        return self.run(*self.prepared(q, k, v))

    def run(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> Tensor | None:
        """``step`` of prepared queries and keys."""
        self._held = cast(KeyValues, self._held.extended(Tokens(k, v)))
        self._count = self._held.count
        kept = self._held.tokens
        return F.scaled_dot_product_attention(q, kept.k, kept.v, scale=1.0, enable_gqa=self._grouped)

    def memory(self) -> KeyValues:
        """The memory after all steps. Later ones leave it as it is: they write behind its keys."""
        return self._held


class SumsSteps(Compiled):
    """A memory of sums over features in the hands of the kernel, which changes its own copy of them in place.

    Raises: BuildError when the kernel does not compile.
    """

    def __init__(self, call: Call, memory: MemorySums) -> None:
        super().__init__(call, memory)
        bound, dim, found = call.bound, call.shape.dim, None
        memory = memory if call.log_decay is None else fading(memory)
        features = powers_of(bound.link)
        batch, kv_heads, _, value_dim = self.sizes
        with torch.no_grad():
            if call.raw is not None:
                found = _product(bound, call.head_dim, self.scale)
            self.raw, product = found is not None, found or _Product(1.0)
            spec = DecodeSpec(
                (batch, self.heads, kv_heads, dim if product.maps is None else call.head_dim, value_dim),
                features.degree, features.lowest, tile.kind_of(call), bound.link.positive, call.include_self,
                product.normalise,
            )  # fmt: skip
            self._kernel = Kernel(spec, _by_head(product.scale, self.heads), _weights(bound, dim), product.maps)
        self._before, self._state, self._own = memory, memory.state.contiguous(), False
        self._padding = memory.padding.contiguous()
        self._total, self._declared, self._passed = memory.total, bound.log_decay, 0  # tokens at the declared rate
        self._keep = (
            None if self._declared is None else self._declared.exp().float().view(1, -1, 1).expand(batch, -1, -1)
        )

    def step(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> Tensor | None:
        """y (B, H, T, P), or None where the environment has switched kernels off, and nothing has changed.

        log_decay: (B or 1, Hkv, T); None: as the operator declares it.
        """
        if self.raw:
            return self.run(q, k, v, log_decay)
        return self.run(*self.prepared(q, k, v), log_decay)

    def run(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> Tensor | None:
        """``step`` of queries and keys as the kernel takes them."""
        (batch, _, tokens, _), into = q.shape, self._state if self._own else None
        keep = self._keep if log_decay is None else log_decay.exp().float()
        if keep is not None:
            keep = keep.expand(batch, -1, tokens).contiguous()
        found = self._kernel(q, k, v, self._state, self._count, self._padding, into, keep)
        if found is None:
            return None
        self._count, self._state, self._own = self._count + tokens, found[1], True
        if log_decay is None:
            self._passed += tokens
        elif self._total is not None:
            self._total = self._total + log_decay.sum(-1)
        return found[0] if found[0].dtype is self.dtype else found[0].to(self.dtype)

    def memory(self) -> MemorySums:
        """The memory after all steps. Later ones leave it as it is: the next writes to a new place."""
        self._own = False
        total = self._total
        if total is not None and self._declared is not None:
            total = total + self._passed * self._declared
        return replace(self._before, count=self._count, state=self._state, total=total)


_ROOM = 64
"""A window has room for as many further tokens as it has, and these, before its keys move to a new place."""


class WindowSteps(Compiled):
    """The keys of a window and the sums before it in the hands of the kernel, which changes its own copies of them.

    Raises: BuildError when the kernel does not compile.
    """

    def __init__(self, call: Call, memory: WindowedSums) -> None:
        super().__init__(call, memory)
        bound, dim, far = call.bound, call.head_dim, far_of(call.bound)
        batch, kv_heads, _, value_dim = self.sizes
        features = powers_of(far.bound.link)
        with torch.no_grad():
            fused, product = bound.score.fused(dim, bound.score_params, self.scale), _product(far.bound, dim, None)
            assert fused is not None
            assert product is not None
            near, scale, key_scale = _by_head(fused.scale, self.heads), _by_head(product.scale, self.heads), 1.0
            if not product.normalise:  # as ``Far`` scales what it sees
                scale, key_scale = scale * near * dim**0.25, dim**-0.25
            spec = DecodeSpec(
                (batch, self.heads, kv_heads, dim, value_dim), features.degree, features.lowest, "row",
                far.bound.link.positive, True, product.normalise,
            )  # fmt: skip
            share = _by_head(far.weight, self.heads)
            rules = WindowSpec(far.window, far.first, near, share, key_scale)
            weights = _weights(far.bound, far.bound.score.width(dim))
            self._kernel = Kernel(spec, scale, weights, product.maps, rules)
        self._before, self._state, self._own = memory, memory.state.contiguous(), False
        self._padding = memory.padding.contiguous()
        self._size, self._length = far.window, memory.tokens.length
        opening = memory.tokens.span(0, 0) if memory.opening is None else memory.opening
        first = opening.map(lambda x: x.clone(memory_format=torch.contiguous_format))  # the kernel writes into it
        kept, held, opened = memory.tokens, _real(memory.tokens), _real(first)
        self._window = Window(kept.k, kept.v, self._length, held, first.k, first.v, opened)

    def step(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> Tensor | None:
        """y (B, H, T, P), or None where the environment has switched kernels off, and nothing has changed."""
        assert log_decay is None
        tokens, window = q.shape[2], self._window
        if window.end + tokens > window.k.shape[2]:
            self._window = window = self._moved(window)
        into = self._state if self._own else None
        found = self._kernel(q, k, v, self._state, self._count, self._padding, into, window=window)
        if found is None:
            return None
        self._count, self._length = self._count + tokens, min(self._length + tokens, self._size)
        self._state, self._own = found[1], True
        return found[0]

    def _moved(self, window: Window) -> Window:
        """The window at the start of a new place. Memories that were given away keep the old one."""
        start = window.end - self._length

        def moved(x: Tensor) -> Tensor:
            room = x.new_empty(*x.shape[:2], 2 * self._size + _ROOM, x.shape[3])
            room[:, :, : self._length] = x[:, :, start : window.end]
            return room

        return replace(window, k=moved(window.k), v=moved(window.v), end=self._length)

    def memory(self) -> WindowedSums:
        """The memory after all steps. Later ones leave it as it is: they write behind its keys, and to other sums."""
        self._own, window = False, self._window
        last = slice(window.end - self._length, window.end)
        tokens = Tokens(window.k[:, :, last], window.v[:, :, last])
        if bool((window.held < self._length).any()):
            place = torch.arange(self._length, 0, -1, device="cpu")
            tokens = tokens._replace(mask=place <= window.held[:, None])
        opening = self._before.opening
        if opening is not None:
            mask = torch.arange(opening.length, device="cpu") < window.opened[:, None]
            opening = Tokens(window.opening_k.clone(), window.opening_v.clone(), mask)
        return replace(self._before, count=self._count, tokens=tokens, state=self._state, opening=opening)


def _real(tokens: Tokens) -> Tensor:
    """How many of the tokens are real, (B,) int64."""
    if tokens.mask is None:
        return torch.full((tokens.k.shape[0],), tokens.length, dtype=torch.int64, device="cpu")
    return tokens.mask.sum(-1)


class Sums(NamedTuple):
    """float64, contiguous: gram, inverse (B, Hkv, r, r), cross (B, Hkv, P, r), for powers past 0 shift (B, Hkv, r, r),
    first and last key (B, Hkv, r), and level (B, Hkv, r) where the past fades.
    """

    gram: Tensor
    cross: Tensor
    inverse: Tensor
    shift: Tensor | None
    first: Tensor | None
    last: Tensor | None
    level: Tensor | None

    def contiguous(self) -> "Sums":
        """The same, each in one piece."""
        return Sums(*(None if x is None else x.contiguous() for x in self))  # type: ignore[arg-type]

    def like(self) -> "Sums":
        """Sums for which there is memory and no numbers yet."""
        return Sums(*(None if x is None else torch.empty_like(x) for x in self))  # type: ignore[arg-type]


class RidgeSteps(Compiled):
    """Ridge statistics in the hands of the kernel.

    To write all sums at each token takes several times as long as to read them. So the last few tokens stay beside the
    sums as pending updates, through which a read-out goes as well, and only every 16 tokens they are added to the sums,
    in a new place.

    Raises: BuildError when the kernel does not compile.
    """

    def __init__(self, call: Call, memory: GramStatistics) -> None:
        super().__init__(call, memory)
        bound, anchor, self._clipped = call.bound, cast(Ridge, call.bound.anchor), clipped_of(call)
        batch, kv_heads, _, value_dim = self.sizes
        clipped = self._clipped or Clipped(1.0, None)
        shape = batch, self.heads, kv_heads, width_of(bound, call.head_dim), value_dim
        powers = torch.tensor(anchor.powers(self.heads), dtype=torch.int64, device="cpu")
        with torch.no_grad():
            scale = query_scale(call, anchor, clipped).contiguous()
            rho = anchor.ridge(bound.anchor_params, kv_heads).double().contiguous() if memory.fades else None
            self._stepper = Stepper(
                shape, anchor.shifts > 0, scale, powers, clipped.limit or 0.0, call.include_self, rho
            )
            self._version, inverse = ridge_version(call.operator), memory.inverse
            if inverse is None or inverse.version != self._version:
                inverse = Inverse(memory.solved(bound), 0, self._version)
        self._before, self._padding, self._total = memory, memory.padding.contiguous(), memory.total
        self._declared = None if bound.log_decay is None else bound.log_decay.double().view(1, -1, 1)
        sums = memory.gram, memory.cross, inverse.matrix, memory.shift, memory.first, memory.last, memory.level
        self._settled(Sums(*sums).contiguous(), memory.count, inverse.age)

    def _settled(self, sums: Sums, count: int, age: int) -> None:
        """From now on these are the sums, of ``count`` tokens, and nothing is pending."""
        self._sums, self._count, self._age, self._faded = sums, count, age, 0.0
        self._places = self._stepper.places(sums)
        self._rows: list[Tensor] = []
        self._rows_at: tuple[int, ...] = ()

    def step(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> Tensor | None:
        """y (B, H, T, P), or None where the environment has switched kernels off or too much fades, and nothing has
        changed. log_decay: (B or 1, Hkv, T); None: as the operator declares it.
        """
        if self._clipped is not None:
            return self.run(q, multiplied(k, self._clipped), v, log_decay)
        return self.run(*self.prepared(q, k, v), log_decay)

    def run(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> Tensor | None:
        """``step`` of queries and keys as the kernel takes them."""
        if self._clipped is None:
            q, k = self._before.featured(q), self._before.featured(k)
        if q.dtype not in RIDGE_DTYPES:
            q, k, v = q.float(), k.float(), v.float()
        tokens, pending, after, faded = q.shape[2], len(self._rows_at), None, 0.0
        if self._total is not None:
            given = self._declared if log_decay is None else log_decay.double()
            assert given is not None
            log_decay = given.expand(q.shape[0], -1, tokens).contiguous()
            faded = -float(log_decay.sum(-1).amin())
            if faded > MOST_FADED:
                return None
        if self._age + pending + tokens > REMAKE:
            with torch.no_grad():
                memory = self.memory()
                self._settled(self._sums._replace(inverse=memory.made(self.bound).contiguous()), self._count, 0)
            pending = 0
        if pending + tokens >= LATE or self._faded + faded > _SETTLE:
            after = self._sums.like()
        found = self._stepper(q, k, v, self._places, self._rows_at, self._count, self._padding, after, log_decay)
        if found is None:
            return None
        y, rows = found
        if self._total is not None and log_decay is not None:
            self._total = self._total + log_decay.sum(-1)
        if after is not None:
            self._settled(after, self._count + pending + tokens, self._age + pending + tokens)
        elif rows is not None:
            start, step = rows.data_ptr(), rows.stride(0) * 8
            self._rows.append(rows)
            self._rows_at += tuple(start + t * step for t in range(tokens))
            self._faded += faded
        return y if y.dtype is self.dtype else y.to(self.dtype)

    @property
    def count(self) -> int:
        return self._count + len(self._rows_at)

    def memory(self) -> GramStatistics:
        """The memory after all steps. Later ones leave it as it is."""
        if self._rows_at:
            batch, heads, kv_heads, dim, value_dim = self._stepper.shape
            pending, after = len(self._rows_at), self._sums.like()
            none = empty(batch, heads, 0, dim), empty(batch, kv_heads, 0, dim), empty(batch, kv_heads, 0, value_dim)
            self._stepper(*none, self._places, self._rows_at, self._count, self._padding, after)
            self._settled(after, self._count + pending, self._age + pending)
        gram, cross, inverse, shift, first, last, level = self._sums
        return replace(
            self._before, count=self._count, gram=gram, cross=cross, shift=shift, first=first, last=last, level=level,
            total=self._total, inverse=Inverse(inverse, self._age, self._version),
        )  # fmt: skip


Steps = SumsSteps | RidgeSteps | WindowSteps | KeySteps
"""A memory in the hands of a kernel."""
KINDS: dict[type[Memory], tuple[Callable[[Call], Reason], Callable[[Call, Any], Steps]]] = {
    GramStatistics: (ridge_refusal, RidgeSteps),
    WindowedSums: (window_refusal, WindowSteps),
    MemorySums: (sums_refusal, SumsSteps),
    KeyValues: (keys_refusal, KeySteps),
}
"""For each kind of memory that has a kernel: what the kernel refuses, and its steps."""

__all__ = [
    "KINDS", "MOST_TOKENS", "RidgeSteps", "Steps", "SumsSteps", "WindowSteps", "ridge_refusal", "sums_refusal",
    "window_refusal",
]  # fmt: skip
