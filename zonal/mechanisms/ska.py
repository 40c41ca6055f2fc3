"""Spectral Koopman Attention: y = eta gamma^K C P (M P)^K q with P = (G + rho I)^-1 over the keys seen so far.

G = sum z z^T, M = sum z_t z_{t-1}^T, C = sum v z^T. K = 0 returns the value stored with a key, K = 1 the value one step
later (an induction head), K = 2 two steps later. Each is multiplied by eta gamma^K, which starts at 1.5 x 1.009^K, and
reduced by the ridge. Training and decoding compute the same function, token by token. Cost: T r (r + P) per head;
decoder memory: about 2 r^2 + P r numbers per head. Paper: Echo (Koopman operators).
"""

from typing import Literal

from zonal.algebra import Operator
from zonal.algebra.anchor import Koopman
from zonal.algebra.declaration import require, require_one_of
from zonal.algebra.link import Identity
from zonal.algebra.score import Dot
from zonal.mechanisms.registry import mechanism
from zonal.mechanisms.ridge import priors


@mechanism(
    "SKA",
    "a least-squares fit as in ridge, followed by K steps of learned dynamics: with K = 1 it recalls what came after a "
    "key. Constant memory.",
    weights="ridge after $K$ steps of the keys' own dynamics",
    memory=r"$2D^2 + DP$, and $D^2$ more for $K \ge 1$",
    paths="chunked",
)
def ska(
    power: int | tuple[int, ...] = 1,
    eps: float = 0.1,
    key_limit: float | None = 1.0,
    chunk: int | None = None,
    running_max: bool = False,
    relative: float = 0.0,
    fading: bool = False,
    spectral_norm: Literal["none", "power"] = "none",
    rank: int | None = None,
    preset: Literal["paper"] | None = None,
    eta: float = 1.5,
    compact: bool = False,
) -> Operator:
    """Koopman read-out of the given power: 0 is ``ridge`` times eta. A tuple gives one power per group of heads.

    fading: the past decays at a rate that each token sets. rank: r, size of queries and keys per head in a layer (None:
    that of values). eta: initial gain of the read-out, learned per head. compact: as in ``anchor.Ridge``.
    ``preset="paper"`` is the chunk-causal form of the Echo paper: power 2, chunks of 64, the running maximum with eps
    1e-3, and keys of any length.

    Raises: ArgumentError for numbers out of range, for fading with arguments that cannot fade, and for arguments that
    the preset sets and that are not at their defaults, which it replaces. Source: Echo.
    """
    require_one_of("ska: preset", preset, ("paper", None))
    if preset == "paper":
        plain = (power, eps, key_limit, chunk, running_max, spectral_norm) == (1, 0.1, 1.0, None, False, "none")
        require(
            plain,
            "ska: preset='paper' sets power, eps, key_limit, chunk, running_max and spectral_norm. "
            "Leave them out, or the preset, and write them all.",
        )
        power, eps, key_limit, chunk, running_max, spectral_norm = 2, 1e-3, None, 64, True, "power"
    anchor = Koopman(
        power=power,
        eps=eps,
        mode="running_max" if running_max else "constant",
        relative=relative,
        spectral_norm=spectral_norm,
        eta=eta,
        compact=compact,
    )
    return Operator(
        Dot(scale=1.0, key_limit=key_limit),
        Identity(),
        anchor,
        priors(chunk, fading),
        name="ska",
        layer_init="orthogonal",
        qk_dim=rank,
    )
