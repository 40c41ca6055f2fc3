"""REWA of functions: K_ts = exp(phi(q_t) . phi(k_s) / tau) of random Fourier features, or phi . phi of positive ones.

Each row is divided by its sum. Cost: T S (m + P), or T m P in the linear form; decoder memory: all keys and values, or
m (P + 1) numbers per head in the linear form. Paper: REWA (004).
"""

from typing import Literal

from zonal.algebra import Operator
from zonal.algebra.anchor import Row
from zonal.algebra.declaration import require_one_of, require_positive
from zonal.algebra.link import Exp, Identity
from zonal.features import Features, Stationary
from zonal.features.stationary import Stationarity
from zonal.mechanisms.registry import mechanism


@mechanism(
    "REWA functional",
    "softmax over random Fourier features, or positive ones in linear time.",
    weights=r"$e^{\phi(q) \cdot \phi(k) / \tau}$ of random Fourier features, or $\phi \cdot \phi$ of positive ones, "
    r"over row sum",
    memory="$S(m + P)$; $m(P + 1)$",
    paths="tiled; chunked",
)
def rewa_functional(
    size: int = 64,
    kappa: Stationarity = "gaussian",
    form: Literal["softmax", "linear"] = "softmax",
    temperature: float = 0.25,
    width: float | None = None,
    smoothness: float = 1.5,
    orthogonal: bool = True,
    learn: bool = False,
    dim: int | None = None,
    seed: int | None = None,
) -> Operator:
    """Tokens as functions: exp(phi(q) . phi(k) / tau), or phi(q) . phi(k) in linear time, with the row anchor.

    The first form has random Fourier features, the second positive features.

    size: number of features m. kappa: the kernel that phi . phi approximates, ``gaussian``, ``laplacian`` or
    ``matern``. form: ``softmax`` (signed features) or ``linear`` (positive features). temperature: tau, for
    ``softmax``. learn: train the frequencies. The other arguments are those of ``features.Stationary`` and
    ``Features``.

    Raises: ArgumentError for unknown names and sizes out of range. Source: REWA (004).
    """
    require_one_of("rewa_functional: form", form, ("softmax", "linear"))
    require_positive("rewa_functional: temperature", temperature)
    signed = form == "softmax"
    score = Features(
        Stationary(size, kappa, width, smoothness, orthogonal, learn, signed),
        dim=dim,
        seed=seed,
        temperature=temperature if signed else 1.0,
    )
    return Operator(score, Exp() if signed else Identity(), Row(), name="rewa_functional")
