"""One name, one colour and one marker for each operator, the same in every chart, table and page.

The colours start from Okabe and Ito's palette, which people with colour-blindness tell apart; each has a darker value
for a light page and a lighter one for a dark page. Markers and dashes repeat the distinction without colour.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from zonal.mechanisms import MECHANISMS, SHORT


@dataclass(frozen=True)
class Look:
    """How an operator is drawn: CSS colours for light and dark pages, a plotly marker and a plotly dash; and the
    operators that are drawn like this, of which one page seldom has two.
    """

    light: str
    dark: str
    symbol: str
    dash: str
    operators: str = ""


LOOKS = (
    Look("#4d4d4d", "#cfcac0", "circle", "solid", "softmax"),
    Look("#0067b1", "#5cb0f2", "square", "solid", "sko"),
    Look("#c4500a", "#f28c50", "diamond", "solid", "squared_affine"),
    Look("#007f5c", "#41c99c", "triangle-up", "solid", "linear"),
    Look("#b03a86", "#ec95c9", "cross", "solid", "ska:0"),
    Look("#9a6f00", "#e3b740", "triangle-down", "solid", "yat"),
    Look("#5f49b8", "#ad9af5", "star", "solid", "polynomial_square"),
    Look("#8c1d3f", "#e8708f", "x", "dash", "ska:1"),
    Look("#18839f", "#7fd3ea", "hexagon", "dash", "cosine"),
    Look("#66700e", "#c3cd5c", "pentagon", "dash", "ska:2"),
    Look("#7a5637", "#cba27d", "bowtie", "dot", "ridge mamba2"),
    Look("#2b5d34", "#93c79a", "hourglass", "dot", "mamba3 retention"),
    Look("#3b3fbf", "#9aa0ff", "triangle-left", "dashdot", "slay gated_deltanet"),
    Look("#a8382c", "#f19a90", "triangle-right", "dashdot", "performer mesanet"),
    Look("#3f716e", "#8fd0cb", "star-diamond", "dashdot", "hedgehog gated_kalmanet"),
    Look("#7b3f8c", "#d3a2e0", "triangle-ne", "dashdot", "rewa"),
    Look("#5a6b00", "#b5cc3a", "triangle-sw", "dot", "rewa_functional"),
    Look("#a3195b", "#f58ab8", "triangle-se", "dot", "rewa_operator"),
    Look("#1f6f8b", "#86c5da", "triangle-nw", "dash", "rewa_oscillatory"),
    Look("#6b4a9e", "#bfa3ec", "diamond-tall", "dot", "rewa_riemannian"),
    Look("#98502a", "#e0a884", "diamond-wide", "dashdot", "rewa_topological"),
    Look("#2f7d4f", "#8fd6ab", "hexagram", "dash", "rewa_categorical"),
    Look("#8a5a00", "#dfb56a", "octagon", "dot", "mixture"),
    Look("#4f5d75", "#b0bdd4", "hexagon2", "dashdot", "regime"),
    Look("#2d6a9f", "#8fc1ea", "arrow-bar-up", "dashdot", "sinkhorn"),
    Look("#8f3d2e", "#e6a091", "arrow-bar-down", "dot", "hierarchical"),
    Look("#146b6b", "#7cc9c4", "arrow-bar-left", "dash", "kernel_ridge"),
    Look("#7a4a12", "#d9b078", "arrow-bar-right", "dashdot", "hyperbolic_transport"),
    Look("#a0522d", "#e8b08a", "star-square", "dash", "local_global"),
)

GROUPS = LOOKS[1:8]
"""Colours of what is no operator: spaces of a metric, groups of tokens."""

_PLACES = {name: place for place, look in enumerate(LOOKS) for name in look.operators.split()}
_VARIANTS = {
    "ska:0": (
        "Ridge (SKA K=0)",
        "each read solves a regularised least-squares fit from the keys seen so far to their values; constant memory.",
    ),
    "ska:1": (
        "SKA K=1",
        "a least-squares fit as in ridge, read one learnt step further: it recalls what came after a key. "
        "Constant memory.",
    ),
    "ska:2": ("SKA K=2", "as SKA K=1, two steps further."),
    "mixture": ("Mixture", "several geometries in one layer; each token decides how much of each it takes."),
    "mamba2": ("Mamba-2", "a state that fades by an amount each token chooses; constant memory."),
    "mamba3": ("Mamba-3", "as Mamba-2, with a complex state and a finer rule of integration."),
    "gated_deltanet": (
        "Gated DeltaNet",
        "a matrix that fades and is corrected at each token towards the token's value; constant memory.",
    ),
    "mesanet": ("MesaNet", "each read solves a least-squares fit that fades, by conjugate gradients; constant memory."),
    "gated_kalmanet": (
        "Gated KalmaNet",
        "each read solves a least-squares fit that fades, its regulariser following the keys; constant memory.",
    ),
}
"""Label and line of what is no mechanism of its own; mechanisms bring theirs."""
_SKA_DEFAULT_POWER = 1


def parse(spec: str) -> tuple[str, dict[str, object]]:
    """Name and literal arguments of a spec such as ``sko(degrees=(2, 3))``; a text that is no spec is a bare name."""
    try:
        tree = ast.parse(spec.strip(), mode="eval").body
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.args:
            return tree.func.id, {each.arg: ast.literal_eval(each.value) for each in tree.keywords if each.arg}
    except (SyntaxError, ValueError):
        pass
    return spec.strip(), {}


def _canonical(spec: str) -> tuple[str, dict[str, object]]:
    """The key of ``_PLACES`` and the arguments that it does not already say."""
    name, arguments = parse(spec)
    if name == "ska":
        power = arguments.get("power", _SKA_DEFAULT_POWER)
        return f"ska:{power}", {key: value for key, value in arguments.items() if key != "power"}
    return SHORT.get(name, name), arguments


def label(spec: str) -> str:
    """``softmax`` → Softmax, ``ska(power=0)`` → Ridge, ``sko(degrees=(2, 3))`` → SKO (degrees=(2, 3)); a new name as it
    is.
    """
    key, rest = _canonical(spec)
    words = _words(key)
    name = words[0] if words else spec if not rest else parse(spec)[0]
    if key.startswith("ska:") and words is None:
        name = f"SKA K={key.removeprefix('ska:')}"
    return f"{name} ({', '.join(f'{k}={v}' for k, v in rest.items())})" if rest else name


def explanation(spec: str) -> str | None:
    """One line on what the operator does, for readers who meet it for the first time."""
    words = _words(_canonical(spec)[0])
    return words[1] if words else None


def _words(key: str) -> tuple[str, str] | None:
    """Label and line of a known operator."""
    found = MECHANISMS.get(key)
    return _VARIANTS.get(key) if found is None else (found.label, found.line)


def looks(specs: Sequence[str]) -> dict[str, Look]:
    """A look for every spec: a known operator has its own; variants and new names take what the page leaves free, in
    order.
    """
    chosen: dict[str, Look] = {}
    taken: set[int] = set()
    unique = list(dict.fromkeys(specs))
    plain = [spec for spec in unique if not _canonical(spec)[1]]
    for spec in plain + [spec for spec in unique if spec not in plain]:
        key, _ = _canonical(spec)
        if key in _PLACES and _PLACES[key] not in taken:
            taken.add(_PLACES[key])
            chosen[spec] = LOOKS[_PLACES[key]]
    # those easiest to tell apart come first, softmax's grey last
    free = [place for place in (*range(1, len(LOOKS)), 0) if place not in taken]
    for index, spec in enumerate(spec for spec in unique if spec not in chosen):
        chosen[spec] = LOOKS[free[index % len(free)] if free else index % len(LOOKS)]
    return {spec: chosen[spec] for spec in unique}
