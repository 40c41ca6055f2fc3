"""Hierarchical attention: the weights closest to softmax attention with distant tokens tied in blocks of a tree.

Bidirectional. Cost: as softmax attention. Paper: Geometric Attention (003), section 2.7.
"""

from zonal.algebra import Operator
from zonal.algebra.anchor import Hierarchical
from zonal.algebra.link import Exp
from zonal.algebra.score import Dot
from zonal.mechanisms.registry import mechanism


@mechanism(
    "Hierarchical",
    "softmax that sees distant tokens as blocks of a tree. For encoders: it reads the whole text at once.",
    weights="closest to softmax among weights that see distant tokens as blocks",
    memory="none: for encoders",
    paths="tiled",
)
def hierarchical(sizes: tuple[int, ...] = (16,), scale: float | None = None) -> Operator:
    """Softmax attention that reads distant tokens as blocks: dot score, exp link, ``Hierarchical`` anchor.

    sizes: numbers of children per block at each level of the tree, from the tokens upward. scale: of the score; None =
    D^-1/2.

    Raises: ArgumentError for sizes below 2.
    """
    return Operator(Dot(scale=scale), Exp(), Hierarchical(sizes), name="hierarchical")
