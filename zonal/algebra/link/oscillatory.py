"""Decaying waves of a distance."""

from dataclasses import dataclass

import torch
from torch import Tensor

from zonal.algebra.declaration import Derived, Move, require, row
from zonal.algebra.link.base import Link
from zonal.algebra.score import Params

_MOST = 80.0


@dataclass(frozen=True)
class Oscillatory(Link):
    """l(x) = exp(sum_k a_k e^(-b_k d) cos(w_k d)) of a distance d = max(-x, 0): evidence that oscillates and decays.

    Use it with ``NegativeDistance`` scores. amplitudes a of any sign, decays b > 0, frequencies w: one learned set per
    head. l lies between e^-A and e^A, with A the sum of |a|: at most 80 as given, while learned amplitudes may grow.

    Raises: ArgumentError for lists of unequal length, decays <= 0, and A > 80. Source: REWA (004).
    """

    positive = True

    amplitudes: tuple[float, ...] = (1.0,)
    decays: tuple[float, ...] = (0.5,)
    frequencies: tuple[float, ...] = (3.0,)
    learn: bool = True

    def __post_init__(self) -> None:
        for name in ("amplitudes", "decays", "frequencies"):
            object.__setattr__(self, name, tuple(float(v) for v in getattr(self, name)))
        same = 0 < len(self.amplitudes) == len(self.decays) == len(self.frequencies)
        require(
            same and all(v > 0 for v in self.decays),
            f"Oscillatory: as many amplitudes, decays > 0 and frequencies are required, received {self.amplitudes}, "
            f"{self.decays}, {self.frequencies}.",
        )
        require(
            sum(map(abs, self.amplitudes)) <= _MOST,
            f"Oscillatory: the sum of |amplitudes| must be at most {_MOST:g}, because e^89 is infinite in float32, "
            f"received {self.amplitudes}.",
        )

    @property
    def operations(self) -> int:
        return 8 * len(self.amplitudes) + 1

    def indefinite_reason(self, unit: bool, dim: int | None) -> str:
        return "link Oscillatory swings, and is positive definite for no more than some numbers; use link.Exp()"

    def initial(self) -> dict[str, Tensor]:
        if not self.learn:
            return {}
        return {
            "amplitude": row(*self.amplitudes)[None],
            "log_decay": row(*self.decays)[None].log(),
            "frequency": row(*self.frequencies)[None],
        }

    def coefficients(self, params: Params) -> Tensor:
        values = (self.amplitudes, self.decays, self.frequencies)
        rows = (
            [params["amplitude"].double(), params["log_decay"].double().exp(), params["frequency"].double()]
            if self.learn
            else [torch.tensor([v], dtype=torch.float64) for v in values]
        )
        return torch.cat(rows, 1).T[:, :, None, None]

    def _waves(self, x: Tensor, c: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]]:
        """d, and for each wave its a, b, w, e^(-b d) cos(w d) and e^(-b d) sin(w d)."""
        distance = (-x).clamp_min(0)
        found = []
        for a, b, w in zip(*c.chunk(3), strict=True):
            fade = (-b * distance).exp()
            found.append((a, b, w, fade * (w * distance).cos(), fade * (w * distance).sin()))
        return distance, found

    def value(self, x: Tensor, c: Tensor) -> Tensor:
        return sum((a * even for a, _, _, even, _ in self._waves(x, c)[1]), torch.zeros_like(x)).exp()

    def derivative(self, x: Tensor, c: Tensor) -> Tensor:
        waves = self._waves(x, c)[1]
        slope = sum((a * (b * even + w * odd) for a, b, w, even, odd in waves), torch.zeros_like(x))
        return slope * sum((a * even for a, _, _, even, _ in waves), torch.zeros_like(x)).exp() * (x <= 0)

    def coefficient_vjp(self, x: Tensor, grad: Tensor, c: Tensor) -> Tensor:
        distance, waves = self._waves(x, c)
        grad = grad * self.value(x, c)
        pulls = (
            [even for *_, even, _ in waves],
            [-a * distance * even for a, _, _, even, _ in waves],
            [-a * distance * odd for a, *_, odd in waves],
        )
        sums = torch.stack([(grad * pull).sum((-1, -2)) for kind in pulls for pull in kind])
        return sums.double().sum(1)[:, :, None, None]

    def moves(self) -> tuple[Move, ...]:
        bounded = Derived("bounded link", "hence e^-A <= K <= e^A, A the sum of the waves' |amplitudes|")
        text = f"evidence swings with distance and fades, in {len(self.amplitudes)} waves"
        return (self.move("restriction", "waves", text, bounded),)


__all__ = ["Oscillatory"]
