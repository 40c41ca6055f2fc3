"""Mamba-2 and Mamba-3 against transformers' Mamba-2 with the same weights on a CPU, forward and with backward; the
recurrence alone; a decoder's step.

The peer is ``Mamba2Mixer`` of transformers as it runs without CUDA, at the widths of Echo's models (50M: 448, 180M:
768) and of a small one. Both layers spend their time in the same two projections and in the recurrence between them;
``scan`` times the recurrence alone: transformers' ``mamba2_chunk_scan`` against ``zonal.attention`` on equal inputs.
The share of a forward that two bare matrix products of the projections' shapes take is ``projections``: what no
implementation can go below.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zonal
from benchmarks import common
from zonal import store
from zonal.errors import ArgumentError
from zonal.nn import Mamba2, Mamba3, TokenMixer
from zonal.nn.recurrence import ssd

LENGTH = 2048
# (width, state): heads of 64 channels, expand 2, one group
SHAPES = ((128, 64), (448, 64), (768, 128))
STEPS = 64


def peer(width: int, state: int) -> Any:
    """transformers' mixer. Raises: ArgumentError when transformers is not installed."""
    try:
        from transformers import Mamba2Config
        from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
    except ImportError as error:
        raise ArgumentError(
            f"bench: backbones are measured against transformers, which is not installed ({error}). pip install "
            "transformers."
        ) from error
    config = Mamba2Config(
        hidden_size=width, num_heads=2 * width // 64, head_dim=64, n_groups=1, state_size=state, num_hidden_layers=1
    )
    return Mamba2Mixer(config, 0)


def gate(layer: Mamba2, other: Any, width: int) -> dict[str, float]:
    """Errors of the layer against the peer in float64: outputs and the gradient of the input, on a length with ragged
    blocks.
    """
    x = torch.randn(1, 777, width, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    expected = Mamba2(width, state=layer.sizes.state).double()
    expected.load_transformers(other.state_dict())
    wanted = expected(exact, path="dense")
    wanted.square().sum().backward()
    y, theirs = layer(x), other(x)
    assert isinstance(y, Tensor)
    assert isinstance(wanted, Tensor)
    assert exact.grad is not None
    found = {
        name: common.gate(name, result.detach(), wanted.detach(), 1e-4)
        for name, result in (("ours", y), ("theirs", theirs))
    }
    for name, result in (("ours", y), ("theirs", theirs)):
        gradient = torch.autograd.grad(result.square().sum(), x)[0]
        found[f"{name}_gradient"] = common.gate(f"{name}: gradient", gradient, exact.grad, 1e-4)
    return found


def timed(layer: Callable[[Tensor], Any], x: Tensor, gradients: bool) -> Callable[[], object]:
    """Forward alone, or with the gradients of all weights, and of x where it asks for one."""

    def work() -> object:
        if gradients:
            layer(x).sum().backward()
            return None
        with torch.no_grad():
            return layer(x)

    return work


def scans(layer: Mamba2, other: Any, gradients: bool) -> tuple[Callable[[], object], Callable[[], object]]:
    """The recurrence alone, ours and the peer's, on equal inputs."""
    from transformers.models.mamba2 import modeling_mamba2

    sizes = layer.sizes
    shapes = ((sizes.heads, sizes.head_dim), (1, sizes.state), (1, sizes.state), (sizes.heads,))
    x, b, c, raw = (torch.randn(1, LENGTH, *shape, requires_grad=gradients) for shape in shapes)
    operator, rate, bias = ssd(), layer.log_rate.detach().exp(), layer.step_bias.detach()

    def ours() -> Tensor:
        step = F.softplus(raw + bias)
        y = zonal.attention(
            sizes.by_head(c.flatten(2)), sizes.by_head(b.flatten(2)), (x * step.unsqueeze(-1)).transpose(1, 2),
            operator, causal=True,
            log_decay=-(step * rate).transpose(1, 2),
        )  # fmt: skip
        return y.transpose(1, 2)

    def theirs() -> Tensor:
        return modeling_mamba2.mamba2_chunk_scan(x, raw, -rate, b, c, other.chunk_size, dt_bias=bias, dt_softplus=True)

    common.gate("scan", ours().detach(), theirs().detach().double(), 1e-4)

    def work(run: Callable[[], Tensor]) -> Callable[[], object]:
        return (lambda: torch.autograd.grad(run().sum(), [x, b, c, raw])) if gradients else run

    return work(ours), work(theirs)


def projections(layer: Mamba2, x: Tensor) -> Callable[[], object]:
    """The two matrix products of a forward, bare."""
    inner = torch.randn(1, x.shape[1], layer.sizes.inner)

    def work() -> object:
        with torch.no_grad():
            return layer.input(x), layer.output(inner)

    return work


def decoding(layer: TokenMixer, width: int) -> Callable[[], object]:
    """``STEPS`` tokens, one at a time."""
    pieces = torch.randn(1, STEPS, width).split(1, dim=1)

    def work() -> object:
        with torch.no_grad():
            memory = layer.empty_memory(1)
            for piece in pieces:
                _, memory = layer(piece, memory=memory)
        return memory

    return work


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 0 when it ran."""
    parser = common.parser(__doc__ or "", "backbones", "resume", by_machine=True)
    parser.add_argument("--rows", type=int, default=None, help="measure at most so many rows (default: all)")
    run = common.Run(
        parser.parse_args(argv), only_cpu="the peer's own kernels are for CUDA and are not part of this benchmark"
    )
    options, device = run.options, run.device
    import transformers

    settings = {"B": 1, "T": LENGTH, "head_dim": 64, "expand": 2, "groups": 1, "dtype": "float32"}
    rows = common.kept(options.out, options.resume, settings, device)
    errors = dict(store.read_json(options.out)["summary"]["errors"]) if rows else {}
    wanted = [
        (width, state, gradients)
        for width, state in (SHAPES[:1] if options.quick else SHAPES)
        for gradients in (False, True)
    ]
    missing = [key for key in wanted if key not in [(row["width"], row["state"], row["gradients"]) for row in rows]]
    for width, state, gradients in missing[: options.rows]:
        rows.append(measured(width, state, gradients, errors, device, 3 if options.quick else 7))
        print(line(rows[-1]), flush=True)
        run.write(rows, {"errors": errors, "transformers": transformers.__version__}, settings, options.out)
    return 0


def measured(
    width: int, state: int, gradients: bool, errors: dict[str, Any], device: torch.device, pairs: int
) -> dict[str, Any]:
    """One row; the errors of its width are added to ``errors``."""
    other = peer(width, state)
    layer, third = Mamba2(width, state=state), Mamba3(width, state=state)
    layer.load_transformers(other.state_dict())
    errors[str(width)] = gate(layer, other, width)
    x = torch.randn(1, LENGTH, width, requires_grad=gradients)
    row: dict[str, Any] = {"width": width, "state": state, "T": LENGTH, "gradients": gradients}
    works = timed(layer, x, gradients), timed(other, x, gradients), timed(third, x, gradients)
    row["layer"] = common.compare(works[0], works[1], device, pairs=pairs, budget=10).to_dict()
    row["scan"] = common.compare(*scans(layer, other, gradients), device, pairs=pairs, budget=8).to_dict()
    row["mamba3"] = common.compare(works[2], works[1], device, pairs=pairs, budget=10).to_dict()
    if not gradients:
        row["projections"] = common.compare(projections(layer, x), works[1], device, pairs=pairs, budget=4).to_dict()
        for name, one in (("decode", decoding(layer, width)), ("decode_mamba3", decoding(third, width))):
            times = common.interleaved({name: one}, device, rounds=3, budget=2)[name]
            row[f"{name}_microseconds"] = round(common.Quantiles.of(times).median / STEPS * 1e6, 1)
        row["memory_bytes"], row["mamba3_memory_bytes"] = layer.memory_bytes(LENGTH), third.memory_bytes(LENGTH)
    return row


def line(row: dict[str, Any]) -> str:
    """One row for people."""

    def ratio(key: str) -> str:
        return common.ratio_text(row.get(key), 2)

    kind = "forward+backward" if row["gradients"] else "forward"
    step = (
        f"; a decoder's step {row['decode_microseconds']} µs, Mamba-3 {row['decode_mamba3_microseconds']} µs"
        if "decode_microseconds" in row
        else ""
    )
    return (
        f"width {row['width']}, state {row['state']}, {kind}: layer {ratio('layer')} of transformers, scan alone "
        f"{ratio('scan')}, "
        f"Mamba-3 {ratio('mamba3')}, bare projections {ratio('projections')}{step}"
    )


if __name__ == "__main__":
    sys.exit(main())
