"""What calls of ``zonal.attention`` in many shapes share: their tensors, and their results with gradients."""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import zonal
from zonal import Memory, Operator

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Shape:
    """Sizes, and who sees whom. cuts: where the call is cut in pieces that hand on a memory. decay, bias: what tokens
    fade by and count.

    level: of values that differ little, so that gradients through a row's sum are small beside what they are
        differences of.
    """

    queries: int = 43
    keys: int = 43
    key_dim: int = 6
    value_dim: int = 5
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    causal: bool = True
    padding: bool = False
    packed: tuple[int, ...] = ()
    strided: bool = False
    cuts: tuple[int, ...] = ()
    decay: bool = False
    bias: bool = False
    level: float = 0.0
    lengths: tuple[float, ...] = ()  # that vectors of q and k take in turns


@dataclass
class Inputs:
    """Tensors of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    edges: Tensor | None
    operator: Operator
    log_decay: Tensor | None = None
    key_bias: Tensor | None = None

    def to(self, dtype: torch.dtype, device: str) -> "Inputs":
        def moved(x: Tensor) -> Tensor:
            there = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=device)
            return there.copy_(x.detach()).requires_grad_()

        own = copy.deepcopy(self.operator).to(device)
        return Inputs(
            moved(self.q), moved(self.k), moved(self.v), None if self.mask is None else self.mask.to(device),
            None if self.edges is None else self.edges.to(device), own.double() if dtype == torch.float64 else own,
            *(None if x is None else x.detach().to(device,
            torch.promote_types(dtype, torch.float32)).requires_grad_() for x in (self.log_decay, self.key_bias)),
        )  # fmt: skip


def drawing(
    rules: Shape, dtype: str, generator: torch.Generator, power: float = 0.0
) -> Callable[[int, int, int], Tensor]:
    """Draws (batch, heads, tokens, dim), normal numbers over dim^power."""

    def draw(heads: int, tokens: int, dim: int) -> Tensor:
        if rules.strided:  # every axis has a stride of its own
            x = torch.randn(rules.batch, tokens, heads, 2 * dim, generator=generator)[..., ::2].transpose(1, 2)
        else:
            x = torch.randn(rules.batch, heads, tokens, dim, generator=generator)
        return (x / dim**power if power else x).to(DTYPES[dtype])

    return draw


def padded(rules: Shape, generator: torch.Generator) -> Tensor | None:
    """A mask whose first queries see nothing, where the shape has one."""
    if not rules.padding:
        return None
    mask = torch.rand(rules.batch, rules.keys, generator=generator) > 0.3
    mask[0, :4] = False
    return mask


def edges(rules: Shape) -> Tensor | None:
    return torch.tensor(rules.packed, dtype=torch.int32) if rules.packed else None


@torch.no_grad()
def learned(operator: Operator, rules: Shape, generator: torch.Generator) -> Operator:
    """The operator for the heads of a shape; what it learns is away from where it begins."""
    operator = operator.for_heads(rules.heads, rules.kv_heads)
    for parameter in operator.parameters():
        parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return operator


def empty(rules: Shape, data: Inputs) -> Memory:
    return Memory.empty(
        data.operator, rules.batch, rules.kv_heads, rules.key_dim, rules.value_dim, dtype=data.q.dtype,
        device=data.q.device, kind="decayed" if rules.decay else None,
    )  # fmt: skip


def in_pieces(rules: Shape, data: Inputs, path: str) -> tuple[Tensor, Memory]:
    """y of pieces that hand on a memory, and what it is in the end."""
    memory, parts = empty(rules, data), []
    for part in itertools.starmap(slice, itertools.pairwise(rules.cuts)):
        mask, log_decay, key_bias = (
            None if x is None else x[..., part] for x in (data.mask, data.log_decay, data.key_bias)
        )
        y, memory = zonal.attention(
            *(x[:, :, part] for x in (data.q, data.k, data.v)), data.operator, memory=memory, causal=rules.causal,
            path=path, key_padding_mask=mask, log_decay=log_decay, key_bias=key_bias,
        )  # fmt: skip
        parts.append(y)
    return torch.cat(parts, 2), memory


def at_once(rules: Shape, data: Inputs, path: str) -> Tensor:
    """y of one call."""
    return zonal.attention(
        data.q, data.k, data.v, data.operator, causal=rules.causal, path=path, key_padding_mask=data.mask,
        cu_seqlens=data.edges, log_decay=data.log_decay, key_bias=data.key_bias,
    )  # fmt: skip


def with_gradients(data: Inputs, results: Sequence[Tensor]) -> list[Tensor]:
    """Results, and the gradients of a weighted sum of them with respect to q, k, v, decays, biases and what the
    operator learns.
    """
    generator, loss = torch.Generator().manual_seed(1), 0.0
    for x in results:
        weight = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
        loss = loss + (x.double() * weight).sum()
    given = [x for x in (data.log_decay, data.key_bias) if x is not None]
    leaves = [data.q, data.k, data.v, *given, *data.operator.parameters()]
    found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return [x.detach().cpu() for x in (*results, *found)]


def by_path(rules: Shape, data: Inputs, path: str, cut: str) -> list[Tensor]:
    """y and its gradients: with respect to q, k, v and what the operator learns.

    In pieces that hand on a memory where the shape says so and the path is ``cut``.
    """
    y = in_pieces(rules, data, path)[0] if rules.cuts and path == cut else at_once(rules, data, path)
    return with_gradients(data, [y])


def further(
    call: str, dtype: str, data: Inputs, got: Sequence[Tensor], truth: Sequence[Tensor], allowed: Callable[[str], float]
) -> str | None:
    """Where results and gradients are further from the truth than ``allowed`` of their names and rounding to ``dtype``,
    both relative to their size; None if nowhere.
    """
    names = ["y", "dq", "dk", "dv"]
    for index, (a, t) in enumerate(zip(got, truth, strict=True)):
        name = names[index] if index < len(names) else f"parameter {index - len(names)}"
        if a.shape != t.shape or not bool(torch.isfinite(a).all()):
            return f"{call}: {name} is {tuple(a.shape)}, finite: {bool(torch.isfinite(a).all())}"
        most = allowed(name)
        if dtype != "float32":
            # weights are rounded for their product with values, and what a row's sum takes out of gradients comes from
            # them
            most += (1 if name == "y" else 4) * torch.finfo(DTYPES[dtype]).eps
        size = max(1.0, t.abs().max().item())
        # a gradient of a parameter sums over all rows
        most *= size * (data.q[..., 0].numel() ** 0.5 if index >= len(names) else 1.0)
        error = (a.double() - t).abs().max().item()
        if error > most:
            return f"{call}: {name} is off by {error:.3g}, {most:.3g} is allowed, of {size:.3g}"
    return None
