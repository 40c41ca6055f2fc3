"""The chunked path of anchors with a window: tiles of the window, sums over all keys before it, and their merge.

A query at position p sees the keys s <= p - w of the far kernel: with its keys cut off w before the end they are an
ordinary causal call, whose last queries are those of this one. So both parts are exact per token, and what is carried
is a window of keys and sums over the keys that have left it. Padding takes no place in the window: the tokens of each
sequence run with their padding before them. Memory is linear in the number of tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.algebra.anchor import Row, State
from zonal.algebra.bound import Far
from zonal.algebra.prior import visibility
from zonal.algebra.score import Fused
from zonal.execution.call import Call, Result, check_memory, without_idle
from zonal.execution.paths import tile
from zonal.execution.paths.documents import by_document
from zonal.execution.paths.features import layers_for
from zonal.execution.paths.scan import Job, Rule, block_size, scan
from zonal.execution.paths.sums import known, link_numbers, run_kernel
from zonal.features.serve import powers_of
from zonal.kernels.features import made
from zonal.kernels.local_global import WindowInputs, local_global
from zonal.kernels.native import Reason
from zonal.kernels.sums import FAMILY as SUMS
from zonal.kernels.sums import SumsInputs, SumsSpec, summed, sums
from zonal.kernels.tile import FAMILY as TILE
from zonal.kernels.tile import TileSpec
from zonal.memory import Tokens, WindowedSums
from zonal.memory.sums import with_mass
from zonal.memory.windowed import Leaving, far_of, merged, met, near_sums, opened, packed, require_summed, taken
from zonal.tracing import recorded

_FEWEST = 32
"""Queries of a block of torch's window: with fewer, blocks repeat most of their keys."""


class _Placed(NamedTuple):
    """The tokens of a run, with the padding of each sequence before them.

    q: of the queries, the last of the tokens. held: keys and values before the call and its own. far: those of them
    that have left the window after the run and are summed up. opening: the first tokens that have left it, where they
    keep the kernel of the window. memory: what came before, None = nothing. place: (B, T) where the result of each
    query stands, None = in order.
    """

    q: Tensor
    held: Tokens
    far: Tokens
    opening: Leaving | None
    memory: WindowedSums | None
    place: Tensor | None

    @property
    def moved(self) -> bool:
        """Whether tokens are not those of the call, in order."""
        return self.memory is not None or self.place is not None


def refusal(call: Call) -> Reason:
    """Why torch runs in the kernels' place, or None."""
    far = far_of(call.bound).bound
    code, device, dtype = tile.code_of(far.link), call.device.type, call.coefficients.dtype
    if (reason := tile.missing_formula(far, code, device)) is not None:
        return reason
    near = tile.code_of(call.bound.link)
    return TILE.refusal(device, dtype, lambda: _unfit(call), code=near) or SUMS.refusal(
        device, dtype, lambda: None, code=code
    )


def _unfit(call: Call) -> Reason:
    if call.held is not None and call.held.kind != "windowed":
        return f"a memory of kind {call.held.kind!r} is not in it"
    if 0 in (call.shape.queries, call.shape.keys):
        return "it takes at least one query and one key"
    return tile.too_wide(call.shape.dim, call.shape.value_dim)


def compiled(call: Call) -> Result:
    """y (B, H, T, P) by two compiled kernels, and the memory after the call's tokens.

    Raises: BuildError when a kernel does not compile.
    """
    return _run(call, _by_kernels)


def by_torch(call: Call) -> Result:
    """y (B, H, T, P) by torch, and the memory after the call's tokens."""
    return _run(call, _by_torch)


def _run(call: Call, body: Callable[[Call, _Placed], tuple[Tensor, Tensor | None]]) -> Result:
    """y, and the memory after the call's tokens. body: y of placed tokens, and the sums before the last window."""
    if call.visibility.packed:
        return by_document(call, lambda part: _run(part, body)[0]), None
    queries, keys = call.shape.queries, call.shape.keys
    if queries > keys:
        return without_idle(call, queries - keys, lambda part: _run(part, body))
    memory = call.memory
    if queries == 0:
        y = call.q[..., :1].expand(*call.q.shape[:3], call.shape.value_dim)  # no rows, but part of the graph
        return call.scaled(y), None if memory is None else memory.extended(call.new_tokens)
    placed = _placed(call)
    y, state = body(call, placed)
    y = call.scaled(y if placed.place is None else taken(y, placed.place))
    if memory is None:
        return y, None
    assert isinstance(memory, WindowedSums)
    opening = memory.opening if placed.opening is None else placed.opening.opening
    return y, memory.after(call.new_tokens, placed.held, opening, memory.state if state is None else state)


def _by_kernels(call: Call, placed: _Placed) -> tuple[Tensor, Tensor | None]:
    bound, shape = call.bound, call.shape
    beyond, state = placed.q.new_zeros(shape.batch, shape.heads, shape.queries, shape.value_dim + 1), None
    level = None
    if placed.far.length:
        beyond, state = _summed(call, placed)
        beyond = _times(beyond, far_of(bound).weight.to(beyond).view(1, -1, 1, 1))
    if placed.opening is not None:
        exact = _opened(call, placed, placed.opening)
        height = exact.top.clamp_min(0)
        found = torch.cat([exact.total, exact.mass], -1)
        beyond = _times(found, (exact.top - height).exp()) + _times(beyond, (-height).exp())
        level = height.squeeze(-1)
    fused = call.fused
    if fused is None or call.raw is None or placed.moved:
        fused, q, k, v = Fused(), placed.q, placed.held.k.to(placed.q), placed.held.v.to(placed.q)
    else:
        q, k, v = call.raw[:3]
    code = tile.code_of(bound.link)
    assert code is not None
    scale = tile.scale_of(fused, shape.heads, q.device)
    bias = placed.held.key_bias
    col = None if bias is None else bias.repeat_interleave(bound.groups, 1)
    inputs = WindowInputs(q, k, v, scale, tile.rows_of(call, code), beyond, level, placed.held.mask, col)
    spec = TileSpec(code, "row", fused.normalise, left=call.tags.window - 1, inference=not recorded(inputs))
    return local_global(inputs, spec)[0], state


def _times(x: Tensor, factor: Tensor) -> Tensor:
    """x * factor, in place where no gradient needs x: a fresh buffer of this size takes longer than the product."""
    return x * factor if recorded((x, factor)) else x.mul_(factor)


def _summed(call: Call, placed: _Placed) -> tuple[Tensor, Tensor | None]:
    """Sums before the window, (B, H, T, P + 1), and with a memory the state after the keys that have left it."""
    far, memory, queries = far_of(call.bound), placed.memory, call.shape.queries
    code, features = known(far.bound.link)
    keys = placed.far
    fused = far.bound.score.fused(call.shape.dim, far.bound.score_params, None)
    if fused is not None and fused.normalise:  # the same for vectors of any length
        q, k = placed.q, keys.k.to(placed.q)
    else:
        fused, (q, k) = Fused(), _prepared(far, placed.q, keys.k.to(placed.q))
    beyond = replace(call, bound=far.bound, coefficients=far.bound.coefficients.to(call.coefficients))
    rows, monomials = link_numbers(beyond, code)
    initial = None if memory is None or memory.count == 0 else memory.state
    before = None if initial is None or memory is None else initial.new_full((q.shape[0],), memory.count).double()
    scale = tile.scale_of(fused, rows.shape[0], q.device)
    v = F.pad(keys.v.to(placed.q), (0, 1), value=1.0)
    given = SumsInputs(q, k, v, scale, rows, monomials, initial, before, key_bias=keys.key_bias)
    spec = SumsSpec(
        code, features.degree, features.lowest, "raw", fused.normalise, memory is not None,
        learned=beyond.coefficients.shape[0],
    )  # fmt: skip
    # these keys end before the window of the last query, which sees all of them; each query before it sees one less
    seen = visibility(queries, keys.length, (), causal=True, include_self=True, key_padding_mask=keys.mask)
    y, _, final, _ = run_kernel(sums, summed, given, seen, spec)
    return y, final if spec.keeps else None


def _prepared(far: Far, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of the far kernel, by the kernel of features where it has the map."""
    dim = q.shape[-1]
    layers = layers_for(far.bound, dim, None, q.device.type, q.dtype)
    if layers is None or layers[0].left:  # those that are products stay products only in a call of their own
        return far.queries(q), far.keys(k)
    return made(q, layers[0].scaled_input(dim**0.25)), made(k, layers[1].scaled_input(dim**-0.25))


def _by_torch(call: Call, placed: _Placed) -> tuple[Tensor, Tensor | None]:
    near = _banded(call, placed)
    if placed.opening is not None:
        near = Row().combine(near, _opened(call, placed, placed.opening), log=True)
    beyond, state = _scanned(call, placed)
    return merged(near, beyond, far_of(call.bound).weight), state


def _placed(call: Call) -> _Placed:
    held, memory, q = call.new_tokens, cast(WindowedSums | None, call.memory), call.q
    require_summed("attention", held)
    if memory is not None:
        check_memory(call, memory)
        held = memory.followed(held)
    held, order = packed(held)
    place = None
    if order is not None:
        first = held.length - call.shape.queries
        # what stands at padding is any query, and its result is not used
        q = taken(q, (order[:, first:] - first).clamp_min(0))
        place = (order.argsort(1)[:, first:] - first).clamp_min(0)
    far, opening, first = held.span(0, max(held.length - call.tags.window, 0)), None, far_of(call.bound).first
    if first and far.length:
        opening = opened(None if memory is None else memory.opening, far, first)
        far = opening.rest
    return _Placed(q, held, far, opening, memory, place)


def _opened(call: Call, placed: _Placed, opening: Leaving) -> State:
    """Sums over the first tokens, for queries whose window they have left."""
    queries, held = call.shape.queries, placed.held.length
    until = torch.arange(held - queries, held, device=opening.place.device) - call.tags.window
    return met(placed.q, opening.opening, opening.place[:, None] <= until[:, None])


def _scanned(call: Call, placed: _Placed) -> tuple[Tensor, Tensor | None]:
    """Sums before the window, (B, H, T, P + 1), and with a memory the state after the keys that have left it."""
    far, memory, (batch, heads, queries, _, _, value_dim) = far_of(call.bound), placed.memory, call.shape
    if not placed.far.length:
        return placed.q.new_zeros(batch, heads, queries, value_dim + 1), None
    features = powers_of(far.bound.link)
    dtype = placed.q.dtype if memory is None else torch.promote_types(placed.q.dtype, memory.form.statistics)
    k, v = with_mass(True, placed.far, dtype)
    late = min(queries, placed.far.length)
    q, k = far.queries(placed.q[:, :, queries - late :].to(dtype)), far.keys(k)
    state = None if memory is None or memory.count == 0 else memory.state.to(v)
    shape = batch, heads, placed.far.length, k.shape[3], v.shape[3]
    job = Job(
        features, far.bound.link, Rule(True, True, None, placed.far.length - late), far.bound.groups,
        block_size(features, shape, memory is None), memory is not None,
    )  # fmt: skip
    total, final = scan(q, k, v, far.bound.coefficients.to(q), None, state, job)
    return total if late == queries else F.pad(total, (0, 0, queries - late, 0)), final


def _banded(call: Call, placed: _Placed) -> State:
    """Sums over the window of each query, by blocks of queries and the keys that any of them sees."""
    window, groups, queries, held = call.tags.window, call.bound.groups, call.shape.queries, placed.held
    block = max(window, _FEWEST)
    count, reach = -(-queries // block), window - 1
    # the keys of the first block begin ``reach`` before its first query, those of the last may end after the last key
    first = held.length - queries - reach
    before, after = max(-first, 0), count * block - queries
    held = held.silent().span(max(first, 0), held.length)

    def blocks(x: Tensor, axis: int) -> Tensor:
        """x with its tokens (last axis but ``axis``) in overlapping blocks, (…, blocks, …, block + reach)."""
        padding = (0, 0) * axis + (before, after)
        return F.pad(x, padding).unfold(-1 - axis, block + reach, block)

    q = F.pad(placed.q, (0, 0, 0, after)).unflatten(2, (count, block)).unflatten(1, (-1, groups))
    k, v = (blocks(x.to(q), 1).unsqueeze(2) for x in (held.k, held.v))
    score = q @ k
    if held.key_bias is not None:
        score = score + blocks(held.key_bias.to(score), 0)[:, :, None, :, None]
    real = held.mask if held.mask is not None else held.k.new_ones(1, held.length, dtype=torch.bool)
    i, j = torch.arange(block)[:, None], torch.arange(block + reach)
    seen = ((j >= i) & (j <= i + reach)).to(score.device) & blocks(real, 0)[:, None, None, :, None]
    near = near_sums(score.masked_fill(~seen, float("-inf")), v.mT)
    return State(*(x.flatten(3, 4).flatten(1, 2)[:, :, :queries] for x in near))


__all__ = ["by_torch", "compiled", "refusal"]
