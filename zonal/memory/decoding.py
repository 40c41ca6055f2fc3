"""Decoder: what goes on from a memory token by token, in place. Implemented where the kernels are
(``zonal.execution.decoder``).
"""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from torch import Tensor

from zonal.algebra import Operator
from zonal.memory.form import Form


class Decoder(abc.ABC):
    """Reads tokens that follow those of a memory, a few at each step; ``memory()`` ends it with a value again.

    Unlike a memory it is changed in place, so that a step allocates little. It looks at the learned numbers of the
    operator at each step. A step that is refused leaves it as it was. Made by ``Memory.decoder``.
    """

    operator: Operator
    form: Form
    implementation: "ClassVar[type[Decoder]]"
    """The class that ``Memory.decoder`` makes. The package ``zonal`` always has one."""

    def __init_subclass__(cls) -> None:
        Decoder.implementation = cls

    @abc.abstractmethod
    def __init__(self, memory: Any) -> None: ...

    @abc.abstractmethod
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

    @abc.abstractmethod
    def memory(self) -> Any:
        """The ``Memory`` of all tokens so far. Later steps do not change it."""

    def gather(self, index: Sequence[int] | Tensor) -> Self:
        """A decoder of the sequences ``index``, in that order; a row may be left out, or come several times. This one
        stays.
        """
        return type(self)(self.memory().gather(index))

    def fork(self) -> Self:
        """A second decoder that goes on from here by itself."""
        return type(self)(self.memory())


__all__ = ["Decoder"]
