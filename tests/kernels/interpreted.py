"""Run the Triton kernels and compare: `python interpreted.py [--own] NAME…` prints one line of JSON a case.

With TRITON_INTERPRET=1 in Triton's interpreter on tensors of the CPU, else compiled, on CUDA. That is chosen when
triton is imported, so this is a process of its own. --own: in the tile sizes that the kernels choose, and not in small
ones that make every loop run more than once.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from kernels.tile_cases import CASES, LARGE, LINKS, OFF, REST, Case, Inputs, failure, inputs
from torch import Tensor
from triton.runtime import interpreter

from zonal.kernels.tile import TileInputs
from zonal.kernels.triton import forward as forwards
from zonal.kernels.triton import tiles
from zonal.kernels.triton.backward import backward
from zonal.kernels.triton.forward import forward

BROKEN = "broken"
NAN_KEY = "NaN key"


def mend() -> None:
    """What the interpreter does not do: numbers of one element as bounds of a loop (with this numpy), bfloat16 in a
    product, a check of addresses (``guard``).

    Its patches of the language are also made once and not at each call of a function, which is most of its time.
    """
    patch_tensor, patch_language, dot = (
        interpreter._patch_lang_tensor,
        interpreter._patch_lang,
        interpreter.InterpreterBuilder.create_dot,
    )
    patched: set[frozenset[int]] = set()

    class Kept:
        def restore(self) -> None:
            """Nothing is taken back: this process does nothing else."""

    def tensor(kind: type, scope: object) -> None:
        patch_tensor(kind, scope)
        scope.set_attr(kind, "__index__", lambda self: int(self.handle.data.item()))

    def language(function: object) -> Kept:
        seen = frozenset(
            id(module) for module in (tl, tl.core) if any(module is value for value in function.__globals__.values())
        )
        if seen not in patched:
            patched.add(seen)
            patch_language(function)
        return Kept()

    def wide(x: interpreter.TensorHandle) -> interpreter.TensorHandle:
        bits = x.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32) if x.dtype == tl.bfloat16 else x

    guard()
    # tensors as small as these have no addresses that overflow, and asking so takes a quarter of the time
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter._patch_lang_tensor, interpreter._patch_lang = tensor, language
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, c, *rest: dot(self, wide(a), wide(b), c, *rest)


def guard() -> None:
    """A load or store outside the tensors of its launch raises IndexError, where the interpreter would read or write
    whatever lies there and a device would stop.
    """
    start, builder = tiles.launch, interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    begins, ends = np.zeros(0, np.uint64), np.zeros(0, np.uint64)

    def launch(kernel: Any, programs: int, arguments: tuple[Any, ...], *rest: Any) -> None:
        nonlocal begins, ends
        spans = sorted(span for x in leaves(arguments) if isinstance(x, Tensor) and (span := memory_of(x)))
        begins, ends = np.array(spans, np.uint64).reshape(-1, 2).T
        start(kernel, programs, arguments, *rest)

    def check(pointers: Any, mask: Any) -> None:
        first = pointers.data[mask.data].reshape(-1)
        if not first.size:
            return
        last = first + np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        # of spans that begin no later, one that ends last
        reach = np.concatenate([np.zeros(1, np.uint64), np.maximum.accumulate(ends)])
        outside = last > reach[np.searchsorted(begins, first, "right")]
        if outside.any():
            raise IndexError(f"{int(outside.sum())} of {first.size} addresses lie outside the tensors of the launch")

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    tiles.launch, builder.create_masked_load, builder.create_masked_store = launch, checked_load, checked_store


def leaves(x: Any) -> Iterator[Any]:
    """What tuples in tuples hold."""
    if isinstance(x, tuple):
        for part in x:
            yield from leaves(part)
    else:
        yield x


def memory_of(x: Tensor) -> tuple[int, int] | None:
    """The addresses (first, end) that a tensor's numbers lie between; None where it has none."""
    if not x.numel():
        return None
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def on(device: torch.device, data: Inputs) -> Inputs:
    """The inputs there, with the same strides."""
    moved = {}
    for name, x in vars(data).items():
        moved[name] = (
            None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)
        )
    return Inputs(**moved)


def run(case: Case, data: Inputs) -> list[Tensor]:
    """y and all gradients by the kernels, on the CPU. Memory that they do not write holds NaN."""
    inputs = TileInputs(data.q, data.k, data.v, data.scale, data.coefficients, data.key_mask, data.cu_seqlens)
    spec, asked = replace(case.spec, learned=LINKS[case.link][2]), frozenset(("q", "k", "v", "scale", "coefficients"))
    with patch.object(torch, "empty", poisoned):
        results = forward(inputs, spec)
        *found, dcoefficients = backward((data.dy,), inputs, results, spec, asked)
        dc = data.scale.new_empty(len(data.scale), 0) if dcoefficients is None else dcoefficients[:, : spec.learned]
    return [x.cpu() for x in (results[0], *found, dc)]


def read(case: Case, data: Inputs) -> Tensor:
    """y alone."""
    inputs = TileInputs(data.q, data.k, data.v, data.scale, data.coefficients, data.key_mask, data.cu_seqlens)
    with patch.object(torch, "empty", poisoned):
        return forward(inputs, replace(case.spec, learned=LINKS[case.link][2]))[0].cpu()


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.empty that hands out NaN."""
    return torch.full(
        shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape,
        float("nan"),
        dtype=dtype,
        device=device,
    )


def hidden(name: str, device: torch.device) -> str | None:
    """What is wrong where a key in the middle is NaN: later queries are NaN, and earlier ones what they were."""
    link, anchor, mask, dtype, _ = name.split("/")
    case = Case(link, anchor, mask, getattr(torch, dtype))  # type: ignore[arg-type]
    data = inputs(case)
    middle = data.k.shape[2] // 2
    good = read(case, on(device, data))
    data.k[:, :, middle] = float("nan")
    y = read(case, on(device, data))
    if not torch.equal(y[:, :, :middle], good[:, :, :middle]):
        return f"{name}: earlier queries changed"
    return None if bool(y[:, :, middle:].isnan().all()) else f"{name}: some later queries are not NaN"


def main(arguments: list[str]) -> None:
    """Run the named cases."""
    names = [name for name in arguments if name != "--own"]
    device = torch.device("cpu" if isinstance(tiles.row_products_kernel, interpreter.InterpretedFunction) else "cuda")
    if device.type == "cpu":
        mend()
    np.seterr(all="ignore")
    torch.set_num_threads(1)
    if "--own" not in arguments:
        # blocks far smaller than the inputs
        tiles.choose = lambda kernel, q, v, traits: tiles.Tiling(16, 16, 4, 1)
        forwards._SPLIT_KEYS = 32
    right = tiles.functions
    for name in names:
        if name.endswith(NAN_KEY):
            wrong = hidden(name, device)
            sys.stdout.write(json.dumps({"name": name, "device": device.type, "wrong": wrong}) + "\n")
            continue
        broken = name.endswith(BROKEN)
        tiles.functions = (
            (lambda link: right(replace(link, triton=link.triton.replace("polynomial_square", "horner"))))
            if broken
            else right
        )
        case = (CASES | REST | OFF | LARGE)[name.removesuffix(f"/{BROKEN}")]
        data = inputs(case)
        there = on(device, data)
        got = run(case, there)
        wrong = failure(case, data, got)
        if (
            wrong is None
            and case.repeats
            and not all(torch.equal(a, b) for a, b in zip(got, run(case, there), strict=True))
        ):
            wrong = f"{name}: another run gave other bits"
        sys.stdout.write(json.dumps({"name": name, "device": device.type, "wrong": wrong}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
