"""The one entry: prepare, plan, run, return."""

import torch
from torch import Tensor

from zonal.algebra import Operator
from zonal.errors import unknown_name
from zonal.execution import plan
from zonal.execution.call import Call, prepare
from zonal.execution.dense import dense
from zonal.execution.tiled import tiled


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operator: Operator,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    path: str = "auto",
    log_decay: Tensor | None = None,
    key_bias: Tensor | None = None,
) -> Tensor:
    """y_t = sum_s W_ts v_s for a declared operator (memory arguments follow)."""
    with torch.autocast(q.device.type, enabled=False):
        call = prepare(operator, q, k, v, causal=causal, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens, scale=scale,
                       log_decay=log_decay, key_bias=key_bias)
        chosen = plan.choose(call).path if path == "auto" else path
        return _run(call, chosen)


def _run(call: Call, path: str) -> Tensor:
    if path == "dense":
        return dense(call)
    if path == "tiled":
        return tiled(call)
    raise unknown_name("attention", "path", path, ("auto", *plan.PATHS))
