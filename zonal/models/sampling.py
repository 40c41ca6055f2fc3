"""Sampling of the next token, and stop sequences."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from operator import index

import torch
from torch import Tensor

from zonal.errors import ArgumentError, NonFiniteError
from zonal.typed import check_fields

# logits divided by less would overflow
_COLDEST = 1e-6


def check_logits(logits: Tensor) -> None:
    """Raise NonFiniteError for logits that are NaN or +infinity."""
    if not (logits < math.inf).all():
        raise NonFiniteError(
            "generate: the logits of the next token must be numbers below infinity, received NaN or infinity. "
            "Look at the weights of the model and its memory, and try float32."
        )


@dataclasses.dataclass(frozen=True)
class Sampler:
    """The rule for drawing the next token.

    Args:
        temperature: logits are divided by it. 0: the most likely token.
        top_k: draw only from the k most likely tokens.
        top_p: draw only from the smallest set of most likely tokens whose probability reaches p.

    Raises:
        ArgumentError: an argument is no number, or outside its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        check_fields("generate", Sampler, vars(self))
        if self.temperature != 0 and not _COLDEST <= self.temperature < math.inf:
            raise ArgumentError(
                f"generate: temperature must be 0 (greedy) or a finite number of at least {_COLDEST:g}, received "
                f"{self.temperature}."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ArgumentError(f"generate: top_k must be at least 1 or None, received {self.top_k}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ArgumentError(f"generate: top_p must lie in (0, 1] or be None, received {self.top_p}.")

    def probabilities(self, logits: Tensor) -> Tensor:
        """logits (B, V) -> probabilities (B, V), 0 for excluded tokens. Requires temperature > 0."""
        logits = logits.double() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            # by rank and not by value, so that ties do not let more than k through
            kept = torch.zeros_like(logits, dtype=torch.bool).scatter_(
                -1, logits.topk(self.top_k, dim=-1).indices, True
            )
            logits = logits.masked_fill(~kept, -math.inf)
        probabilities = logits.softmax(dim=-1)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = probabilities.sort(dim=-1, descending=True)
            # a token stays while those before it have not yet reached p: the first always stays
            stays = ordered.cumsum(dim=-1) - ordered < self.top_p
            probabilities = torch.zeros_like(probabilities).scatter_(-1, order, ordered * stays)
            probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        return probabilities

    def draw(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """logits (B, V) -> tokens (B,).

        Raises: NonFiniteError for logits that are NaN or +infinity.
        """
        check_logits(logits)
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        return torch.multinomial(self.probabilities(logits), 1, generator=generator).squeeze(1)


class StopRule:
    """Finds the rows of a growing batch that end with a stop sequence.

    Args:
        stop: token ids, or sequences of token ids, or both.
        batch: number of rows.

    Raises:
        ArgumentError: a stop sequence is empty, or holds something other than token ids.
    """

    def __init__(self, stop: Sequence[int | Sequence[int]], batch: int) -> None:
        try:
            self.sequences = [tuple(map(index, item if isinstance(item, Iterable) else (item,))) for item in stop]
        except TypeError:
            raise ArgumentError(
                "generate: stop must be a list of token ids, or of sequences of token ids, such as [3, (5, 7)], "
                f"received {stop!r}. Encode a text by the tokenizer first."
            ) from None
        if not all(self.sequences):
            raise ArgumentError(
                "generate: stop holds an empty sequence. Give token ids, or sequences of at least one token id."
            )
        self._keep = max(map(len, self.sequences), default=0)
        self._recent: list[list[int]] = [[] for _ in range(batch)]

    def update(self, tokens: Sequence[int]) -> list[bool]:
        """Add one token per row. Returns for each row whether it now ends with a stop sequence."""
        ended = []
        for recent, token in zip(self._recent, tokens, strict=True):
            recent.append(token)
            del recent[: max(0, len(recent) - self._keep)]
            ended.append(any(tuple(recent[-len(sequence) :]) == sequence for sequence in self.sequences))
        return ended
