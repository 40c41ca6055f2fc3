"""Local-global attention: exact softmax in a window and a constant memory of all keys before it, one normaliser.

With w = window, s = D^-1/2 and a far kernel F(q, k) = g phi(q).phi(k) >= 0,

    y_t = (sum_{t-w<j<=t} exp(s q_t.k_j) v_j + sum_{j<=t-w} F(q_t, k_j) v_j)
        / (sum_{t-w<j<=t} exp(s q_t.k_j)     + sum_{j<=t-w} F(q_t, k_j)).

Cost: T (w (D + P) + 2 m P) multiply-adds per head for m far features; decoder memory: w (D + P) + m (P + 1) numbers per
head at any length. The form is that of LoLCATs (Zhang et al. 2024) with any far kernel.
"""

from dataclasses import replace

from zonal.algebra import Operator
from zonal.algebra.anchor import LocalGlobal, Row
from zonal.algebra.declaration import require
from zonal.algebra.link import Exp
from zonal.algebra.named import operator_of
from zonal.algebra.score import Dot
from zonal.features import Features
from zonal.mechanisms.registry import mechanism


@mechanism(
    "Local-global",
    "softmax for the last keys and a second kernel with finitely many features for all keys before them, divided by "
    "one sum; constant memory.",
    weights=r"$e^{q \cdot k / \sqrt D}$ in the window, $g \, \phi(q) \cdot \phi(k)$ before it, over row sum",
    memory="$w(D + P) + m(P + 1)$, $m$ features",
    paths="chunked",
)
def local_global(
    window: int = 64,
    far: str = "squared_affine",
    weight: float = 1.0,
    learn_weight: bool = True,
    first: int = 0,
    scale: float | None = None,
    d_qk: int | None = None,
) -> Operator:
    """Softmax attention to the last ``window`` keys, and a far kernel for all earlier keys, under one normaliser.

    It is causal and exact per token: a decoder gives what a call on the whole sequence gives. In the window the largest
    score of a row is subtracted before the exponential. Both parts are then put on the scale of the larger one: with
    M = max(max_j s q_t.k_j, log sum_j F(q_t, k_j)) the sums are multiplied by exp(-M), so that neither overflows.

    The kernel of the operator is one array with two formulas, by the distance of query and key. Score and link are
    those of the window, and the anchor ``LocalGlobal`` declares the window and the far kernel, because these have a
    meaning only under its common normaliser.

    window: w, counting the query's own key. far: the mechanism that gives the far kernel, with or without arguments:
    "squared_affine", "polynomial_square(degree=4, d_qk=8)", "hedgehog(size=128)" (learned positive features of queries
    and of keys), "performer", "slay" or "linear". It sees queries and keys divided by D^(1/4).
    weight: initial value of the factor g of the far kernel; learn_weight: learn one factor per head. To convert a
    trained model take far="hedgehog(size=128, activation='exp', init_scale=0.25)", start the weight small, such as
    0.002, and train both on the outputs of the model's attention.
    first: how many of the first keys of a sequence count as in the window for all queries. Trained models often attend
    strongly to the first tokens, whatever they are. scale: s, None = D^-1/2. d_qk: size of queries and keys in a layer.

    Raises: ArgumentError for numbers out of range, and for a far kernel that may be negative (ridge read-outs too), has
    no finite features, or is normalised otherwise. Source: Zhang et al. 2024 (LoLCATs).
    """
    made = operator_of("local_global", far)
    require(
        not made.anchor.solves,
        "local_global: far must be divided by the sum of the row, as the window is; the weights of "
        f"{made.name!r} may be negative and have no such sum. Add the two read-outs: nn.Mixture of an Attention with "
        f"m.softmax(prior=Window(left=window - 1)) and one with {far!r}.",
    )
    require(
        made.anchor == Row() and not made.prior,
        f"local_global: far must be a mechanism with anchor Row and without priors, received {made.name!r} with anchor "
        f"{type(made.anchor).__name__}. Use squared_affine, polynomial_square, hedgehog, performer, slay or linear.",
    )
    score = made.score
    if isinstance(score, Features):  # what it sees has been divided by D^(1/4)
        score = replace(score, scaled=False)
    return Operator(
        Dot(scale=scale),
        Exp(),
        LocalGlobal(window, score, made.link, weight, learn_weight, first),
        name="local_global",
        qk_dim=d_qk,
    )


__all__ = ["local_global"]
