"""Decoder: reads new tokens after those of a memory, a few per step, in place.

``zonal.execution.decoder`` implements it, because the kernels are there.
"""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor

from zonal.algebra import Operator
from zonal.memory.form import Form
from zonal.names import known_names


class Given(NamedTuple):
    """What a call may say of its tokens besides their keys and values, as in ``zonal.attention``."""

    key_padding_mask: Tensor | None = None
    log_decay: Tensor | None = None
    key_bias: Tensor | None = None
    action_mask: Tensor | None = None
    key_gate: Tensor | None = None


NOTHING = Given()


class Decoder(abc.ABC):
    """Reads tokens that follow those of a memory, a few per step. ``Memory.decoder`` makes it.

    Unlike a memory it is changed in place, so that a step allocates little. Each step reads the learned numbers of the
    operator as they then are. A step that is refused leaves the decoder as it was. ``memory()`` returns the value so
    far, as often as it is asked for; the decoder may go on afterwards.
    """

    operator: Operator
    form: Form
    implementation: "ClassVar[type[Decoder]]"
    """The class that ``Memory.decoder`` makes. The package ``zonal`` always has one."""

    @abc.abstractmethod
    def __init__(self, memory: Any) -> None: ...

    @known_names
    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        log_decay: Tensor | None = None,
        key_bias: Tensor | None = None,
        action_mask: Tensor | None = None,
        key_gate: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """What the queries of new tokens read, as ``zonal.attention`` with ``causal=True`` and the memory so far; the
        tokens are absorbed.

        Args:
            q, k, v: (B, H, T, D), (B, Hkv, T, D), (B, Hkv, T, P) of T >= 1 tokens.
            the others: as in ``zonal.attention``.

        Returns: y (B, H, T, P) in the type of q.

        Raises: ArgumentError for shapes and types that do not fit, and where a learned part of the operator has another
        shape than it had.
        """
        bare = key_padding_mask is log_decay is key_bias is action_mask is key_gate is None
        given = NOTHING if bare else Given(key_padding_mask, log_decay, key_bias, action_mask, key_gate)
        return self.advance(q, k, v, given, scale)

    @abc.abstractmethod
    def advance(self, q: Tensor, k: Tensor, v: Tensor, given: Given, scale: float | None) -> Tensor:
        """``step``; ``given`` is ``NOTHING`` where nothing was given."""

    @abc.abstractmethod
    def memory(self) -> Any:
        """The ``Memory`` of all tokens so far. Later steps do not change it."""

    def gather(self, index: Sequence[int] | Tensor) -> Self:
        """A decoder of the sequences ``index``, in that order. Rows may be left out or repeated. This one is not
        changed.
        """
        return type(self)(self.memory().gather(index))

    def fork(self) -> Self:
        """An independent decoder that continues from here."""
        return type(self)(self.memory())


__all__ = ["NOTHING", "Decoder", "Given"]
