"""A curriculum of geometries: the distances of a product open one after another, first the sphere, then the plane, then
hyperbolic space.

    stage 1: the first distance alone    stage 2: the second opens    stage 3: the rest opens    stage 4: all together

A distance that is closed has a gate of exactly 0, and nothing of it moves: not its gate and weight, nor the rows of
queries and keys that it is measured on. One that has just opened learns at a tenth of the learning rate, until the next
stage. The stage is a function of the step alone, and a closed gate is a parameter like any other, so that a run which
goes on from its checkpoint needs no more.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zonal import mechanisms
from zonal.algebra.metric import Euclidean, Hyperbolic, Metric, Product, Sphere
from zonal.algebra.operator import Operator
from zonal.algebra.score import NegativeDistance
from zonal.errors import ArgumentError
from zonal.models.layers import operators_in
from zonal.nn import Attention

NEWLY_OPENED = 0.1
"""Of the learning rate, for what the present stage opened."""
STAGES = 4
_ORDER: tuple[type[Metric], ...] = (Sphere, Euclidean, Hyperbolic)


@dataclass(frozen=True)
class _Share:
    """A parameter of which each number belongs to a distance: ``place`` (as its gradient broadcasts) is that
    distance's, -1 = none's.
    """

    parameter: Tensor
    place: Tensor


class Curriculum:
    """What of a model's gated products may learn, and how fast, by stage.

    starts: the parts of the run after which stages 2, 3 and 4 begin. steps: of the run.
    Without gates in the model (``gated``) it changes nothing.
    """

    def __init__(self, model: nn.Module, starts: tuple[float, ...], steps: int) -> None:
        self._begins = [round(start * steps) for start in starts]
        self._layers = gated(model)
        self._shares = [share for layer in self._layers for share in _shares(layer)]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to open."""
        return not self._layers

    def stage(self, step: int) -> int:
        """1 to 4: the stage of the update that follows ``step`` finished ones."""
        return 1 + sum(step >= begin for begin in self._begins)

    @torch.no_grad()
    def close(self) -> None:
        """Shut all gates but those of the first stage, as a run begins."""
        for layer in self._layers:
            gate = layer.operator.learned_parts["score_gate"]
            gate.masked_fill_(_places(_product(layer.operator)).to(gate.device) > 0, 0)

    def hold(self, step: int) -> None:
        """Take the gradient from what is closed: it neither moves, nor counts in the norm, nor is remembered by the
        optimiser.
        """
        for share, rate in self._rated(step):
            if share.parameter.grad is not None:
                share.parameter.grad.masked_fill_(rate == 0, 0)

    @contextlib.contextmanager
    def paced(self, step: int) -> Iterator[None]:
        """Around an optimiser's step: each number goes its distance's part of the way. For AdamW that is its learning
        rate, decay included.
        """
        before = [(share.parameter, rate, share.parameter.detach().clone()) for share, rate in self._rated(step)]
        yield
        with torch.no_grad():
            for parameter, rate, old in before:
                parameter.copy_(torch.where(rate == 1, parameter, old + rate * (parameter - old)))

    def told(self, step: int) -> dict[str, object]:
        """The stage and the mean gate of each distance over heads and layers, for a line of the log."""
        if self.empty:
            return {}
        gates: dict[str, list[Tensor]] = {}
        for layer in self._layers:
            found = layer.operator.learned_parts["score_gate"].detach().clamp_min(0)
            for index, factor in enumerate(_product(layer.operator).factors):
                gates.setdefault(type(factor).__name__.lower(), []).append(found[:, index].double().mean())
        return {
            "stage": self.stage(step),
            "gates": {name: torch.stack(values).mean().item() for name, values in gates.items()},
        }

    def _rated(self, step: int) -> Iterator[tuple[_Share, Tensor]]:
        """The parameters that do not all learn at the full rate, with the rate of each number."""
        stage = self.stage(step)
        if stage == STAGES:
            return
        rates = [
            0.0 if place >= stage else NEWLY_OPENED if place == stage - 1 > 0 else 1.0 for place in range(STAGES - 1)
        ]
        for share in self._shares:
            # the last is what place -1 means
            yield share, share.parameter.new_tensor([*rates, 1.0])[share.place]


def gated(model: nn.Module) -> list[Attention]:
    """The layers of attention whose distances have gates."""
    return [layer for layer in model.modules() if isinstance(layer, Attention) and has_gates(layer.operator)]


def has_gates(operator: Operator) -> bool:
    """Whether an operator measures a product of distances with gates."""
    score = operator.score
    return isinstance(score, NegativeDistance) and isinstance(score.metric, Product) and score.metric.gates is not None


def any_gated(layers: Iterable[str]) -> bool:
    """Whether an operator of some layers, given by their specs, has gates."""
    return any(has_gates(mechanisms.resolve(spec)) for layer in layers for spec in operators_in(layer))


def check(layers: Iterable[str], call: str) -> None:
    """Refuse a curriculum for layers none of which has gates. Raises: ArgumentError beginning with ``call``."""
    if not any_gated(layers):
        raise ArgumentError(
            f"{call}: a curriculum opens the gates of distances, and no operator here has any. "
            "Give one that has, such as rewa(gates=(0.0, 1.0, 0.0))."
        )


def _product(operator: Operator) -> Product:
    assert isinstance(operator.score, NegativeDistance)
    assert isinstance(operator.score.metric, Product)
    return operator.score.metric


def _places(product: Product) -> Tensor:
    """(factors,) the stage before which each distance is closed, less one: 0, 1 or 2 by the order sphere, plane,
    hyperbolic space, others.
    """
    rank = [
        next((i for i, kind in enumerate(_ORDER) if isinstance(factor, kind)), len(_ORDER))
        for factor in product.factors
    ]
    order = sorted(range(len(rank)), key=lambda index: rank[index])
    return torch.tensor([min(order.index(index), STAGES - 2) for index in range(len(rank))], dtype=torch.int64)


def _shares(layer: Attention) -> Iterator[_Share]:
    operator, device = layer.operator, layer.query.weight.device
    product = _product(operator)
    places = _places(product).to(device)
    for name in ("score_gate", "score_weight"):
        if name in operator.learned_parts:
            yield _Share(operator.learned_parts[name], places)
    if layer.lift is not None:
        return  # every number of a lifted vector is made of all
    sizes = torch.tensor(product.parts(product.width(layer.key_dim)), device=device, dtype=torch.int64)
    first = layer.key_dim - product.width(layer.key_dim)
    # what is in front belongs to no distance, and deaths behind are not projected
    rows = torch.cat([places.new_full((first,), -1), places.repeat_interleave(sizes)])[: layer.qk_dim]
    for linear, heads in dict.fromkeys([(layer.query, layer.heads), (layer.key, layer.kv_heads)]):
        yield _Share(linear.weight, rows.repeat(heads)[:, None].expand_as(linear.weight))
        if linear.bias is not None:
            yield _Share(linear.bias, rows.repeat(heads))
