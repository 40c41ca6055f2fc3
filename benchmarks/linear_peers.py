"""Attention of other libraries whose cost grows linearly with T, and the exact Yat forms beside them: f(q, k, v,
causal) -> y, all (B, H, T, D).

Each comes with a float64 definition of what it computes, T x T and slow, and is checked against it: random features
against the same features multiplied out, not against the softmax they approximate (that error is printed, and is no
error of the library). Beside each stand operators of this library, checked against their dense float64 form: the one
that is nearest to what the peer computes, and squared-affine attention. All are timed in one process in turns, with
causal ``torch.nn.functional.scaled_dot_product_attention`` as the common measure. The file is written after every row,
and `--resume` goes on from it.
"""

import contextlib
import functools
import io
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zonal
from benchmarks import common, peers
from zonal import device_memory, mechanisms
from zonal.errors import ArgumentError

HEADS, DIM = 8, 32
FEATURES = 256  # of Performer, whose own default is D log D: 110 for D = 32
SQUARED = "squared_affine"
# Performer's: added to every feature, and (causal) to every sum of the keys' features; the second is far from nothing
# for the first tokens
FAVOR_EPS, FAVOR_SUM_EPS = 1e-4, 1e-6
# linear-attention-transformer's least denominator
LEAST = 1e-3


@dataclass(frozen=True)
class LinearPeer:
    """features: numbers a key becomes for each of its heads; None: none, all pairs are visited. definition: what it
    computes, for float64.

    nearest: the operator of this library that is nearest to it. room: bytes it takes at its peak for so many tokens,
        where that is many.
    """

    peer: peers.Peer
    features: int | None
    definition: peers.Attend
    nearest: str
    room: Callable[[int], int] = lambda tokens: 0


def _quietly_imported(name: str, package: str) -> Any:
    """Both libraries import what Python and torch have deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peers._imported(name, package)


def _visible(queries: int, causal: bool, bucket: int = 1) -> Tensor:
    """(T, T): keys of the query's own bucket and later ones are hidden; a bucket of one hides later keys only."""
    if not causal:
        return torch.ones(queries, queries, dtype=torch.bool)
    place = torch.arange(queries)
    return place[:, None] >= place if bucket == 1 else place[:, None] // bucket > place // bucket


def performer() -> LinearPeer:
    """Performer's FAVOR+: positive random features of the softmax kernel, orthogonal, drawn once from a fixed seed.

    Its causal form for a CPU keeps the T/128 x features x D running sums of a chunk; its other one is a CUDA kernel of
    another package.
    """
    library = _quietly_imported("performer_pytorch", "performer-pytorch")

    @functools.cache
    def module(dim: int, causal: bool) -> Any:
        with (
            torch.random.fork_rng(devices=[]),
            contextlib.redirect_stdout(io.StringIO()),
        ):  # it prints that there is no CUDA kernel
            torch.manual_seed(0)
            return library.FastAttention(dim_heads=dim, nb_features=FEATURES, causal=causal).requires_grad_(False)

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return module(q.shape[-1], causal)(q, k, v)

    def definition(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        projection = module(q.shape[-1], causal).projection_matrix.double()

        def features(x: Tensor, over: tuple[int, ...]) -> Tensor:
            x = x * x.shape[-1] ** -0.25
            exponent = x @ projection.mT
            exponent = exponent - x.square().sum(-1, keepdim=True) / 2 - exponent.amax(over, keepdim=True)
            return (exponent.exp() + FAVOR_EPS) * FEATURES**-0.5

        phi = features(q, (-1,))
        weight = (phi @ features(k, (-1, -2)).mT) * _visible(q.shape[2], causal)
        total = weight.sum(-1, keepdim=True) + (FAVOR_SUM_EPS * phi.sum(-1, keepdim=True) if causal else 0)
        return weight @ v / total

    how = f"FastAttention(nb_features={FEATURES}, causal=…), without its CUDA kernel"
    return LinearPeer(
        peers.Peer("performer", version("performer-pytorch"), how, attend),
        FEATURES,
        definition,
        f"performer(draws={FEATURES}, dim={DIM})",
    )


def linear_attention_transformer(bucket: int) -> LinearPeer:
    """softmax(q) times exp(k) as features. bucket: its blind spot, the past is summed for buckets of this many tokens
    and the own bucket is not seen; 1 is the library's default, sees the own token too, and keeps a D x D sum for every
    token.
    """
    library = _quietly_imported(
        "linear_attention_transformer.linear_attention_transformer", "linear-attention-transformer"
    )

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return library.causal_linear_attn(q, k, v, bucket_size=bucket) if causal else library.linear_attn(q, k, v)

    def definition(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        q = q.softmax(-1) * q.shape[-1] ** -0.5
        if not causal:
            return q @ k.softmax(-2).mT @ v
        weight = (q @ k.exp().mT) * _visible(q.shape[2], True, bucket)
        return weight @ v / weight.sum(-1, keepdim=True).clamp(min=LEAST)

    how = f"causal_linear_attn(bucket_size={bucket}), linear_attn"
    return LinearPeer(
        peers.Peer("linear-attention-transformer", version("linear-attention-transformer"), how, attend), DIM,
        definition, "linear",
        room=lambda tokens: 3 * 4 * HEADS * tokens // bucket * DIM * DIM,
    )  # fmt: skip


def _exact_yat(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return zonal.attention(q, k, v, mechanisms.yat(), causal=causal, path="dense")


def dense_yat() -> LinearPeer:
    """Yat as one writes it in torch, with the T x T matrix."""

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        x = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
        weight = x.square() / (2 + peers.EPS - 2 * x)
        if causal:
            weight = weight.tril()
        return weight @ v / weight.sum(-1, keepdim=True)

    return LinearPeer(
        peers.Peer("dense yat", torch.__version__, "torch, eager", attend),
        None,
        _exact_yat,
        "yat",
        room=lambda tokens: 4 * 4 * HEADS * tokens * tokens,
    )


def keops_yat() -> LinearPeer:
    return LinearPeer(peers.load("keops", "yat"), None, _exact_yat, "yat")


PEERS: dict[str, Callable[[], LinearPeer]] = {
    "performer": performer,
    "linear-attention-transformer": lambda: linear_attention_transformer(1),
    "linear-attention-transformer, blind spot 64": lambda: linear_attention_transformer(64),
    "dense yat": dense_yat,
    "keops yat": keops_yat,
}


def draw(tokens: int) -> list[Tensor]:
    """q, k, v with B = 1, H = 8, D = 32."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, tokens, DIM, generator=generator) for _ in range(3)]


def gate(name: str, found: LinearPeer, causal: bool) -> float:
    """Error against the peer's own definition at 256 tokens."""
    q, k, v = draw(256)
    return common.gate(
        name, found.peer.attend(q, k, v, causal), found.definition(q.double(), k.double(), v.double(), causal), 2e-5
    )


def gate_subject(spec: str, causal: bool) -> float:
    """Error of an operator of this library against its dense float64 form, on the path that it is timed on."""
    q, k, v = draw(1024)
    operator = mechanisms.resolve(spec)
    reference = zonal.attention(q.double(), k.double(), v.double(), operator, causal=causal, path="dense")
    return common.gate(
        f"{spec}, {'causal' if causal else 'bidirectional'}",
        zonal.attention(q, k, v, operator, causal=causal),
        reference,
        2e-5,
    )


def softmax_error(found: LinearPeer, causal: bool) -> float:
    """Mean distance from softmax attention as a share of its mean size, for q and k of unit variance over 1024
    tokens.
    """
    q, k, v = draw(1024)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
    return float((found.peer.attend(q, k, v, causal) - exact).norm(dim=-1).mean() / exact.norm(dim=-1).mean())


def main(argv: list[str] | None = None) -> int:
    """Check every peer that is installed, then print its time at each length."""
    parser = common.parser(__doc__ or "", "linear_peers", "budget", "only", "resume", budget=2.0, by_machine=True)
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[1024, 4096, 16384],
        help="lengths, multiples of 64 (default: 1024 4096 16384)",
    )
    run = common.Run(parser.parse_args(argv), only_cpu="these peers are set up for a CPU")
    options, device = run.options, run.device
    if any(tokens < 64 or tokens % 64 for tokens in options.tokens):
        raise ArgumentError(f"bench: --tokens must be multiples of 64, received {' '.join(map(str, options.tokens))}.")
    out = run.target
    settings = {
        "budget_seconds": options.budget,
        "batch": 1,
        "heads": HEADS,
        "dim": DIM,
        "dtype": "float32",
        "gradients": False,
    }
    rows = common.kept(out, options.resume, settings, device)
    there = {(row["peer"], row["tokens"], row["causal"]) for row in rows}
    with torch.no_grad():
        for name, make in PEERS.items():
            lengths = [128] if options.quick else options.tokens
            missing = [
                (causal, tokens)
                for causal in (True, False)
                for tokens in lengths
                if (name, tokens, causal) not in there
            ]
            if options.only not in name or not missing:
                continue
            try:
                found = make()
            except peers.PeerMissingError as error:
                print(f"no rows of {name}: {error}", flush=True)
                continue
            print(f"{name} {found.peer.version}, {found.features or 'no'} features: {found.peer.how}", flush=True)
            for causal, tokens in missing:
                errors = {"peer": gate(f"{name}, {'causal' if causal else 'bidirectional'}", found, causal)}
                errors |= {spec: gate_subject(spec, causal) for spec in dict.fromkeys((found.nearest, SQUARED))}
                rows.append(
                    {
                        **timed(name, found, tokens, causal, device, run.budget),
                        "errors": errors,
                    }
                )
                run.write(rows, {}, settings, out)
            if name == "performer" and not options.quick:
                print(
                    f"  distance from softmax: {softmax_error(found, True):.2f} causal, "
                    f"{softmax_error(found, False):.2f} bidirectional",
                    flush=True,
                )
    return 0


def timed(
    name: str, found: LinearPeer, tokens: int, causal: bool, device: torch.device, budget: float
) -> dict[str, Any]:
    """A row: seconds of all, and ratios of the peer to causal SDPA and of this library's operators to the peer, pair by
    pair.
    """
    kind = "causal" if causal else "bidirectional"
    row = {
        "peer": name, "peer_version": found.peer.version, "peer_how": found.peer.how, "features": found.features,
        "tokens": tokens, "causal": causal,
        "nearest": found.nearest,
    }  # fmt: skip
    needed, left = found.room(tokens), device_memory.free(device)
    if left is not None and needed > left:
        refused = f"takes {needed / 2**30:.0f} GiB, and {left / 2**30:.0f} GiB are free"
        print(f"  T={tokens} {kind}: {refused}", flush=True)
        return {**row, "refused": refused}
    q, k, v = draw(tokens)
    works: dict[str, common.Work] = {
        "peer": lambda: found.peer.attend(q, k, v, causal),
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    }  # fmt: skip
    for spec in dict.fromkeys((found.nearest, SQUARED)):
        works[spec] = functools.partial(zonal.attention, q, k, v, mechanisms.resolve(spec), causal=causal)
    times = common.interleaved(works, device, rounds=5, budget=budget)

    def ratio(one: str, other: str) -> common.Quantiles:
        return common.Quantiles.of([a / b for a, b in zip(times[one], times[other], strict=True)])

    to_sdpa = ratio("peer", "sdpa")
    to_peer = {spec: ratio(spec, "peer") for spec in works if spec not in ("peer", "sdpa")}
    words = ", ".join(
        f"{spec} takes {found_ratio.median:.3g} [{found_ratio.low:.3g}-{found_ratio.high:.3g}] of it"
        for spec, found_ratio in to_peer.items()
    )
    print(
        f"  T={tokens} {kind}: {common.milliseconds(common.Quantiles.of(times['peer']).median)}, "
        f"{to_sdpa.median:.3g} [{to_sdpa.low:.3g}-{to_sdpa.high:.3g}] "
        f"of causal SDPA ({to_sdpa.runs} rounds); {words}", flush=True,
    )  # fmt: skip
    return {
        **row, "seconds": {name: asdict(common.Quantiles.of(seconds)) for name, seconds in times.items()},
        "against_sdpa": asdict(to_sdpa),
        "zonal_against_peer": {spec: asdict(found_ratio) for spec, found_ratio in to_peer.items()},
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
