"""One name, one colour and one marker for each operator, the same in every chart, table and page.

The colours start from Okabe and Ito's palette, which people with colour-blindness tell apart; each has a darker value
for a light page and a lighter one for a dark page. Markers and dashes repeat the distinction without colour.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from zonal.mechanisms import MECHANISMS


@dataclass(frozen=True)
class Look:
    """How an operator is drawn: CSS colours for light and dark pages, a plotly marker and a plotly dash."""

    light: str
    dark: str
    symbol: str
    dash: str


LOOKS = (
    Look("#4d4d4d", "#cfcac0", "circle", "solid"),
    Look("#0067b1", "#5cb0f2", "square", "solid"),
    Look("#c4500a", "#f28c50", "diamond", "solid"),
    Look("#007f5c", "#41c99c", "triangle-up", "solid"),
    Look("#b03a86", "#ec95c9", "cross", "solid"),
    Look("#9a6f00", "#e3b740", "triangle-down", "solid"),
    Look("#5f49b8", "#ad9af5", "star", "solid"),
    Look("#8c1d3f", "#e8708f", "x", "dash"),
    Look("#18839f", "#7fd3ea", "hexagon", "dash"),
    Look("#66700e", "#c3cd5c", "pentagon", "dash"),
    Look("#7a5637", "#cba27d", "bowtie", "dot"),
    Look("#2b5d34", "#93c79a", "hourglass", "dot"),
    Look("#3b3fbf", "#9aa0ff", "triangle-left", "dashdot"),
    Look("#a8382c", "#f19a90", "triangle-right", "dashdot"),
    Look("#3f716e", "#8fd0cb", "star-diamond", "dashdot"),
    Look("#7b3f8c", "#d3a2e0", "triangle-ne", "dashdot"),
    Look("#5a6b00", "#b5cc3a", "triangle-sw", "dot"),
    Look("#a3195b", "#f58ab8", "triangle-se", "dot"),
    Look("#1f6f8b", "#86c5da", "triangle-nw", "dash"),
    Look("#6b4a9e", "#bfa3ec", "diamond-tall", "dot"),
    Look("#98502a", "#e0a884", "diamond-wide", "dashdot"),
    Look("#2f7d4f", "#8fd6ab", "hexagram", "dash"),
    Look("#8a5a00", "#dfb56a", "octagon", "dot"),
    Look("#4f5d75", "#b0bdd4", "hexagon2", "dashdot"),
    Look("#2d6a9f", "#8fc1ea", "arrow-bar-up", "dashdot"),
    Look("#8f3d2e", "#e6a091", "arrow-bar-down", "dot"),
    Look("#146b6b", "#7cc9c4", "arrow-bar-left", "dash"),
    Look("#7a4a12", "#d9b078", "arrow-bar-right", "dashdot"),
)

GROUPS = LOOKS[1:8]
"""Colours of what is no operator: spaces of a metric, groups of tokens."""

# canonical operator -> (place in LOOKS, name for people, one line for the reader)
_PLACES = {
    "softmax": 0,
    "sko": 1,
    "squared_affine": 2,
    "linear": 3,
    "ska:0": 4,
    "yat": 5,
    "polynomial_square": 6,
    "ska:1": 7,
    "cosine": 8,
    "ska:2": 9,
    "ridge": 10,
    "slay": 12,
    "performer": 13,
    "hedgehog": 14,
    "rewa": 15,
    "rewa_functional": 16,
    "rewa_operator": 17,
    "rewa_oscillatory": 18,
    "rewa_riemannian": 19,
    "rewa_topological": 20,
    "rewa_categorical": 21,
    "regime": 23,
    "sinkhorn": 24,
    "kernel_ridge": 26,
    "hyperbolic_transport": 27,
    "hierarchical": 25,
    "mixture": 22,
    "mamba2": 10,
    "mamba3": 11,
    "gated_deltanet": 12,
    "mesanet": 13,
    "gated_kalmanet": 14,
    "retention": 11,
}
"""The look of each known operator, as its place in ``LOOKS``."""
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
_SHORT = {"sq": "squared_affine"}
_SKA_DEFAULT_POWER = 1


def parse(spec: str) -> tuple[str, dict[str, object]]:
    """Name and literal arguments of a spec such as ``sko(degrees=(2, 3))``; a text that is no spec is a bare name."""
    try:
        tree = ast.parse(spec.strip(), mode="eval").body
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.args:
            return tree.func.id, {
                keyword.arg: ast.literal_eval(keyword.value) for keyword in tree.keywords if keyword.arg
            }
    except (SyntaxError, ValueError):
        return spec.strip(), {}
    return spec.strip(), {}


def _canonical(spec: str) -> tuple[str, dict[str, object]]:
    """The key of ``_PLACES`` and the arguments that it does not already say."""
    name, arguments = parse(spec)
    if name == "ska":
        power = arguments.get("power", _SKA_DEFAULT_POWER)
        return f"ska:{power}", {key: value for key, value in arguments.items() if key != "power"}
    return _SHORT.get(name, name), arguments


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
