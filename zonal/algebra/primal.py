"""Anchors that solve, in primal form: Cholesky factors, the norm of a Koopman step, and ridges that decay."""

import torch
from torch import Tensor

from zonal.algebra.declaration import require_values
from zonal.algebra.prior import Visibility
from zonal.errors import NonFiniteError

ITERATIONS = 6
"""Number of power iterations in ``contraction``, as in the Echo paper."""


def factorised(matrix: Tensor, who: str) -> Tensor:
    """Lower Cholesky factor, with an error that says what to change when the matrix is not positive definite."""
    lower, info = torch.linalg.cholesky_ex(matrix)
    require_values(
        (info == 0).all(),
        f"{who}: kernel + ridge is not positive definite in {matrix.dtype} (or not finite). Raise the ridge, use "
        "float64, choose a positive definite kernel, or, with a decay, let the past decay more slowly.",
        NonFiniteError,
    )
    return lower


@torch.no_grad()
def contraction(gram: Tensor, shift: Tensor, who: str) -> Tensor:
    """1 / max(1, s) (…), with s the largest singular value of L^-1 M L^-T by six power iterations.

    gram = L L^T with its ridge, and M (…, r, r). s < 1 for all keys, so the result is 1: X = L^-1 [z_1 … z_n] and Y =
    L^-1 [0, z_1 … z_{n-1}] have norms below one, and the step is X Y^T. No gradient flows. Source: Echo, eq. 12.
    """
    if gram.shape[-1] == 0:
        return gram.new_ones(gram.shape[:-2])
    lower = factorised(gram, who)
    x = torch.ones_like(gram[..., :1]) / gram.shape[-1] ** 0.5

    def step(x: Tensor, matrix: Tensor) -> Tensor:
        x = torch.linalg.solve_triangular(lower.mT, x, upper=True)
        return torch.linalg.solve_triangular(lower, matrix @ x, upper=False)

    for _ in range(ITERATIONS):
        x = step(step(x, shift), shift.mT)
        x = x / x.norm(dim=-2, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    return 1 / step(x, shift).norm(dim=-2)[..., 0].clamp_min(1)


def on_heads(powers: tuple[int, ...], step: int, device: torch.device) -> Tensor | None:
    """Which heads apply Koopman step number ``step`` (from 0): bool (H,), or None for all."""
    if step < min(powers):
        return None
    return torch.tensor([step < power for power in powers], device=device, dtype=torch.bool)


def after_step(powers: tuple[int, ...], step: int, further: Tensor, x: Tensor) -> Tensor:
    """``further`` (B, H, …) of the heads that apply Koopman step number ``step``, and x of the others."""
    which = on_heads(powers, step, x.device)
    return further if which is None else torch.where(which.view(1, -1, *[1] * (x.ndim - 2)), further, x)


def fading_weights(
    q: Tensor, k: Tensor, log_decay: Tensor, ridge: Tensor, powers: tuple[int, ...], visibility: Visibility
) -> Tensor:
    """W (B, H, T, S) of a ridge or Koopman read-out with decay, token by token: the definition.

    From G = rho I, M = 0, C = 0, each real token with rate l_t = exp(log_decay) in (0, 1] updates
    G <- l_t G + z_t z_t^T + r rho (1 - l_t) e e^T, M <- l_t M + z_t z_{t-1}^T and C <- l_t C + v_t z_t^T. Here e is the
    unit vector number (t mod r): a pseudo-key that restores the decayed ridge, one direction per step. Then y = C x
    with x = G^-1 (M G^-1)^power q.

    q (B, H, T, r), k (B, H, S, r), log_decay (B or 1, H, S), 0 on padding; ridge rho (H,); powers: per head.
    """
    batch, heads, keys, r = k.shape
    queries = q.shape[2]
    if not (keys and queries and r):
        return q @ k.mT
    mask = visibility.key_mask
    real = torch.ones(batch, keys, dtype=torch.bool, device=k.device) if mask is None else mask
    z = k.masked_fill(~real[:, None, :, None], 0)
    decay = log_decay.expand(batch, -1, -1)
    running = decay.cumsum(-1)
    rates = decay.exp().to(k)
    eye = torch.eye(r, dtype=k.dtype, device=k.device)
    rho = ridge.to(k).view(1, -1, 1, 1)
    starts = {0} if visibility.edges is None else set(visibility.edges.tolist())
    grams, shifts = [], []
    gram = shift = before = seen = z.new_zeros(0)
    for s in range(keys):
        if s in starts:
            gram, shift = (rho * eye).expand(batch, heads, r, r), z.new_zeros(batch, heads, r, r)
            before, seen = z.new_zeros(batch, heads, r), torch.zeros(batch, dtype=torch.int64, device=k.device)
        rate, key = rates[:, :, s, None, None], z[:, :, s]
        pseudo = eye[seen % r][:, None, :, None] * eye  # (B, 1, r, r): e e^T
        gram = rate * gram + key[..., :, None] * key[..., None, :] + r * rho * (1 - rate) * pseudo
        shift = rate * shift + key[..., :, None] * before[..., None, :]
        before = torch.where(real[:, None, s, None], key, before)
        seen = seen + real[:, s]
        grams.append(gram)
        shifts.append(shift)
    last = (visibility.hi - 1).clamp(0, keys - 1).to(k.device)  # of the keys that each query sees
    lower = factorised(torch.stack(grams, 2)[:, :, last], "attention")
    moved = torch.stack(shifts, 2)[:, :, last]
    x = torch.cholesky_solve(q.unsqueeze(-1), lower)
    for step in range(max(powers)):
        x = after_step(powers, step, torch.cholesky_solve(moved @ x, lower), x)
    faded = running[:, :, last, None] - running[:, :, None, :]
    visible = visibility.tile(0, queries, 0, keys, k.device)
    weights = x[..., 0] @ z.mT
    if visible is None:
        return weights * faded.exp().to(k)
    return (weights * faded.masked_fill(~visible, 0).exp().to(k)).masked_fill(~visible, 0)


__all__ = ["ITERATIONS", "after_step", "contraction", "factorised", "fading_weights", "on_heads"]
