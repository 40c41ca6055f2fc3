"""The layers of a model by name: operators for attention layers, recurrences, and lists of layers in one string."""

import itertools
import re
from collections.abc import Callable, Sequence

import torch

from zonal import mechanisms
from zonal.errors import ArgumentError, unknown_name
from zonal.mechanisms import spec as specs
from zonal.memory.weights import weighs_keys
from zonal.nn import GatedDeltaNet, GatedKalmaNet, Mamba2, Mamba3, MesaNet, Mixture, TokenMixer

RECURRENCES: dict[str, Callable[..., TokenMixer]] = {
    "mamba2": Mamba2, "mamba3": Mamba3, "mesanet": MesaNet, "gated_kalmanet": GatedKalmaNet,
    "gated_deltanet": GatedDeltaNet,
}  # fmt: skip
MIXTURE = "mixture"
LIFTED = "lifted"
GATED = "gated"
MOST_LAYERS = 4096
_OPEN, _CLOSE = "([{", ")]}"


def split(text: str, call: str) -> tuple[str, ...]:
    """``"softmax,sko(degrees=(2,3))"`` → its parts. Commas inside brackets and quotation marks do not separate.

    Raises:
        ArgumentError: brackets do not close, or a part is empty. The message begins with ``call``.
    """
    found: list[str] = []
    part, depth, quote = "", 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in _OPEN:
            depth += 1
        elif letter in _CLOSE:
            depth -= 1
            if depth < 0:
                raise ArgumentError(f"{call}: {text!r} has a closing {letter!r} without an opening one.")
        if letter == "," and not depth and not quote:
            found.append(part.strip())
            part = ""
        else:
            part += letter
    if depth or quote:
        raise ArgumentError(
            f"{call}: {text!r} has an unclosed {'quotation mark' if quote else 'bracket'}. Quote the list in the "
            f"shell: '{text}'."
        )
    found.append(part.strip())
    if not all(found):
        raise ArgumentError(
            f"{call}: {text!r} has an empty entry. Write names separated by commas, such as softmax,sko."
        )
    return tuple(found)


def layer_list(text: str, call: str = "layers") -> tuple[str, ...]:
    """One spec per layer from one string: ``"mamba2*3, ska(power=0), mamba2*3"`` → seven specs. The list may stand in
    square brackets.

    Raises:
        ArgumentError: the string cannot be read, or a layer is repeated less than once. The message begins with
            ``call``.
    """
    text = text.strip()
    inside = text[1:-1] if is_list(text) else text
    found: list[str] = []
    for part in split(inside, call):
        spec, times = _repeated(part)
        if times < 1:
            raise ArgumentError(f"{call}: {part!r} must be repeated at least once.")
        if len(found) + times > MOST_LAYERS:
            raise ArgumentError(
                f"{call}: a model has at most {MOST_LAYERS:,} layers, and {part!r} asks for more. Repeat it less often."
            )
        found += [spec] * times
    return tuple(found)


def canonical_layers(entry: str) -> tuple[str, ...]:
    """``layer_list``, alike for entries that differ in spaces, quotation marks or the brackets of the list alone."""
    return tuple(specs.written(layer) for layer in layer_list(entry))


def declarations(layers: Sequence[str]) -> tuple[str, ...]:
    """What the layers declare: alike for specs of one operator, such as ``ska`` and ``ska(power=1)``."""
    return tuple(
        mechanisms.declaration(mechanisms.resolve(layer)) if operators_in(layer) == (layer,) else specs.written(layer)
        for layer in layers
    )


def is_list(text: str) -> bool:
    """Whether an entry among operators is a list of layers, such as ``"[mamba2*3, ska]"``."""
    return text.startswith("[") and text.endswith("]")


def layers_for(entry: str, count: int) -> tuple[str, ...]:
    """The layers of an entry of a comparison: one spec for all ``count`` layers, or a list in square brackets.

    Raises:
        ArgumentError: the list has another length.
    """
    if not is_list(entry):
        return (entry,) * count
    layers = layer_list(entry)
    if len(layers) != count:
        raise ArgumentError(
            f"layers: {entry!r} has {len(layers)} layers, the model has {count}. Give as many, or ask for a "
            f"model of {len(layers)} layers."
        )
    return layers


def entry_of(layers: Sequence[str]) -> str:
    """The entry that ``layers_for`` reads as these layers: the spec of all layers, or a list in square brackets with
    repeats as *n.
    """
    if len(set(layers)) == 1:
        return layers[0]
    parts = [(spec, len(list(group))) for spec, group in itertools.groupby(layers)]
    return f"[{', '.join(spec if times == 1 else f'{spec}*{times}' for spec, times in parts)}]"


def mixer(
    spec: str,
    dim: int,
    attention: Callable[[str, int, int | None, bool], TokenMixer],
    share: int = 1,
    gated: bool = False,
) -> TokenMixer:
    """The token mixer of a spec: a recurrence of width ``dim``, a mixture, or an attention layer made by ``attention``.

    Args:
        spec: the name of the layer, with arguments.
        dim: the width.
        attention: makes an attention layer. It takes a spec, ``share``, the size of lifted queries and keys (None: no
            lift), and ``gated``.
        share: the number of parts of a mixture that share the heads. 1: no mixture.
        gated: whether the layer has a key gate.

    Raises:
        ArgumentError: names or arguments are unknown, or sizes do not fit.
    """
    name = specs.name_of(spec)
    if name in RECURRENCES:
        return specs.made(spec, RECURRENCES, {"dim": dim})
    inside, size = _inside(spec)
    if not inside:
        return attention(spec, share, None, gated)
    if name == LIFTED:
        return attention(inside[0], share, size, gated)
    if name == GATED:
        return mixer(inside[0], dim, attention, share, gated=True)
    return Mixture([mixer(part, dim, attention, len(inside)) for part in inside], size)


def _mixture(parts: tuple[str, ...], hidden: int = 16) -> tuple[tuple[str, ...], int]:
    """The arguments of ``mixture(parts=("rewa", "softmax"), hidden=16)``."""
    fits = (
        isinstance(parts, tuple | list)
        and len(parts) > 1
        and all(isinstance(part, str) and specs.name_of(part) != MIXTURE for part in parts)
    )
    if not fits or not isinstance(hidden, int) or hidden < 1:
        raise ArgumentError(
            "mixture: parts must be two or more specs, none of them a mixture, such as parts=('rewa', 'softmax'), "
            f"and hidden >= 1, received {parts!r} and {hidden!r}."
        )
    return tuple(parts), hidden


def _lifted(operator: str, size: int) -> tuple[tuple[str], int]:
    """The arguments of ``lifted(operator="ska(power=1, rank=4)", size=6)``: an operator, and ``Attention``'s
    ``cg_lift``.
    """
    fits = isinstance(operator, str) and specs.name_of(operator) not in mechanisms.WHOLE_LAYERS
    if not fits or not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ArgumentError(
            "lifted: an operator, such as 'ska(power=1)', and a size >= 1 that its queries and keys are lifted "
            f"to are required, received {operator!r} and {size!r}."
        )
    return (operator,), size


def _gated(operator: str) -> tuple[tuple[str], int]:
    """The argument of ``gated(operator="ska(power=1)")``: an operator that solves, lifted or not, and ``Attention``'s
    ``key_gate``.
    """
    if not isinstance(operator, str) or specs.name_of(operator) in (MIXTURE, GATED, *RECURRENCES):
        raise ArgumentError(
            f"gated: an operator, such as 'ska(power=1)' or 'lifted(operator=…)', is required, received {operator!r}."
        )
    (inner,) = operators_in(operator)
    if not weighs_keys(mechanisms.resolve(inner)):
        raise ArgumentError(
            f"gated: a key gate is for ridge and Koopman read-outs of the plain product, and {inner!r} is not one. Use "
            "ska or ridge, or leave the gate out."
        )
    return (operator,), 0


_AROUND: dict[str, Callable[..., tuple[tuple[str, ...], int]]] = {MIXTURE: _mixture, LIFTED: _lifted, GATED: _gated}


def _inside(spec: str) -> tuple[tuple[str, ...], int]:
    """The specs inside a mixture, a lifted or a gated layer, and the size beside them; none in other layers."""
    return specs.made(spec, _AROUND) if specs.name_of(spec) in _AROUND else ((), 0)


def operators_in(spec: str) -> tuple[str, ...]:
    """The operators of a layer: its spec, the spec on lifted keys, those of the parts of a mixture, or none for a
    recurrence.
    """
    if inside := _inside(spec)[0]:
        return tuple(operator for part in inside for operator in operators_in(part))
    return () if specs.name_of(spec) in RECURRENCES else (spec,)


def check(spec: str, dim: int) -> None:
    """Raise ArgumentError if no layer of width ``dim`` can be made of a spec. Recurrences are made without memory for
    their weights.
    """
    name = specs.name_of(spec)
    if name in RECURRENCES:
        with torch.device("meta"):
            specs.made(spec, RECURRENCES, {"dim": dim})
    elif inside := _inside(spec)[0]:
        for part in inside:
            check(part, dim)
    elif name not in mechanisms.names() and name not in mechanisms.SHORT:
        known = [*mechanisms.names(), *mechanisms.SHORT, *mechanisms.WHOLE_LAYERS]
        raise unknown_name("operator spec", "operator", name, known)
    else:
        mechanisms.resolve(spec)


def _repeated(part: str) -> tuple[str, int]:
    found = re.fullmatch(r"(.*?)\s*\*\s*(\d{1,18})", part, flags=re.DOTALL)
    return (part, 1) if found is None else (found[1], int(found[2]))


__all__ = [
    "canonical_layers",
    "check",
    "declarations",
    "entry_of",
    "is_list",
    "layer_list",
    "layers_for",
    "mixer",
    "operators_in",
    "split",
]
