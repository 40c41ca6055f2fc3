"""LocalGlobal: the operator's own kernel for keys in a window, another kernel for all earlier keys, one normaliser.

With w = ``window`` and the far kernel F_ts = weight * l'(S'_ts) of the declared score S' and link l',

    W_ts = K_ts / Z_t  for t - s < w or s < first,    W_ts = F_ts / Z_t  for all other s <= t - w,

and Z_t the sum of these K_ts and F_ts.

The far kernel has finitely many features, F_ts = phi(q_t) . phi(k_s), so that everything before the window is kept as
sums over keys. Score and link of the operator are those of the window. The far kernel belongs to the anchor because it
has a meaning only together with the window and the common normaliser Z_t.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from zonal.algebra.anchor.base import Anchor, Blocks, Row
from zonal.algebra.declaration import Derived, Move, require, require_positive, require_whole, row
from zonal.algebra.link import Link, SquaredAffine
from zonal.algebra.score import Cosine, Params, Score

_SCORE, _LINK = Cosine(), SquaredAffine()


@dataclass(frozen=True)
class LocalGlobal(Anchor):
    """``Row`` over two kernels: that of the operator for the last ``window`` keys and the first few, a far kernel for
    all between them.

    The far kernel sees x_t = D^(1/4) q_t and z_s = D^(-1/4) k_s of queries and keys as the operator's score prepares
    them. Their dot product is the score in the window, and for ``Dot`` they are q and k divided by D^(1/4).

    window: w, how many of the last keys have the operator's own kernel; a query counts its own key. first: how many of
    the first keys have it for all queries. score, link: of the far kernel, a polynomial of a dot product that is never
    negative. weight: the initial value of its factor; learn_weight: learn one factor per head, through its logarithm.

    Raises: ArgumentError for numbers out of range, and for a far kernel that may be negative or has no finite features.
    """

    family = "window"
    normalises = True

    window: int = 64
    score: Score = _SCORE
    link: Link = _LINK
    weight: float = 1.0
    learn_weight: bool = True
    first: int = 0

    def __post_init__(self) -> None:
        require_whole("LocalGlobal: window", self.window)
        require_whole("LocalGlobal: first", self.first, 0)
        require_positive("LocalGlobal: weight", self.weight)
        score, link = self.score, self.link
        require(
            isinstance(score, Score) and isinstance(link, Link),
            f"LocalGlobal: a score and a link are required for the far kernel, received {score!r} and {link!r}.",
        )
        names = f"score {type(score).__name__} and link {type(link).__name__}"
        require(
            score.bilinear and link.degree is not None,
            f"LocalGlobal: the far kernel must be a polynomial of a dot product, received {names}. Use the parts of "
            "squared_affine, polynomial_square, hedgehog, performer or linear.",
        )
        require(
            link.positive or (link.linear and score.positive),
            "LocalGlobal: the far kernel must never be negative, because rows are divided by a sum that contains it, "
            f"received {names}. Use a positive link, or positive features with link.Identity().",
        )
        require(
            link.domain is None or (score.bound is not None and score.bound <= 1 + 1e-9),
            f"LocalGlobal: link {type(link).__name__} is defined on [-1, 1] and score {type(score).__name__} can leave "
            "it; use score.Cosine().",
        )

    @property
    def kv_rows(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(f"score_{name}" for name in self.score.kv_rows)

    def initial(self) -> dict[str, Tensor]:
        own = {"log_weight": row(self.weight).log()} if self.learn_weight else {}
        return own | _named("score", self.score.initial()) | _named("link", self.link.initial())

    def fixed(self) -> dict[str, Tensor]:
        return _named("score", self.score.fixed()) | _named("link", self.link.fixed())

    def sized(self, dim: int, heads: int) -> "LocalGlobal":
        return replace(self, score=self.score.sized(dim, heads), link=self.link.sized(dim))

    def started(self, entry: float, seed: int) -> dict[str, Tensor]:
        return _named("score", self.score.started(entry, seed))

    def factor(self, params: Params) -> Tensor:
        """The factor of the far kernel, (H or 1,)."""
        return params["log_weight"].exp() if self.learn_weight else row(self.weight)

    def weights(self, blocks: Blocks) -> Tensor:
        # definition.evidence has put the far kernel into the block
        return Row().weights(blocks)

    def moves(self) -> tuple[Move, ...]:
        sums = Derived(
            "sums before the window",
            "hence the keys of the window and sums over all earlier keys carry all of the past",
        )
        opening = f" and the first {self.first}" if self.first else ""
        text = (
            f"the last {self.window} keys{opening} weigh by the score and link of the operator, all others by "
            f"{type(self.link).__name__} of {type(self.score).__name__}"
        )
        return (self.move("restriction", "window and sums", text, sums), *Row().moves())


def _named(prefix: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}_{name}": value for name, value in values.items()}


__all__ = ["LocalGlobal"]
