"""A kernel as a torch operator. One declaration gives its schema, shapes for tracing, gradients and vmap rule.

A family declares its tensors as a NamedTuple, and its rules as a frozen dataclass (or NamedTuple) of plain values, the
"spec". The rules are passed as one string, so that a traced graph holds all it needs.
"""

import ast
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from zonal import torch_func
from zonal.errors import PathError
from zonal.kernels import transforms
from zonal.tracing import recorded

# to look these up among all that torch has takes longer than to call them, where other work has swept the caches
_compiling, _tracing = torch.compiler.is_compiling, torch._C._get_tracing_state
_modes, _transformed = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active

Results = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]


@dataclass
class Body:
    """A kernel on one kind of device.

    forward(inputs, spec) returns the results. backward(grads, inputs, results, spec, asked) returns a gradient per
    differentiable input, in order; None when its name is not in ``asked``. grads: of the differentiable results, or
    None.
    """

    forward: Callable[[Any, Any], Results]
    backward: Callable[[Gradients, Any, Results, Any, frozenset[str]], Gradients]


def on_cuda(forward: str, backward: str) -> Body:
    """The functions ``forward`` and ``backward`` of two modules of ``zonal.kernels.triton``.

    The modules are imported at the first call, as Triton may be missing.
    """

    def of(module: str, name: str) -> Callable[..., Any]:
        return lambda *given: getattr(importlib.import_module(f"zonal.kernels.triton.{module}"), name)(*given)

    return Body(of(forward, "forward"), of(backward, "backward"))


class Op:
    """The operators ``zonal::<name>`` and ``zonal::<name>_backward``.

    inputs: the NamedTuple of tensors, each ``Tensor`` or ``Tensor | None``. spec: the class of the rules.
    results: their number; those at the places ``fixed`` have no gradients. learned: the inputs that have gradients.
    bodies: what runs, by device. shapes(inputs, spec): empty results, for tracing. refusal: the message about second
    derivatives.
    mapped: letters of the inputs and of the results for ``transforms.rule``; without them torch.func is refused.
    laid: per input, an empty gradient where that is not contiguous.
    """

    def __init__(
        self,
        name: str,
        inputs: type[Any],
        spec: type[Any],
        *,
        results: int,
        learned: Sequence[str],
        bodies: Mapping[str, Body],
        shapes: Callable[[Any, Any], Results],
        refusal: str,
        fixed: Sequence[int] = (),
        mapped: tuple[str, str] | None = None,
        laid: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({}),
    ) -> None:
        self.name, self.inputs, self.spec, self.shapes, self.refusal = name, inputs, spec, shapes, refusal
        self._laid = laid
        self.learned, self.fixed = tuple(learned), tuple(fixed)
        self.bodies = bodies
        self._places = tuple(inputs._fields.index(name) for name in learned)
        self._moved = tuple(i for i in range(results) if i not in fixed)
        self._single = results == 1
        taken = ", ".join(f"{_schema(kind)} {name}" for name, kind in get_type_hints(inputs).items())
        given = ", ".join(f"Tensor? grad_{i}" for i in self._moved)
        kept = ", ".join(f"Tensor result_{i}" for i in range(results))
        self.operator = self._registered(name, f"{taken}, str spec", results, self._forward, self._traced)
        self.backward_operator = self._registered(
            f"{name}_backward",
            f"{given}, {taken}, {kept}, str spec, bool[] asked",
            len(learned),
            self._backward,
            self._traced_backward,
        )
        self.operator.register_autograd(self.gradients, setup_context=self._setup)
        self._transformed = self.operator if mapped is None else self._under_transforms(*mapped)

    def _under_transforms(self, inputs: str, results: str) -> Callable[..., Any]:
        moved, learned = "".join(results[i] for i in self._moved), "".join(inputs[i] for i in self._places)
        torch.library.register_vmap(self.operator, transforms.rule(self.operator, f"{inputs}-", results))
        backward = transforms.rule(self.backward_operator, f"{moved}{inputs}{results}-a", learned)
        torch.library.register_vmap(self.backward_operator, backward)
        return transforms.differentiable(
            self.operator, self._setup, self._returned, self.backward_operator, self.refusal
        )

    def __call__(self, inputs: Any, spec: Any) -> Any:
        """The results, through torch's operator when gradients, tracers or modes need it, else without its overhead."""
        if plain(inputs) and not recorded(inputs):
            return self.bodies["cpu"].forward(inputs, spec)
        operator = self._transformed if torch_func.active() else self.operator
        found = operator(*inputs, encode(spec))
        return (found,) if self._single else found

    def _registered(
        self, name: str, schema: str, count: int, body: Callable[..., Any], traced: Callable[..., Any]
    ) -> Any:
        whole = f"({schema}) -> ({', '.join(['Tensor'] * count)})"
        made = torch.library.custom_op(
            f"zonal::{name}", functools.partial(body, "cpu"), mutates_args=(), device_types="cpu", schema=whole
        )
        if "cuda" in self.bodies:
            made.register_kernel("cuda", functools.partial(body, "cuda"))
        made.register_fake(traced)
        return made

    def _forward(self, device: str, *given: Any) -> Any:
        *tensors, spec = given
        return self._out(self.bodies[device].forward(self.inputs(*tensors), decode(self.spec, spec)))

    def _traced(self, *given: Any) -> Any:
        *tensors, spec = given
        return self._out(self.shapes(self.inputs(*tensors), decode(self.spec, spec)))

    def _out(self, results: Results) -> Any:
        return results[0] if self._single else results

    def _split(self, given: Sequence[Any]) -> tuple[Gradients, Any, Results, frozenset[str]]:
        """Gradients, inputs, results and the names of what is asked for, of the arguments of ``backward_operator``."""
        first, last = len(self._moved), len(self._moved) + len(self.inputs._fields)
        asked = frozenset(name for name, wanted in zip(self.learned, given[-1], strict=True) if wanted)
        return tuple(given[:first]), self.inputs(*given[first:last]), tuple(given[last:-2]), asked

    def _backward(self, device: str, *given: Any) -> Any:
        grads, inputs, results, asked = self._split(given)
        if grads[0] is None:
            grads = (torch.zeros_like(results[self._moved[0]]), *grads[1:])
        found = self.bodies[device].backward(grads, inputs, results, decode(self.spec, given[-2]), asked)
        made = []
        for name, gradient in zip(self.learned, found, strict=True):
            x = getattr(inputs, name)
            # an operator has no None to return
            if name not in asked:
                made.append(inputs[0].new_empty(0))
            else:
                made.append(x.new_zeros(x.shape) if gradient is None else _own(gradient.to(x.dtype)))
        return tuple(made)

    def _traced_backward(self, *given: Any) -> Any:
        _, inputs, _, asked = self._split(given)
        made = []
        for name in self.learned:
            x = getattr(inputs, name)
            lies = self._laid.get(name, lambda x: x.new_empty(x.shape))
            made.append(inputs[0].new_empty(0) if name not in asked else lies(x).to(x.dtype))
        return tuple(made)

    def _setup(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """What ``gradients`` will need."""
        *tensors, ctx.spec = inputs
        results = (output,) if self._single else output
        ctx.mark_non_differentiable(*(results[i] for i in self.fixed))
        ctx.save_for_backward(*tensors, *results)
        ctx.set_materialize_grads(False)

    def gradients(self, ctx: Any, *grads: Tensor | None) -> Gradients:
        """Gradients of the arguments of ``operator``. Raises: PathError where they are to be differentiated again."""
        if torch.is_grad_enabled():
            raise PathError(self.refusal)
        return self._returned(ctx, grads, self.backward_operator)

    def _returned(self, ctx: Any, grads: Sequence[Tensor | None], backward: Callable[..., Results]) -> Gradients:
        """``gradients`` by ``backward``, which is ``backward_operator`` in some form."""
        asked = [ctx.needs_input_grad[place] for place in self._places]
        found = backward(*(grads[i] for i in self._moved), *ctx.saved_tensors, ctx.spec, asked)
        whole: list[Tensor | None] = [None] * (len(self.inputs._fields) + 1)
        for place, gradient, wanted in zip(self._places, found, asked, strict=True):
            whole[place] = gradient if wanted else None
        return tuple(whole)


def only_first(path: str) -> str:
    """The message of the backward passes that make their forward pass again, for when they are differentiated."""
    return (
        f"attention: path {path!r} makes its forward pass again in backward and has no second derivative. "
        "Use path='dense' where you need create_graph=True."
    )


def no_second_derivative(path: str) -> None:
    """Called in such a backward pass. Raises: PathError when that pass is itself differentiated."""
    if torch.is_grad_enabled():
        raise PathError(only_first(path))


def _own(x: Tensor) -> Tensor:
    """x with memory of its own: an operator's results may not share any, as parts of one buffer do."""
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


def _schema(kind: Any) -> str:
    return "Tensor" if kind is Tensor else "Tensor?"


def plain(tensors: Sequence[Tensor | None]) -> bool:
    """Whether these are CPU tensors without tracers, modes or tangents, so that a short call can skip torch's
    operators.
    """
    if _compiling() or _tracing() is not None or _modes() or _transformed() or forward_ad._current_level >= 0:
        return False
    for x in tensors:
        if x is not None and ((type(x) is not Tensor and type(x) is not torch.nn.Parameter) or not x.is_cpu):
            return False
    return True


def encode(spec: Any) -> str:
    """Rules as a string of plain values, which a tracer follows."""
    return repr(_values(spec))


def _values(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple([_values(part) for part in x])
    fields = getattr(x, "__dataclass_fields__", None)
    return x if fields is None else tuple([_values(getattr(x, name)) for name in fields])


@functools.lru_cache(maxsize=256)
def decode(kind: type[Any], text: str) -> Any:
    """What ``encode`` wrote of an object of this class."""
    return _made(kind, ast.literal_eval(text))


def _made(kind: Any, value: Any) -> Any:
    if hasattr(kind, "__dataclass_fields__") or hasattr(kind, "_fields"):
        return kind(*(_made(hint, part) for hint, part in zip(get_type_hints(kind).values(), value, strict=True)))
    if get_origin(kind) is tuple and hasattr(get_args(kind)[0], "_fields"):
        return tuple(_made(get_args(kind)[0], part) for part in value)
    return value


__all__ = ["Body", "Op", "decode", "encode", "no_second_derivative", "on_cuda", "only_first", "plain"]
