"""Other libraries that compute the same attention, behind one signature: f(q, k, v, causal) -> y, all (B, H, T, D).

KeOps reduces a symbolic formula of q_i, k_j and v_j without writing the T x T matrix. FlexAttention compiles a softmax
kernel around a function of the score; log K as that function makes it exactly K under row sums. What a library needs
once (compiling, tables of blocks) is made at the first call of a shape and kept, so that it stays outside of what is
timed.
"""

import functools
import hashlib
import importlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import common
from zonal import cache, mechanisms

# of the operator that the rows are about
EPS: float = mechanisms.yat().link.eps  # type: ignore[attr-defined]
Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]

# KeOps builds for any x86 as it comes. These let the compiler use this machine's vectors and add a dot product in
# another order. Not -ffast-math: the library it makes would switch subnormal numbers off for the whole process, the
# subject included.
KEOPS_FLAGS = "-march=native -fno-math-errno -fno-trapping-math -fno-signed-zeros -fassociative-math"
# keys of a block before the diagonal are summed without a mask
KEOPS_BLOCK = 64


class PeerMissingError(Exception):
    """The peer cannot run here; the message says what to install."""


@dataclass(frozen=True)
class Peer:
    """A library's attention. how: how it is called here, for the row. attend: see the module."""

    name: str
    version: str
    how: str
    attend: Attend


def _imported(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PeerMissingError(
            f"the package {package} cannot be imported ({error}); pip install -e '.[bench]' -c constraints.txt"
        ) from error


def _need_compiler(who: str) -> None:
    if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name):
        raise PeerMissingError(f"{who} compiles C++ when it runs and there is no compiler here; install g++ or set CXX")


@functools.lru_cache(maxsize=8)
def _keops_blocks(heads: int, tokens: int, causal: bool) -> list[tuple[Tensor, ...]]:
    """KeOps' sparsity patterns over heads x tokens flattened: of what is seen whole, and (causal) of the diagonal
    blocks.

    A pattern: queries of each block, how many key ranges it has, the key ranges, then the same for the blocks of keys.
    """
    block = KEOPS_BLOCK if causal else tokens
    # (start of the head, start of the block, its end, end of the head)
    cells = [
        (h * tokens, h * tokens + s, h * tokens + min(s + block, tokens), (h + 1) * tokens)
        for h in range(heads)
        for s in range(0, tokens, block)
    ]

    def table(pairs: list[tuple[int, int]]) -> Tensor:
        return torch.tensor(pairs, dtype=torch.int32)

    one_each = torch.arange(1, len(cells) + 1, dtype=torch.int32)
    own = table([(start, stop) for _, start, stop, _ in cells])
    if not causal:
        return [(own, one_each, own, own, one_each, own)]
    before, after = (
        table([(first, start) for first, start, _, _ in cells]),
        table([(stop, last) for _, _, stop, last in cells]),
    )
    return [(own, one_each, before, own, one_each, after), (own, one_each, own, own, one_each, own)]


def keops_yat() -> Peer:
    """Yat by KeOps: sum_j K_ij (v_j, 1), then the division by the last column.

    x is written as a product of a 1 x D matrix with a vector and K v as an outer product: their code is plain sums,
    which a compiler turns into vectors. The usual (q_i | k_j) and K * v_j run a chain of double-precision fused
    multiply-adds, many times slower. A causal call is two reductions, each with its block-sparse pattern: whole blocks
    before the diagonal, and diagonal blocks times step(i - j).
    """
    _need_compiler("KeOps")
    digest = hashlib.sha256(KEOPS_FLAGS.encode()).hexdigest()[:8]
    with common.environment(
        CXXFLAGS=KEOPS_FLAGS,
        KEOPS_CACHE_FOLDER=os.environ.get("KEOPS_CACHE_FOLDER", str(cache.cache_folder() / f"keops-{digest}")),
    ):
        pykeops = _imported("pykeops", "pykeops")
        lazy = _imported("pykeops.torch", "pykeops")
    pykeops.set_verbose(False)

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        batch, heads, tokens, _ = q.shape
        q, k = (F.normalize(x, dim=-1).flatten(0, 2) for x in (q, k))
        v1 = F.pad(v, (0, 1), value=1.0).flatten(0, 2)
        x = lazy.Vi(q).matvecmult(lazy.Vj(k))
        weight = x * x / (2 + EPS - 2 * x)
        blocks = _keops_blocks(batch * heads, tokens, causal)
        weights = [weight]
        if causal:
            place = torch.arange(len(q), dtype=torch.float32).view(-1, 1)
            weights.append(weight * (lazy.Vi(place) - lazy.Vj(place)).step())
        total: Tensor | float = 0.0
        for w, pattern in zip(weights, blocks, strict=True):
            terms = w.tensorprod(lazy.Vj(v1))
            terms.ranges = pattern
            total = total + terms.sum(dim=1)
        assert isinstance(total, Tensor)
        y = total.view(batch, heads, tokens, -1)
        return y[..., :-1] / y[..., -1:]

    how = f"LazyTensor, float32, block-sparse ranges (blocks of {KEOPS_BLOCK} where causal), CXXFLAGS {KEOPS_FLAGS}"
    return Peer("keops", pykeops.__version__, how, attend)


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


@functools.lru_cache(maxsize=8)
def _block_mask(tokens: int) -> Any:
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    return flex.create_block_mask(_causal, None, None, tokens, tokens, device="cpu")


def _flex(body: Callable[..., Tensor], how: str) -> Peer:
    """A peer of ``body(flex_attention, q, k, v, block_mask)``.

    Each needs code of its own: what torch compiles is kept by code, up to 8 programs.
    """
    _need_compiler("FlexAttention")
    flex_attention = importlib.import_module("torch.nn.attention.flex_attention").flex_attention
    # one program a length: with symbolic lengths it is slower, and a score function may not hold a number
    compiled = torch.compile(body, dynamic=False, fullgraph=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        if q.requires_grad or k.requires_grad or v.requires_grad:
            # a refusal comes from here: code whose compilation has failed once is run uncompiled ever after
            flex_attention(q[:, :, :1], k[:, :, :1], v[:, :, :1])
        return compiled(flex_attention, q, k, v, _block_mask(q.shape[2]) if causal else None)

    return Peer("flex", torch.__version__, f"torch.compile(dynamic=False, fullgraph=True), {how}", attend)


def flex_softmax() -> Peer:
    """FlexAttention as it comes: softmax, causal by a block mask."""

    def body(flex_attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return flex_attention(q, k, v, block_mask=mask)

    return _flex(body, "create_block_mask")


def flex_yat() -> Peer:
    """Yat as a softmax: the score function is log K(x), q and k are normalised inside the compiled function."""
    tiny = torch.finfo(torch.float32).tiny

    def log_yat(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.log(x * x / (2 + EPS - 2 * x) + tiny)

    def body(flex_attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return flex_attention(
            F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, score_mod=log_yat, block_mask=mask, scale=1.0
        )

    return _flex(body, "create_block_mask, score_mod = log K, F.normalize inside")


# (peer, operator)
PEERS: dict[tuple[str, str], Callable[[], Peer]] = {
    ("keops", "yat"): keops_yat,
    ("flex", "softmax"): flex_softmax,
    ("flex", "yat"): flex_yat,
}


@functools.cache
def load(name: str, operator: str) -> Peer:
    """The peer, made once. Raises: PeerMissingError."""
    return PEERS[name, operator]()
