"""The table of routes: for every implementation of every path, what it refuses, its cost, and what runs it.

A path is a way to compute y (``PATHS``): dense, tiled, chunked, streaming or sparse. A route is one implementation of a
path for one kind of device. The planner ranks routes, and ``zonal.explain`` lists them. When a kernel cannot be built,
the next route in the ranking runs. To add a route, write it and add its row here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from zonal import torch_func
from zonal.execution import work
from zonal.execution.call import Call, Result, following
from zonal.execution.paths import (
    chunked,
    distance,
    local_global,
    ridge,
    sparse,
    streaming,
    sums,
    tile,
    tiled,
    transport,
    tree,
)
from zonal.execution.paths.dense import dense
from zonal.execution.paths.steps.ridge import ridge_refusal
from zonal.execution.paths.steps.sums import sums_refusal
from zonal.execution.paths.steps.window import window_refusal
from zonal.execution.paths.sums import Runner
from zonal.execution.shape import Shape
from zonal.execution.work import Work
from zonal.memory import KeyValues


@dataclass(frozen=True, eq=False)
class Route:
    """One implementation of a path.

    refuse: why it cannot run a call that its path can run, with advice, or None.
    work: what it computes and moves, from shapes alone.
    rate: multiply-adds per second on a typical processor, scaled by what is measured of a machine.
    family: the anchors that it is for (``Tags.family``), "" = any.
    cuda: True = for CUDA devices only, False = for all others only, None = for any.
    runner: the kernel with everything that follows from a call except q, k and v, as a ``Plan`` keeps it; None when a
        call needs more than the kernel.
    sources: the C++ sources of ``zonal/kernels/cpp`` that it runs.
    """

    path: str
    name: str
    refuse: Callable[[Call], str | None]
    work: Callable[[Shape], Work]
    run: Callable[[Call], Result]
    rate: float
    family: str = ""
    cuda: bool | None = None
    runner: "Callable[[Call], Runner | None] | None" = None
    sources: tuple[str, ...] = ()

    @property
    def compiled(self) -> bool:
        """Whether a compiled kernel runs it, not torch."""
        return not self.name.startswith("torch")

    def __str__(self) -> str:
        return f"{self.path}, {self.name}"

    def __reduce__(self) -> tuple[Callable[[str, str], "Route"], tuple[str, str]]:
        return route_of, (self.path, self.name)  # pickle and copy find it in the table


# -- what keeps a path from a call -----------------------------------------------------------------


def _keys(call: Call) -> str | None:
    """Why a path that looks at every key cannot go on from a memory, or None."""
    held = call.held
    if held is None or not held.tokens or held.kind == "keys":
        return None
    return (
        f"it needs the keys themselves, and a memory of kind {held.kind!r} has only sums "
        "(one made with kind='keys' keeps them)"
    )


def _dropout(call: Call, path: str) -> str | None:
    """Why a path cannot set weights of a call to zero (dropout), or None."""
    if not call.dropout or path == "dense":
        return None
    return (
        "it never holds the weights that dropout sets to zero. Set dropout to 0, and apply nn.Dropout to what the "
        "layer returns"
    )


def _tangents(path: str) -> str | None:
    """Why a path cannot carry the tangents of forward-mode derivatives, where some may come, or None."""
    return "it has no forward-mode derivative" if path != "dense" and torch_func.forward() else None


_ASKS = "it asks for numbers on the way, which the transforms of torch.func cannot give"
_OWN = "its gradients are its own, which the transforms of torch.func do not know"


def _untransformed(why: str) -> str | None:
    """``why`` torch.func's transforms (vmap, grad, jvp, …) cannot pass through, where one is at work."""
    return why if torch_func.active() else None


def _dense(call: Call) -> str | None:
    asks = call.tags.couples or call.tags.solves
    return _keys(call) or (_untransformed(_ASKS) if asks else None)


def _tiled(call: Call) -> str | None:
    return tiled.refusal(call) or _keys(call) or (_untransformed(_ASKS) if call.tags.couples else None)


def _chunked(call: Call) -> str | None:
    return chunked.refusal(call) or _untransformed(_OWN)


def _streaming(call: Call) -> str | None:
    return streaming.refusal(call) or _untransformed(_ASKS)


def _sparse(call: Call) -> str | None:
    return sparse.refusal(call) or _keys(call) or _untransformed(_OWN)


PATHS: dict[str, Callable[[Call], str | None]] = {
    "dense": _dense,
    "tiled": _tiled,
    "chunked": _chunked,
    "streaming": _streaming,
    "sparse": _sparse,
}
"""What keeps each path from a call, whatever implements it: a sentence with what would help, or None."""

# -- what keeps an implementation from a call ------------------------------------------------------


def _never(call: Call) -> str | None:
    return None


def _tiles(call: Call) -> str | None:
    """Why the kernel of tiles does not run a call: a distance has its own kernel."""
    if not call.bound.score.bilinear and distance.refusal(call) is None:
        return "the kernel of distances takes it"
    return tile.refusal(call)


def _distances(call: Call) -> str | None:
    """Why the kernel of distances does not run a call: a plain product is no distance."""
    return "its score is a dot product" if call.bound.score.bilinear else distance.refusal(call)


def _torch_tiles(call: Call) -> str | None:
    return _untransformed("torch's tiles do not know the transforms of torch.func")


# -- running them ----------------------------------------------------------------------------------


def _whole(run: Callable[[Call], Tensor]) -> Callable[[Call], Result]:
    """What looks at every key, with those of a memory before the call's own."""

    def result(call: Call) -> Result:
        if call.memory is None:
            return run(call), None
        if isinstance(call.memory, KeyValues):
            y = run(following(call, call.memory.tokens))
        else:  # an empty memory of sums
            y = run(call)
        return y, call.memory.extended(call.new_tokens)

    return result


# Multiply-adds per second of each kind of route on a typical processor, measured on an AMD EPYC with two cores.
_TORCH = 5e10
_TILES, _DISTANCES, _SUMS, _RIDGE, _STEPS, _RIDGE_STEPS, _SPARSE = 1.1e11, 6e10, 1.15e11, 1.4e11, 5e10, 2e10, 6e10
ROUTES: tuple[Route, ...] = (
    Route("dense", "torch", _never, work.dense, _whole(dense), _TORCH),
    Route("tiled", "C++", _tiles, work.compiled_tiles, _whole(tile.tiled), _TILES, "sums", False,
          sources=("tile", "features")),
    Route("tiled", "Triton", _tiles, work.compiled_tiles, _whole(tile.tiled), _TILES, "sums", True),
    Route("tiled", "C++ distances", _distances, work.distances, _whole(distance.tiled), _DISTANCES, "sums", False,
          sources=("distance",)),
    Route("tiled", "Triton distances", _distances, work.distances, _whole(distance.tiled), _DISTANCES, "sums", True),
    Route("tiled", "torch", _torch_tiles, work.tiles, _whole(tiled.tiled), _TORCH, "sums"),
    Route("tiled", "C++ plan", transport.refusal, work.plan_compiled, _whole(transport.compiled), _TILES, "plan",
          sources=("tile",)),
    Route("tiled", "torch plan", _never, work.plan_tiles, _whole(transport.by_torch), _TORCH, "plan"),
    Route("tiled", "torch tree", _never, work.tree, _whole(tree.hierarchical), _TORCH, "tree"),
    Route("chunked", "C++ sums", sums.refusal, work.compiled_sums, sums.chunked, _SUMS, "sums", False, sums.runner,
          ("sums", "features")),
    Route("chunked", "Triton sums", sums.refusal, work.compiled_sums, sums.chunked, _SUMS, "sums", True),
    Route("chunked", "torch sums", _never, work.sums, chunked.chunked, _TORCH, "sums"),
    Route("chunked", "C++ window and sums", local_global.refusal, work.compiled_window, local_global.compiled, _SUMS,
          "window", False, sources=("tile", "sums")),
    Route("chunked", "torch window and sums", _never, work.window, local_global.by_torch, _TORCH, "window"),
    Route("chunked", "C++ ridge", ridge.refusal, work.compiled_ridge, ridge.chunked, _RIDGE, "ridge", False,
          ridge.runner, ("ridge",)),
    Route("chunked", "Triton ridge", ridge.refusal, work.compiled_ridge, ridge.chunked, _RIDGE, "ridge", True),
    Route("chunked", "torch ridge", _never, work.ridge, chunked.chunked, _TORCH, "ridge"),
    Route("streaming", "C++ sums", sums_refusal, work.compiled_steps, streaming.by_kernel, _STEPS, "sums",
          False, sources=("decode",)),
    Route("streaming", "C++ window and sums", window_refusal, work.compiled_window_steps, streaming.by_kernel,
          _STEPS, "window", False, sources=("decode",)),
    Route("streaming", "C++ ridge", ridge_refusal, work.compiled_ridge_steps, streaming.by_kernel,
          _RIDGE_STEPS, "ridge", False, sources=("ridge_decode",)),
    Route("streaming", "torch", _never, work.steps, streaming.by_torch, _TORCH),
    Route("sparse", "C++", sparse.kernel_refusal, work.compiled_candidates, _whole(sparse.compiled), _SPARSE, "",
          False, sources=("sparse",)),
    Route("sparse", "torch", _never, work.candidates, _whole(sparse.by_torch), _TORCH),
)  # fmt: skip
"""Every implementation; of one path the first that does not refuse comes first where estimates are equal."""


def route_of(path: str, name: str) -> Route:
    """The route of a path that has this name."""
    return next(route for route in ROUTES if (route.path, route.name) == (path, name))


class Asked(NamedTuple):
    """What the table says of a call. routes: those that do not refuse. refused: path -> why none of its routes can run.
    without: route that refuses -> why."""

    routes: tuple[Route, ...]
    refused: dict[str, str]
    without: dict[Route, str]


def asked(call: Call, path: str | None = None) -> Asked:
    """Ask every path (or one), and every route of those that can run the call, once."""
    asked_for = PATHS if path is None else (path,)
    reasons = {name: _dropout(call, name) or _tangents(name) or PATHS[name](call) for name in asked_for}
    routes: list[Route] = []
    without: dict[Route, str] = {}
    family, cuda = call.tags.family, call.device.type == "cuda"
    for route in ROUTES:
        if reasons.get(route.path, "") is not None or route.family not in ("", family):
            continue
        if route.cuda is not None and route.cuda is not cuda:
            continue
        why = route.refuse(call)
        if why is None:
            routes.append(route)
        else:
            without[route] = why
    refused = {name: why for name, why in reasons.items() if why is not None}
    for name in reasons.keys() - refused.keys() - {route.path for route in routes}:
        own = [f"{why} ({route.name})" for route, why in without.items() if route.path == name]
        refused[name] = "; ".join(own) or "no route of it is for this anchor on this device"
    return Asked(tuple(routes), refused, without)


__all__ = ["PATHS", "ROUTES", "Asked", "Route", "asked"]
