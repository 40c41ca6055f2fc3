"""The test matrix: one row an operator, one an input. A new mechanism adds one row, and its name among RUNS."""

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from pairwise import pairwise
from torch import Tensor

import zonal
from zonal import Operator, anchor, link, metric, prior, score
from zonal import mechanisms as m
from zonal.algebra.declaration import declared
from zonal.execution.call import Call, prepare, weighted
from zonal.execution.mask import Masses

# sequences of tests are shorter than the window of local_global
CAUSAL_NAMES = tuple(
    {"local_global": "local_global(window=3)"}.get(name, name) for name in m.names() if not m.resolve(name).tags.couples
)
"""Mechanisms that have a causal order; the others are for encoders."""

DECLARED = declared("score", "link", "anchor", "prior", "metric", "search", "features")
"""The types that the library declares, by name; tests and users declare more."""

OPERATORS: dict[str, Callable[[], Operator]] = {
    "softmax": m.softmax,
    "cosine": m.cosine,
    "linear": m.linear,
    "retention": m.retention,
    "sko": m.sko,
    "sko-fractional": lambda: m.sko(degrees=(1.5, 2.0), learn_degrees=True, manifold_dim=5),
    "sko-reproducing": lambda: m.sko(degrees=(2.0,), init="reproducing", manifold_dim=3),
    "sko-chebyshev": lambda: m.sko(degrees=(16.0,), manifold_dim=1),
    "yat": lambda: m.yat(eps=0.1),
    "squared_affine": lambda: m.squared_affine(learn_bias=True),
    "polynomial_square": lambda: m.polynomial_square(learn=True),
    "slay": lambda: m.slay(scale="small"),
    "performer": lambda: m.performer(draws=12),
    "hedgehog": lambda: m.hedgehog(size=6),
    "local_global": lambda: m.local_global(window=5),
    "local_global-hedgehog": lambda: m.local_global(window=4, far="hedgehog(size=6)"),
    "local_global-learned": lambda: m.local_global(window=1, far="squared_affine(learn_bias=True)", weight=0.3),
    "local_global-first": lambda: m.local_global(window=3, first=2),
    "ridge": m.ridge,
    "ska-0": lambda: m.ska(power=0),
    "ska-1": lambda: m.ska(power=1),
    "ska-2": lambda: m.ska(power=2),
    "ska-compact": lambda: m.ska(power=1, compact=True),
    "ska-paper": lambda: m.ska(power=1, chunk=4, key_limit=None, running_max=True),
    "ska-fading": lambda: m.ska(power=(0, 2, 1, 1), eps=0.3).replace(prior=prior.Decay(rates=(0.5, 0.9))),
    "ska-mixed": lambda: m.ska(power=(0, 1, 2, 1)),
    "ska-relative": lambda: m.ska(power=1, relative=0.05, chunk=4, spectral_norm="power"),
    "softmax-alibi": lambda: m.softmax(prior=prior.ALiBi()),
    "softmax-window": lambda: m.softmax(prior=prior.Window(5)),
    "softmax-strict": lambda: m.softmax(prior=prior.Causal(include_self=False)),
    "softmax-top": lambda: m.softmax().replace(anchor=anchor.TopK(3)),
    "yat-top": lambda: m.yat(eps=0.1).replace(anchor=anchor.TopK(4)),
    "rewa-top": lambda: m.rewa(prior=prior.ALiBi()).replace(anchor=anchor.TopK(3)),
    "softmax-count": lambda: m.softmax().replace(anchor=anchor.Count()),
    "yat-decay": lambda: m.yat(eps=0.1).replace(prior=prior.Decay()),
    "yat-raw": lambda: m.yat(eps=0.1).replace(anchor=anchor.Raw()),
    "distance": lambda: Operator(score.NegativeDistance(temperature=2.0), link.Exp(), anchor.Row()),
    "distance-squared": lambda: Operator(
        score.NegativeDistance(metric.SquaredEuclidean(), temperature=3.0), link.Exp(), anchor.Row()
    ),
    "distance-count": lambda: Operator(score.NegativeDistance(temperature=2.0), link.Exp(), anchor.Count()),
    "rewa": m.rewa,
    "rewa-dot": lambda: m.rewa(parts=None, gates=(0.0, 0.5, 1.0), temperature=0.5, dot=0.4),
    "rewa-adaptive": lambda: Operator(
        score.NegativeDistance(metric.Product((metric.Euclidean(), metric.Hyperbolic(scale=None)), adaptive=True), 0.5),
        link.Exp(),
        anchor.Row(),
    ),
    "rewa-curved": lambda: m.rewa(weights=(1.0, 2.0, 0.5), temperature=0.2, prior=prior.ALiBi()),
    "rewa_functional": lambda: m.rewa_functional(size=12),
    "rewa_functional-matern": lambda: m.rewa_functional(
        size=8, kappa="matern", orthogonal=False, temperature=0.5, width=2.0
    ),
    "rewa_functional-linear": lambda: m.rewa_functional(size=12, form="linear", width=3.0),
    "rewa_categorical": m.rewa_categorical,
    "rewa_categorical-relation": lambda: m.rewa_categorical(relation=True, temperature=0.5),
    "rewa_operator": lambda: m.rewa_operator(rank=1, temperature=20.0),
    "rewa_operator-path": lambda: m.rewa_operator(rank=1, relations=2),
    "rewa_operator-chosen": lambda: m.rewa_operator(rank=1, relations=2, choices=3),
    "rewa_oscillatory": lambda: m.rewa_oscillatory(amplitudes=(1.0, -0.5), decays=(0.5, 0.2), frequencies=(3.0, 5.0)),
    "rewa_riemannian": lambda: m.rewa_riemannian(units=3, temperature=0.7),
    "rewa_topological": lambda: m.rewa_topological(neighbours=3, gates=(0.5, 2.0), temperature=0.5),
    "distance-fisher": lambda: Operator(
        score.NegativeDistance(metric.FisherRao(), temperature=0.5), link.Exp(), anchor.Row()
    ),
    "distance-le-cam": lambda: Operator(
        score.NegativeDistance(metric.LeCam(), temperature=0.2), link.Exp(), anchor.Count()
    ),
    "distance-fidelity": lambda: Operator(
        score.NegativeDistance(metric.Fidelity(), temperature=2.0), link.Exp(), anchor.Row()
    ),
    "ridge-yat": lambda: m.yat(eps=0.1).replace(anchor=anchor.Ridge(eps=0.5)),
    "koopman-exp": lambda: m.cosine(temperature=1.0).replace(anchor=anchor.Koopman(power=1, eps=0.5)),
    "regime-ridge": lambda: m.regime(score="dot(scale=0.7)", link="squared_affine(bias=0.3)", anchor="ridge(eps=0.5)"),
    "ridge-chunk": lambda: m.ridge(chunk=4),
    "kernel_ridge": m.kernel_ridge,
    "kernel_ridge-sko": lambda: m.kernel_ridge(kernel="sko(degrees=(2.0, 1.5), manifold_dim=7)", power=(0, 2)),
    "kernel_ridge-yat": lambda: m.kernel_ridge(kernel="yat(eps=0.1)", power=1),
    "kernel_ridge-slay": lambda: m.kernel_ridge(kernel="slay(scale='small')", power=1),
    "kernel_ridge-chunk": lambda: m.kernel_ridge(kernel="polynomial_square", power=1, chunk=4),
    "ridge-window": lambda: m.ridge().replace(prior=prior.Window(6)),
    "sinkhorn": lambda: m.sinkhorn(tolerance=1e-12),
    "sinkhorn-unbalanced": lambda: m.sinkhorn(rho=(1.0, 0.5), tolerance=1e-12),
    "sinkhorn-bounded": lambda: m.sinkhorn(bounds=(0.5, 1.5), tolerance=1e-12),
    "sinkhorn-window": lambda: m.sinkhorn(rho=(2.0, 1.0), tolerance=1e-12, prior=prior.Window(5, 7)),
    "sinkhorn-distance": lambda: m.rewa(prior=prior.ALiBi()).replace(anchor=anchor.Plan(tolerance=1e-12)),
    "hyperbolic_transport": lambda: m.hyperbolic_transport(tolerance=1e-12),
    "hyperbolic_transport-unbalanced": lambda: m.hyperbolic_transport(temperature=0.5, rho=(1.0, 0.5), tolerance=1e-12),
    "hierarchical": lambda: m.hierarchical(sizes=(3, 2)),
    "sko-chunk": lambda: m.sko(degrees=(2.0,), manifold_dim=4).replace(prior=prior.ChunkCausal(4)),
}


@dataclass(frozen=True)
class Case:
    """One input: shapes and mask."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 4
    queries: int = 17
    keys: int = 17
    key_dim: int = 5
    value_dim: int = 3
    causal: bool = True
    padding: str = ""  # "", "left", "random", "all"
    packed: tuple[int, ...] = ()
    key_bias: bool = False
    strided: bool = False
    log_decay: bool = False  # a token
    weights: str = ""  # of keys: "", "action", "gate"
    masses: bool = False
    shared: bool = False  # one head of queries and keys for all heads of values


CASES: dict[str, Case] = {
    "causal": Case(),
    "causal-gqa-odd": Case(kv_heads=2, queries=31, keys=31, key_dim=7, value_dim=1),
    "bidirectional": Case(causal=False, queries=13, keys=19),
    "decode": Case(queries=3, keys=23, kv_heads=2),
    "left-padding": Case(padding="left", kv_heads=2),
    "random-padding": Case(padding="random", causal=False),
    "all-forbidden": Case(padding="all"),
    "packed": Case(batch=1, packed=(0, 1, 8, 17)),
    "packed-bidirectional": Case(batch=1, packed=(0, 5, 17), causal=False),
    "one-token": Case(queries=1, keys=1),
    "no-keys": Case(queries=3, keys=0, causal=False),
    "no-queries": Case(queries=0, keys=4, causal=False),
    "bidirectional-bias": Case(causal=False, key_bias=True, kv_heads=2, padding="left"),
    "more-queries-than-keys": Case(queries=9, keys=4),
    "key-bias": Case(key_bias=True, kv_heads=2),
    "strided": Case(strided=True),
}


RUNS = {
    ("tiled", "streaming"): (
        "softmax", "cosine", "sko-chebyshev", "yat", "softmax-alibi", "softmax-window", "softmax-strict", "softmax-top",
        "yat-top", "rewa-top", "softmax-count",
        "yat-decay", "yat-raw", "distance", "distance-squared", "distance-count", "rewa", "rewa-dot", "rewa-adaptive",
        "rewa-curved", "rewa_functional",
        "rewa_functional-matern", "rewa_categorical", "rewa_categorical-relation", "rewa_operator",
        "rewa_operator-path", "rewa_operator-chosen", "rewa_oscillatory",
        "rewa_riemannian", "rewa_topological", "distance-fisher", "distance-le-cam", "distance-fidelity",
    ),
    ("tiled", "chunked", "streaming"): (
        "linear", "retention", "sko", "sko-fractional", "sko-reproducing", "squared_affine", "polynomial_square",
        "slay", "performer", "hedgehog",
        "rewa_functional-linear", "sko-chunk",
    ),
    ("chunked", "streaming"): (
        "local_global", "local_global-hedgehog", "local_global-learned", "local_global-first",
        "ridge", "ska-0", "ska-1", "ska-2", "ska-compact", "ska-paper", "ska-fading", "ska-mixed", "ska-relative",
        "ridge-chunk",
        "kernel_ridge", "kernel_ridge-sko",
        "kernel_ridge-slay", "kernel_ridge-chunk",
    ),
    ("streaming",): ("ridge-yat", "koopman-exp", "regime-ridge", "kernel_ridge-yat", "ridge-window"),
    ("tiled",): (
        "sinkhorn", "sinkhorn-unbalanced", "sinkhorn-bounded", "sinkhorn-window", "sinkhorn-distance",
        "hyperbolic_transport", "hyperbolic_transport-unbalanced",
        "hierarchical",
    ),
}  # fmt: skip
"""The paths beside the dense one that must run each operator, where its queries have positions; without, none streams.

All others must refuse it.
"""

PATHS = ("tiled", "chunked", "streaming")


def tied(operator: Operator, case: Case) -> bool:
    """Whether queries have positions among the keys."""
    return case.causal or any(isinstance(part, prior.Causal | prior.ChunkCausal) for part in operator.prior)


def paths(name: str, case: Case) -> tuple[str, ...]:
    """The paths beside the dense one that must run an operator of the matrix on a case that fits it."""
    found = next(found for found, names in RUNS.items() if name in names)
    return found if tied(OPERATORS[name](), case) else tuple(path for path in found if path != "streaming")


SHAPES: dict[str, dict[str, int]] = {
    "even": {},
    "odd": {"queries": 31, "keys": 31, "key_dim": 7, "value_dim": 1},
    "late": {"queries": 3, "keys": 23},
    "early": {"queries": 9, "keys": 4},
    "one": {"queries": 1, "keys": 1},
}
HEADS: dict[str, dict[str, int | bool]] = {
    "each": {},
    "grouped": {"kv_heads": 2},
    "single": {"kv_heads": 1},
    "shared": {"shared": True},
}
FEATURES: dict[str, tuple[str, ...]] = {
    "shape": tuple(SHAPES),
    "order": ("causal", "both"),
    "heads": tuple(HEADS),
    "layout": ("", "strided"),
    "padding": ("", "left", "random", "all"),
    "documents": ("", "packed"),
    "bias": ("", "bias"),
    "decay": ("", "decay"),
    "weights": ("", "action", "gate"),
    "masses": ("", "masses"),
}


def possible(a: tuple[str, str], b: tuple[str, str]) -> bool:
    """Whether an input can have two of the features: documents are queries and keys of the same tokens, a decay needs
    an order.
    """
    for (one, value), (other, with_) in ((a, b), (b, a)):
        if one == "documents" and value and other == "shape" and with_ not in ("even", "odd"):
            return False
        if one == "decay" and value and other == "order" and with_ == "both":
            return False
        if one == "weights" and value == "action" and other == "padding" and with_ == "all":
            return False  # a sequence that stores nothing is refused
    return True


def paired(row: dict[str, str]) -> Case:
    case = Case(
        causal=row["order"] == "causal", padding=row["padding"], key_bias=bool(row["bias"]),
        strided=bool(row["layout"]), log_decay=bool(row["decay"]),
        weights=row["weights"], masses=bool(row["masses"]), **SHAPES[row["shape"]], **HEADS[row["heads"]],
         # type: ignore[arg-type]
    )  # fmt: skip
    return replace(case, batch=1, packed=(0, 1, 8, 14, case.keys)) if row["documents"] else case


PAIRED: dict[str, Case] = {
    "-".join(value for value in row.values() if value): paired(row) for row in pairwise(FEATURES, possible)
}
"""Inputs in which any two features that can meet do so."""


def fitted(operator: Operator, case: Case) -> Case:
    """The case without what the operator has no use for; what it refuses is tested in test_attention."""
    tags, kind = operator.tags, operator.anchor
    chunks = any(isinstance(part, prior.ChunkCausal) for part in operator.prior)
    if tags.couples:
        case = replace(case, causal=False, log_decay=False)
    if tags.decays or tags.window:
        case = replace(case, causal=True)
    if not isinstance(kind, anchor.Plan | anchor.UnbalancedPlan | anchor.BoundedPlan) or any(
        isinstance(part, prior.Window) for part in operator.prior
    ):
        case = replace(case, masses=False)
    if isinstance(kind, anchor.Hierarchical):
        case = replace(case, queries=case.keys, packed=())
    if tags.solves:
        case = replace(case, key_bias=False, log_decay=case.log_decay and tags.decays)
    if chunks or tags.window:
        case = replace(case, log_decay=False)
    if not (tags.solves and operator.score.plain and isinstance(operator.link, link.Identity)):
        case = replace(case, weights="")
    return case


@dataclass
class Inputs:
    """Tensors of a case and the arguments that go with them."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    key_padding_mask: Tensor | None
    cu_seqlens: Tensor | None
    key_bias: Tensor | None
    log_decay: Tensor | None = None
    action_mask: Tensor | None = None
    key_gate: Tensor | None = None
    query_mass: Tensor | None = None
    key_mass: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "Inputs":
        """The same numbers in another type, as fresh leaves."""
        return Inputs(
            **{
                name: x.detach().to(dtype).requires_grad_(x.requires_grad)
                if isinstance(x, Tensor) and x.dtype.is_floating_point
                else x
                for name, x in vars(self).items()
            }
        )

    @property
    def leaves(self) -> list[Tensor]:
        """What gets gradients."""
        return [x for x in vars(self).values() if isinstance(x, Tensor) and x.requires_grad]

    @property
    def arguments(self) -> dict:
        """All but q, k and v, as ``attention`` takes them."""
        return {name: x for name, x in vars(self).items() if name not in ("q", "k", "v")}

    def call(self, operator: Operator) -> Call:
        """The prepared call."""
        own = ("action_mask", "key_gate", "query_mass", "key_mass")
        named = {name: x for name, x in self.arguments.items() if name not in own}
        call = prepare(operator, self.q, self.k, self.v, **named, masses=Masses(self.query_mass, self.key_mass))
        return weighted(call, self.action_mask, self.key_gate)

    def run(self, operator: Operator, path: str) -> Tensor:
        with warnings.catch_warnings():  # some masks hide all of a sequence
            warnings.filterwarnings("ignore", "attention: key_padding_mask hides every key")
            return zonal.attention(self.q, self.k, self.v, operator, path=path, **self.arguments)


def inputs(case: Case, seed: int = 0, scale: float = 1.0) -> Inputs:
    """Random inputs of a case in float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        if case.strided:  # (B, T, H, D) in memory, as a projection leaves it
            batch, heads, tokens, dim = shape
            x = torch.randn(batch, tokens, heads, dim, generator=generator, dtype=torch.float64).transpose(1, 2)
        else:
            x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return (x * scale).requires_grad_()

    q = draw(case.batch, 1 if case.shared else case.heads, case.queries, case.key_dim)
    k = draw(case.batch, 1 if case.shared else case.kv_heads, case.keys, case.key_dim)
    v = draw(case.batch, case.kv_heads, case.keys, case.value_dim)
    mask = None
    if case.padding:
        mask = torch.ones(case.batch, case.keys, dtype=torch.bool)
        if case.padding == "left":
            mask[0, : case.keys // 3] = False
        elif case.padding == "random":
            mask = torch.rand(case.batch, case.keys, generator=generator) > 0.4
        else:
            mask[0] = False

    def a_key(draw: Callable[..., Tensor]) -> Tensor:
        return draw(case.batch, case.kv_heads, case.keys, generator=generator, dtype=torch.float64)

    bias = a_key(torch.randn).requires_grad_() if case.key_bias else None
    found = Inputs(q, k, v, case.causal, mask, torch.tensor(case.packed) if case.packed else None, bias)
    if case.log_decay:
        found.log_decay = (-0.5 * a_key(torch.rand)).requires_grad_()
    if case.weights == "gate":
        found.key_gate = (0.1 + 0.9 * a_key(torch.rand)).requires_grad_()
    if case.weights == "action":
        found.action_mask = torch.rand(case.batch, case.keys, generator=generator) > 0.3
        found.action_mask[:, -1] = True  # where padding is random, this token is no padding
    if case.masses:
        found.query_mass, found.key_mass = masses(case, mask, generator)
    return found


def masses(case: Case, mask: Tensor | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Of queries that see a key, and of keys that are there."""
    real = torch.ones(case.batch, case.keys, dtype=torch.bool) if mask is None else mask
    edges = case.packed or (0, case.keys)
    sees = torch.cat(
        [
            real[:, a:b].any(-1, keepdim=True).expand(-1, b - a if case.packed else case.queries)
            for a, b in itertools.pairwise(edges)
        ],
        1,
    )
    give, take = (
        0.2 + torch.rand(case.batch, heads, n, generator=generator, dtype=torch.float64)
        for heads, n in ((case.heads, case.queries), (case.kv_heads, case.keys))
    )
    return give * sees[:, None], take * real[:, None]


def randomised(operator: Operator, seed: int = 1) -> Operator:
    """The operator in float64 with its learned parts moved off their start, so that no gradient is zero by symmetry."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in operator.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return operator.double()
