"""The table of every declared type, by name: what a configuration may contain."""

from zonal.algebra.anchor import ANCHORS
from zonal.algebra.declaration import Declaration
from zonal.algebra.hashing import SEARCHES
from zonal.algebra.link import LINKS
from zonal.algebra.metric import METRICS
from zonal.algebra.prior import PRIORS
from zonal.algebra.score import SCORES

ALL: dict[str, type[Declaration]] = {**SCORES, **LINKS, **ANCHORS, **PRIORS, **METRICS, **SEARCHES}
