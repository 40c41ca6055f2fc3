"""The sparse path: the 256 largest keys of each query found by hash tables, against exact attention by tiles and torch's fused attention.

Clustered inputs have queries and keys around 128 common centres, at two widths; unclustered ones are independent normal numbers. What is lost is measured on
some rows against all keys: the part of the attention mass and of the exact largest. Times are processor time, the least of a few turns, which a machine shared with other
work does not stretch. First of all the path is compared with the dense definition, with a
window that has every key.
"""

import functools
import itertools
import math
import time
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zonal
from benchmarks import common
from zonal import Operator
from zonal import mechanisms as m
from zonal.algebra.anchor import TopK
from zonal.algebra.search import LSH
from zonal.execution.coverage import measured

TOP, DIM, CENTRES = 256, 64, 128
# (noise beside centres of 1.2, the search for dot products); None: no centres
INPUTS = {"clusters, noise 0.3": (0.3, LSH(tables=14, bits=12, window=16)), "clusters, noise 0.4": (0.4, LSH(tables=24, bits=12, window=16)), "no clusters": (None, LSH(tables=24, bits=12, window=16))}
REWA_TEMPERATURE = 0.08


def draw(tokens: int, heads: int, noise: float | None, centres: int = CENTRES) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (1, heads, tokens, 64): every token around one of the centres, in no order."""
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = torch.randn(3, 1, heads, tokens, DIM, generator=generator).unbind(0)
    if noise is None:
        return 1.2 * q, 1.2 * k, v
    centre = 1.2 * torch.randn(1, heads, centres, DIM, generator=generator)
    base = centre.gather(2, torch.randint(centres, (1, heads, tokens, 1), generator=generator).expand(-1, -1, -1, DIM))
    return base + noise * q, base + noise * k, v


def operators(search: LSH) -> dict[str, tuple[Operator, Operator]]:
    """name -> (with the search, exact by tiles)."""
    rewa = m.rewa(temperature=REWA_TEMPERATURE)
    return {
        "softmax": (m.softmax().replace(anchor=TopK(TOP, search)), m.softmax()),
        "rewa": (rewa.replace(anchor=TopK(TOP, LSH(tables=search.tables))), rewa),
    }


@torch.no_grad()
def gated(device: torch.device) -> float:
    """The error against the definition where every key is met."""
    q, k, v = (x.to(device) for x in draw(600, 2, 0.4, 8))
    worst = 0.0
    for name, (operator, _) in operators(LSH(window=600)).items():
        whole = operator.replace(anchor=TopK(48, LSH(window=600)))
        exact = zonal.attention(q.double(), k.double(), v.double(), whole, causal=True, path="dense")
        worst = max(worst, common.gate(name, zonal.attention(q, k, v, whole, causal=True, path="sparse").double(), exact, 2e-4))
    return worst


def run(q: Tensor, k: Tensor, v: Tensor, operator: Operator) -> Tensor:
    return zonal.attention(q, k, v, operator, causal=True, path="sparse")


def measure(name: str, tokens: int, heads: int, device: torch.device, turns: int = 2) -> list[dict[str, Any]]:
    """A row for each kind of input. What meets every key takes the same time whatever the input, and is timed once, in turns with the sparse path on all of them."""
    drawn = {kind: [x.to(device) for x in draw(tokens, heads, noise)] for kind, (noise, _) in INPUTS.items()}
    searched = {kind: operators(search)[name][0] for kind, (_, search) in INPUTS.items()}
    exact, (q, k, v) = operators(LSH())[name][1], next(iter(drawn.values()))
    # torch's tiles of a product of distances take minutes: a part of the tokens tells the whole, which grows with the square
    part = min(tokens, 4096) if name == "rewa" else tokens
    works: dict[str, common.Work] = {
        "tiled": lambda: zonal.attention(q[:, :, :part], k[:, :, :part], v[:, :, :part], exact, causal=True, path="tiled"),
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        **{kind: functools.partial(run, *drawn[kind], searched[kind]) for kind in INPUTS},
    }
    with torch.no_grad():
        seconds = dict.fromkeys(works, math.inf)
        for turn in range(turns + 1):
            for work, run_once in works.items():
                before = time.process_time()
                run_once()
                if turn:  # the first warms up
                    seconds[work] = min(seconds[work], time.process_time() - before)
    seconds["tiled"] *= (tokens / part) ** 2
    rows = []
    for kind, operator in searched.items():
        found = measured(operator, *drawn[kind][:2], causal=True, rows=128)
        used = operator.anchor.search  # type: ignore[union-attr]
        rows.append(
            {
                "operator": name, "inputs": kind, "tokens": tokens, "heads": heads, "dim": DIM, "top": TOP, "tables": used.tables, "bits": used.bits,
                "seconds": {"sparse": seconds[kind], "tiled": seconds["tiled"], "sdpa": seconds["sdpa"]}, "tiled_from_tokens": part,
                "sparse_to_tiled": seconds[kind] / seconds["tiled"], "sparse_to_sdpa": seconds[kind] / seconds["sdpa"], **asdict(found),
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = common.parser(__doc__ or "", "sparse")
    parser.add_argument("--heads", type=int, default=1, help="heads of each call (default: %(default)s)")
    parser.add_argument("--tokens", default="32768,8192", help="lengths, by commas (default: %(default)s)")
    options = parser.parse_args()
    device = common.prepare(options)
    start = common.circumstances(device)
    error = gated(device)
    lengths, heads = ([512], 2) if options.quick else ([int(n) for n in options.tokens.split(",")], options.heads)
    settings = {"heads": heads, "top": TOP, "dim": DIM, "centres": CENTRES, "causal": True, "dtype": "float32", "clock": "processor time", "threads": torch.get_num_threads()}
    rows: list[dict[str, Any]] = []
    for name, tokens in itertools.product(("softmax", "rewa"), lengths):
        found = measure(name, tokens, heads, device)
        rows += found
        print(common.table([shown(row) for row in found], ["operator", "inputs", "tokens", "than tiled", "than SDPA", "mass", "of top 256", "recall", "met"]), flush=True)
        # after each, since the longest take minutes
        common.report(options.out, "sparse", (__doc__ or "").strip(), settings, rows, {**summary(rows), "gate_error": error}, start)


def shown(row: dict[str, Any]) -> list[str]:
    ratios = (f"{1 / row['sparse_to_tiled']:.2f}x", f"{1 / row['sparse_to_sdpa']:.2f}x")
    return [row["operator"], row["inputs"], str(row["tokens"]), *ratios, f"{row['mass']:.3f}", f"{row['exact_mass']:.3f}", f"{row['recall']:.2f}", f"{row['met']:.0f} of {row['seen']:.0f}"]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many times as fast as exact tiles softmax is at the greatest length, and the mass that is kept, by input."""
    own = [row for row in rows if row["operator"] == "softmax"]
    longest = [row for row in own if row["tokens"] == max(row["tokens"] for row in own)]
    return {"faster_than_tiled": {row["inputs"]: 1 / row["sparse_to_tiled"] for row in longest}, "mass": {row["inputs"]: row["mass"] for row in longest}}


if __name__ == "__main__":
    main()
