"""A feature map as the score of an operator: S_ts = phi_q(q_t) . phi_k(k_s). With link identity, K is its kernel."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zonal import device_memory, torch_func
from zonal.algebra.declaration import Derived, Move, require, require_positive, require_whole
from zonal.algebra.score import FeatureLayer, Params, Score, unit
from zonal.algebra.score.feature_layer import underflow_error
from zonal.errors import ArgumentError
from zonal.features.base import FeatureMap, repeat_heads
from zonal.tracing import concrete, constant_kept


@dataclass(frozen=True)
class Features(Score):
    """S_ts = phi_q(q_t) . phi_k(k_s), for q and k or for their unit vectors if the map requires them
    (``features.unit``).

    dim: size of a head. The map draws its numbers for this size; they belong to the operator, are saved with it, and
    its learned parts can be trained. None = open: a layer fills in its own size, and a bare call uses the initial
    numbers of ``seed`` for the size it meets.
    heads: number of key heads with their own numbers (1 = shared by all). seed: of random numbers; None = each layer
    draws its own, and without a layer it is 0. scaled: divide q and k by D^(1/4), so that the map's q.k is q.k /
    sqrt(D). temperature: divides the score. Numbers that a map chooses from keys (k-means, principal directions) are
    missing until ``Operator.fit``.

    Raises: ArgumentError for vectors of another size than dim, before a required ``Operator.fit``, or if all features
    of a vector underflow (checked on the CPU); InsufficientMemoryError if the features of all tokens do not fit into
    memory.
    """

    bilinear = True

    features: FeatureMap
    dim: int | None = None
    heads: int = 1
    seed: int | None = None
    scaled: bool = False
    temperature: float = 1.0

    def __post_init__(self) -> None:
        require(
            isinstance(self.features, FeatureMap),
            f"Features: features must be a FeatureMap, received {self.features!r}. See zonal.features.",
        )
        if self.dim is not None:
            require_whole("Features: dim", self.dim, most=8192)
        require_whole("Features: heads", self.heads)
        if self.seed is not None:
            require_whole("Features: seed", self.seed, 0, 2**63 - 1)
        require_positive("Features: temperature", self.temperature)

    @property
    def positive(self) -> bool:
        return self.features.positive

    @property
    def plain(self) -> bool:
        return self.temperature == 1

    @property
    def kv_rows(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(name for name, _ in _drawn(self, self.dim))

    def initial(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in _drawn(self, self.dim) if name in self.features.learned}

    def fixed(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in _drawn(self, self.dim) if name not in self.features.learned}

    def sized(self, dim: int, heads: int) -> "Features":
        return self if self.dim is not None else replace(self, dim=dim, heads=heads)

    def started(self, entry: float, seed: int) -> dict[str, Tensor]:
        if self.seed is not None:
            return {}
        drawn = _drawn(replace(self, seed=seed), self.dim)
        return {name: value for name, value in drawn if name not in self.features.chosen}

    @property
    def _may_vanish(self) -> bool:
        """Whether it is an error that all features of a vector are 0."""
        return self.features.nonnegative and not self.features.unit

    def width(self, dim: int) -> int:
        return self.features.dimension(dim)

    def factors(self, dim: int) -> int:
        return self.features.factors(dim)

    def chosen(self, k: Tensor) -> dict[str, Tensor]:
        if not self.features.chosen:
            return {}
        require(
            self.dim == k.shape[3] and self.heads in (1, k.shape[1]),
            f"Operator.fit: keys of {self.heads if self.heads > 1 else 'any'} heads of size {self.dim} are required, "
            f"received {k.shape[1]} of size {k.shape[3]}.",
        )
        # key heads that share their numbers put their keys together
        keys = self._ready(k).transpose(0, 1).reshape(self.heads, -1, k.shape[3])
        made = self.features.prepare(k.shape[3], self.heads, seed=self.seed or 0, dtype=torch.float64, keys=keys)
        return {name: made[name] for name in self.features.chosen}

    def prepare_query(self, q: Tensor, params: Params, scale: float | None) -> Tensor:
        rows = self._numbers(q, params)
        kv_heads = max([1, *(value.shape[0] for value in rows.values())])
        phi = self._standing(self.features.query(self._ready(q), repeat_heads(rows, q.shape[1] // kv_heads)))
        if scale is None:
            return phi if self.temperature == 1 else phi / self.temperature
        return phi * scale

    def as_query(self, k: Tensor, params: Params) -> Tensor:
        return k / self.temperature

    def prepare_key(self, k: Tensor, params: Params) -> Tensor:
        return self._standing(self.features.key(self._ready(k), self._numbers(k, params)))

    def layers(self, dim: int, params: Params, scale: float | None) -> tuple[FeatureLayer, FeatureLayer] | None:
        numbers = self._buffers(dim, params)
        found: list[FeatureLayer] = []
        for side in ("query", "key"):
            layer = self.features.layer(numbers, side)
            if layer is None:
                return None
            name = type(self.features).__name__ if self._may_vanish else ""
            layer = layer._replace(unit=self.features.unit, name=name)
            found.append(layer.scaled_input(dim**-0.25) if self.scaled else layer)
        return found[0].scaled(1 / self.temperature if scale is None else scale), found[1]

    def _standing(self, phi: Tensor) -> Tensor:
        """The features, after a check that no vector of a positive map has lost all of them to underflow.

        The check runs only where it does not wait for a device.
        """
        asked = (
            self._may_vanish
            and phi.device.type == "cpu"
            and not torch.compiler.is_compiling()
            and not torch_func.active()
        )
        if asked and bool((phi == 0).all(-1).any()):
            raise underflow_error(type(self.features).__name__, phi.dtype)
        return phi

    def _numbers(self, x: Tensor, params: Params) -> Params:
        """Buffers and parameters of the map, in the form that it takes for x."""
        buffers = self._buffers(x.shape[-1], params)
        size, vectors = self.features.dimension(x.shape[-1]), x[..., 0].numel()
        what = f"{size} features for each of {vectors} vectors, and the work of making them,"
        remedy = "Use fewer features, or absorb shorter pieces into a memory."
        # twice: what they are made from is about as large
        device_memory.require("attention", what, 2 * vectors * size * x.element_size(), x.device, remedy)
        return {
            name: value.to(x.device, x.dtype if value.is_floating_point() else value.dtype)
            for name, value in buffers.items()
        }

    def _buffers(self, dim: int, params: Params) -> Params:
        """Buffers and parameters of the map for heads of ``dim`` numbers.

        Raises: ArgumentError for another size than that of the map, and where it has yet to see keys.
        """
        if self.dim is None:
            params = dict(_drawn(self, dim))
        elif self.dim != dim:
            raise ArgumentError(
                f"attention: {type(self.features).__name__} features have been made for heads of size {self.dim}, and "
                f"meet one of {dim}. Declare dim={dim}, or leave it open and use the operator in nn.Attention, which "
                "gives its own."
            )
        if not torch.compiler.is_compiling() and any(bool(params[name].isnan().any()) for name in self.features.chosen):
            raise ArgumentError(
                f"attention: {type(self.features).__name__} features choose {', '.join(self.features.chosen)} from "
                "keys, and have seen none. Use operator.fit(k) with keys (batch, key heads, tokens, dim) as they come "
                "to it."
            )
        return params

    def _ready(self, x: Tensor) -> Tensor:
        if self.scaled:
            x = x * x.shape[-1] ** -0.25
        return unit(x) if self.features.unit else x

    def moves(self) -> tuple[Move, ...]:
        claim = self.features.claim
        name = f"{type(self.features).__name__} features"
        if claim.kind == "exact":
            exact = Derived("exact features", "hence it is exact: a dot product of finitely many numbers")
            return (self.move("restriction", name, f"the kernel is theirs: {claim.text}", exact),)
        if claim.kind == "learned":
            text = f"the kernel is a dot product of features that learn: {claim.text}"
            return (self.move("restriction", name, text),)
        return (self.move("approximation", name, f"the kernel is meant, not exact ({claim.kind}): {claim.text}"),)


@constant_kept(16)  # an operator asks several times, and landmarks take a while
def _drawn(score: Features, dim: int | None) -> tuple[tuple[str, Tensor], ...]:
    """The initial numbers for heads of ``dim`` numbers: pairs, as torch.compile cannot read a dict that is constant."""
    if dim is None:
        return ()
    with concrete():
        return tuple(score.features.start(dim, score.heads, seed=score.seed or 0).items())


__all__ = ["Features"]
