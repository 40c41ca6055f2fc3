"""MesaNet, Gated KalmaNet and Gated DeltaNet against Mamba-2 of the same width on a CPU, forward and with backward; a
decoder's step; memory.

All layers have heads of 64 keys and 64 channels. The ridge layer of this library, ``ska(power=0)``, is timed beside
them: it solves exactly what two of them solve by iteration. Parameters differ (Mamba-2 is twice as wide inside) and
stand in each row.
"""

import sys

import torch
from torch import Tensor

from benchmarks import common
from benchmarks.backbones import STEPS, decoding, timed
from zonal import mechanisms
from zonal.nn import Attention, GatedDeltaNet, GatedKalmaNet, Mamba2, MesaNet, TokenMixer

BATCH, LENGTH = 4, 1024
WIDTH = 256


def layers(width: int) -> dict[str, TokenMixer]:
    """The layers that are compared, by name."""
    return {
        "gated_deltanet": GatedDeltaNet(width), "mesanet": MesaNet(width), "gated_kalmanet": GatedKalmaNet(width),
        "ska": Attention(width, width // 64, operator=mechanisms.ska(power=0), conv=4),
    }  # fmt: skip


def gate(name: str, layer: TokenMixer, width: int) -> float:
    """The error of blocks in float32 against the whole in float64, on a length with ragged blocks."""
    x = torch.randn(1, 333, width)
    with torch.no_grad():
        for parameter in layer.parameters():  # a projection that starts at zero would hide what is before it
            if not parameter.any():
                parameter.normal_(0.0, 0.02)
        y = layer(x)
        exact = layer.double()(x.double(), path="dense")
    layer.float()
    assert isinstance(y, Tensor)
    assert isinstance(exact, Tensor)
    return common.gate(name, y, exact, 1e-3)


def measured(
    name: str, layer: TokenMixer, peer: Mamba2, width: int, device: torch.device, pairs: int
) -> dict[str, object]:
    """One row, checked first."""
    row: dict[str, object] = {"width": width, "layer": name, "error": gate(name, layer, width)}
    x = torch.randn(BATCH, LENGTH, width)
    for kind, gradients in (("forward", False), ("training", True)):
        row[kind] = common.compare(
            timed(layer, x, gradients), timed(peer, x, gradients), device, pairs=pairs, budget=4
        ).to_dict()
    row["decoding"] = common.compare(
        decoding(layer, width), decoding(peer, width), device, pairs=pairs, budget=3
    ).to_dict()
    row["memory_bytes"], row["parameters"] = layer.memory_bytes(LENGTH), sum(p.numel() for p in layer.parameters())
    return row


def line(row: dict[str, object]) -> str:
    """One row for people."""

    def part(kind: str) -> str:
        found = row[kind]
        assert isinstance(found, dict)
        return f"{found['ratio']['median']:.2f} ({found['subject']['median'] * 1e3:.1f} ms)"

    return (
        f"width {row['width']}, {row['layer']}: of Mamba-2, forward {part('forward')}, with backward "
        f"{part('training')}, {STEPS} tokens decoded {part('decoding')}"
    )


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 0 when it ran."""
    run = common.Run(
        common.parser(__doc__ or "", "relatives", by_machine=True).parse_args(argv),
        only_cpu="the layers are compared on the CPU",
    )
    options, device = run.options, run.device
    rows: list[dict[str, object]] = []
    width = 64 if options.quick else WIDTH
    peer = Mamba2(width, state=64)
    for name, layer in layers(width).items():
        rows.append(measured(name, layer, peer, width, device, 2 if options.quick else 7))
        print(line(rows[-1]), flush=True)
    summary = {
        "mamba2_parameters": sum(p.numel() for p in peer.parameters()),
        "mamba2_memory_bytes": peer.memory_bytes(LENGTH),
    }
    settings = {"B": BATCH, "T": LENGTH, "state": 64, "head_dim": 64, "dtype": "float32"}
    run.write(rows, summary, settings, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
