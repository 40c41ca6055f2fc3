"""Operators and inputs that the compiled tiles must run, and why they refuse others."""

from dataclasses import replace

import torch
from matrix import CASES, OPERATORS, PAIRED, Case, fitted, inputs

from zonal import Operator, anchor, link, prior, score
from zonal import mechanisms as m
from zonal.execution.paths import tile

LARGE = {
    "causal 127": Case(queries=127, keys=127, key_dim=24, value_dim=24),
    "one head 1000": Case(batch=1, heads=1, kv_heads=1, queries=1000, keys=1000, key_dim=8, value_dim=5),
    "d 128, P 80": Case(batch=1, heads=2, kv_heads=2, queries=101, keys=101, key_dim=128, value_dim=80),
    "d 256": Case(batch=1, heads=1, kv_heads=1, queries=50, keys=50, key_dim=256, value_dim=256),
    "d 48, bidirectional": Case(queries=70, keys=211, key_dim=48, value_dim=17, causal=False),
    "queries of a quarter": Case(heads=8, kv_heads=2, queries=130, keys=130, key_dim=16, value_dim=16),
    "decode": Case(heads=8, kv_heads=2, queries=1, keys=333, key_dim=16, value_dim=16),
    "left padding": Case(padding="left", queries=150, keys=150, key_dim=9, value_dim=11),
    "random padding": Case(padding="random", queries=150, keys=150, key_dim=9, value_dim=11, kv_heads=1),
    "key bias": Case(key_bias=True, padding="random", queries=131, keys=131, key_dim=16, value_dim=12, kv_heads=1),
    "key bias, bidirectional": Case(key_bias=True, queries=40, keys=61, key_dim=7, value_dim=5, causal=False),
    "documents": Case(batch=1, packed=(0, 1, 40, 107, 250), queries=250, keys=250, key_dim=8, value_dim=8),
    "strided": Case(strided=True, queries=120, keys=120, key_dim=16, value_dim=12),
    "decay": Case(log_decay=True, queries=150, keys=150, key_dim=16, value_dim=12, kv_heads=2, padding="random"),
    "decay and key bias": Case(log_decay=True, key_bias=True, queries=40, keys=140, key_dim=9, value_dim=7),
}
KINDS: dict[str, object] = {
    **OPERATORS,
    "softmax-raw": lambda: m.softmax().replace(anchor=anchor.Raw()),
    "identity-count": lambda: Operator(score.Dot(), link.Identity(), anchor.Count()),
    "softmax-window": lambda: m.softmax(prior=prior.Window(37)),
    "yat-two-sided": lambda: m.yat(eps=0.1).replace(prior=prior.Window(20, 30)),
    "sko-chunk": lambda: m.sko(degrees=(2.0, 3.0), manifold_dim=4).replace(prior=prior.ChunkCausal(24)),
    "cosine-learned": lambda: Operator(score.Cosine(temperature=0.3, learn_temperature=True), link.Exp(), anchor.Row()),
    "softmax-decay": lambda: m.softmax(prior=prior.Decay()),
    "softmax-alibi-window": lambda: m.softmax(prior=(prior.ALiBi(), prior.Window(20, 30))),
    "sko-alibi": lambda: m.sko(degrees=(2.0, 3.0), manifold_dim=4).replace(prior=prior.ALiBi()),
    "linear-relu": lambda: Operator(score.Dot(map="relu"), link.Identity(), anchor.Row(allow_signed=True)),
}


def refusal(operator: Operator, case: Case) -> str | None:
    """Why the kernel does not run this pair in float32, or None."""
    data = inputs(case).to(torch.float32)
    return tile.refusal(data.call(operator))


# what the kernel must run, for heads of any size that it takes, or of some
LOG = (
    "softmax",
    "cosine",
    "softmax-window",
    "softmax-strict",
    "softmax-count",
    "rewa_functional",
    "rewa_functional-matern",
    "softmax-raw",
    "cosine-learned",
    "softmax-alibi",
    "softmax-alibi-window",
    "softmax-decay",
)
SUMS = (
    "linear", "sko", "sko-fractional", "sko-reproducing", "yat", "squared_affine", "polynomial_square", "slay",
    "performer", "hedgehog", "yat-raw",
    "rewa_functional-linear", "sko-chunk", "identity-count", "yat-two-sided", "linear-relu",
    "retention", "sko-alibi", "yat-decay",
)  # fmt: skip
DISTANCES = ("distance-squared",)
FRAMES = ("rewa_categorical", "rewa_categorical-relation")
RELATIONS = ("rewa_operator", "rewa_operator-path", "rewa_operator-chosen")
NAMES = (*LOG, *SUMS, *DISTANCES, *FRAMES, *RELATIONS)
SIZES = {
    **dict.fromkeys(DISTANCES, range(255)),
    **dict.fromkeys(FRAMES, range(65)),
    **dict.fromkeys(RELATIONS, (5, 7, 9)),
}
# these meet every input, the others share them out between them
EVERY = (
    "softmax",
    "cosine-learned",
    "softmax-window",
    "softmax-alibi",
    "sko-alibi",
    "yat-decay",
    "linear",
    "sko",
    "yat",
    "squared_affine",
    "sko-chunk",
    "yat-two-sided",
    "identity-count",
)
SHARES = 4


def selected() -> dict[str, tuple[str, Case]]:
    """By name: an operator, and an input that the kernel must run."""
    found: dict[str, tuple[str, Case]] = {}
    rows = {**PAIRED, **{row: CASES[row] for row in ("no-keys", "no-queries")}, **LARGE}
    for place, name in enumerate(NAMES):
        operator, seen = KINDS[name](), set()  # type: ignore[operator]
        for number, (row, case) in enumerate(rows.items()):
            if name not in LOG and row not in LARGE:  # of a row with one key the gradient is rounding, however large
                case = replace(case, log_decay=False, key_bias=False)
            case = fitted(operator, case)
            if (
                case not in seen
                and case.key_dim in SIZES.get(name, range(257))
                and (name in EVERY or number % SHARES == place % SHARES)
            ):
                seen.add(case)
                found[f"{name}/{row}"] = name, case
    return found


SELECTED = selected()
