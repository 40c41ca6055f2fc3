"""Run the Triton kernels in Triton's interpreter, on tensors of the CPU: `python interpreted.py NAME…` prints one line of JSON a case.

The interpreter is chosen when triton is imported, so this is a process of its own, with TRITON_INTERPRET=1.
"""

import json
import sys
from dataclasses import replace

import numpy as np
import torch
import triton.language as tl
from kernels.tile_cases import CASES, LINKS, Case, Inputs, failure, inputs
from torch import Tensor
from triton.runtime import interpreter

from zonal.kernels.triton import forward as forwards
from zonal.kernels.triton import tiles
from zonal.kernels.triton.backward import backward
from zonal.kernels.triton.forward import forward

BROKEN = "broken"


def mend() -> None:
    """What the interpreter does not do: numbers of one element as bounds of a loop (with this numpy), bfloat16 in a product.

    Its patches of the language are also made once and not at each call of a function, which is most of its time.
    """
    patch_tensor, patch_language, dot = interpreter._patch_lang_tensor, interpreter._patch_lang, interpreter.InterpreterBuilder.create_dot
    patched: set[frozenset[int]] = set()

    class Kept:
        def restore(self) -> None:
            """Nothing is taken back: this process does nothing else."""

    def tensor(kind: type, scope: object) -> None:
        patch_tensor(kind, scope)
        scope.set_attr(kind, "__index__", lambda self: int(self.handle.data.item()))

    def language(function: object) -> Kept:
        seen = frozenset(id(module) for module in (tl, tl.core) if any(module is value for value in function.__globals__.values()))
        if seen not in patched:
            patched.add(seen)
            patch_language(function)
        return Kept()

    def wide(x: interpreter.TensorHandle) -> interpreter.TensorHandle:
        bits = x.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32) if x.dtype == tl.bfloat16 else x

    interpreter._patch_lang_tensor, interpreter._patch_lang = tensor, language
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, c, *rest: dot(self, wide(a), wide(b), c, *rest)


def run(case: Case, data: Inputs) -> list[Tensor]:
    """y and all gradients by the kernels."""
    common = data.scale, data.coefficients, data.key_mask, data.cu_seqlens, case.spec
    y, factor = forward(data.q, data.k, data.v, *common)
    return [y, *backward(data.dy, data.q, data.k, data.v, y, factor, *common, LINKS[case.link][2], (True,) * 5)]


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.empty that hands out NaN."""
    return torch.full(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape, float("nan"), dtype=dtype, device=device)


def main(names: list[str]) -> None:
    """Run the named cases in blocks far smaller than the inputs, so that every loop runs more than once."""
    mend()
    np.seterr(all="ignore")
    torch.set_num_threads(1)
    tiles.choose = lambda kernel, q, v, traits: tiles.Tiling(16, 16, 4, 1)
    forwards._SPLIT_KEYS = 32
    torch.empty = poisoned
    right = tiles.functions
    for name in names:
        broken = name.endswith(BROKEN)
        tiles.functions = (lambda link: right(replace(link, triton=link.triton.replace("polynomial_square", "horner")))) if broken else right
        case = CASES[name.removesuffix(f"-{BROKEN}")]
        data = inputs(case)
        got = run(case, data)
        wrong = failure(case, data, got)
        if wrong is None and case.repeats and not all(torch.equal(a, b) for a, b in zip(got, run(case, data), strict=True)):
            wrong = f"{name}: another run gave other bits"
        sys.stdout.write(json.dumps({"name": name, "wrong": wrong}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
