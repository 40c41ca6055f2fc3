"""`make test-aarch64` and `make test-amx`: the CPU kernels, compiled for another processor, under its emulator.

    python tests/kernels/emulated.py [--cxx aarch64-linux-gnu-g++] [--emulator qemu-aarch64]
    python tests/kernels/emulated.py --isa amx --cxx g++ --emulator 'sde64 -spr --'

Calls are recorded here, with all that they read and write, and run again there by emulated.cpp, with one instruction
set: of every family with the portable set, in bfloat16 with a set that multiplies it in pairs. ``amx`` is AMX beside
AVX2, so that an emulator needs no AVX-512. What calls leave in memory must agree to four digits, in bfloat16 to two.
"""

import argparse
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sets import AMX
from torch import Tensor

import zonal
from zonal import anchor, hashing, nn
from zonal import mechanisms as m
from zonal.execution.machine import typical_rates
from zonal.formula import FORMULAS, Formula
from zonal.kernels import abi, build, decode, native, ridge_decode, tile

KINDS = {torch.float32: b"f", torch.float64: b"d", torch.bfloat16: b"h"}
# The first returns a number and writes nothing. The second compares scores with the least one that forward kept, to the
# bit, so that it needs a forward pass of its own processor.
UNCOMPARED = ("zonal_distance_width", "zonal_sparse_backward")
Key = tuple[str, str]
"""A link and a source."""


class Recorder:
    """Libraries whose functions write down what they are called with."""

    def __init__(self) -> None:
        self.records: dict[Key, list[tuple[str, bytes]]] = defaultdict(list)
        self.known: dict[int, Any] = {}
        self.scratch: set[int] = set()
        address, load = abi.address, native.load

        def keep(x: Tensor | None, *given: Any, **named: Any) -> int:
            at = address(x, *given, **named)
            self.known[at] = x
            return at

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            made = torch.zeros(shape, dtype=dtype)
            self.known[made.data_ptr()] = made
            return made

        for module in (abi, decode, ridge_decode):
            module.address, module.empty = keep, empty  # type: ignore[assignment]
        point = abi.Arguments.point_at_bytes

        def point_at_bytes(call: abi.Arguments, name: str, data: bytes) -> None:
            point(call, name, data)
            self.known[int(call.numbers[name])] = data

        abi.Arguments.point_at_bytes = point_at_bytes  # type: ignore[method-assign]

        def loaded(code: Formula, source: str = "tile", isa: build.InstructionSet | None = None) -> Any:
            return Spied(self, (code.name, source), load(code, source, isa))

        native.load = tile.load = loaded  # type: ignore[assignment]
        new = abi.Arguments.new

        def scratch(call: abi.Arguments, name: str, *given: Any, **named: Any) -> Tensor:
            made = new(call, name, *given, **named)
            self.known[made.data_ptr()] = made
            if name == "call.sums":  # points as a set pads them
                self.scratch.add(made.data_ptr())
            return made

        abi.Arguments.new = scratch  # type: ignore[method-assign]

    def find_rows(self, words: set[int]) -> None:
        """Know pointers into a buffer that was made by ``empty``, as those of a decoder's rows: the rest of it."""
        for word in words - self.known.keys():
            for at, x in self.known.items():
                if isinstance(x, Tensor) and x.is_contiguous() and at < word < at + x.nbytes:
                    self.known[word] = x.flatten()[(word - at) // x.itemsize :]
                    break


class Spied:
    """A library of a recorder."""

    def __init__(self, recorder: Recorder, key: Key, library: Any) -> None:
        self.recorder, self.key, self.library = recorder, key, library

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = getattr(self.library, name)
        if name in UNCOMPARED:
            return function

        def run(*structs: Any) -> int:
            if not all(isinstance(each, bytes) for each in structs):
                return function(*structs)
            words = {word for each in structs for (word,) in struct.iter_unpack("q", each)}
            self.recorder.find_rows(words)
            regions = {at: x for at, x in self.recorder.known.items() if at in words and at and x is not None}
            before = {at: contents(x) for at, x in regions.items()}
            failed = function(*structs)
            data = packed(name.encode()) + struct.pack("q", len(structs)) + b"".join(map(packed, structs))
            data += struct.pack("q", len(regions))
            for at, x in regions.items():
                kind = KINDS.get(x.dtype, b"i") if isinstance(x, Tensor) else b"i"
                kind = b"-" if at in self.recorder.scratch else kind  # not compared
                data += struct.pack("q", at) + kind + packed(before[at]) + contents(x)
            self.recorder.records[self.key].append((name, data))
            return failed

        return run


def packed(data: bytes) -> bytes:
    """Bytes after their number."""
    return struct.pack("q", len(data)) + data


def contents(x: Tensor | bytes) -> bytes:
    """What lies from the first element of a tensor to its last, gaps included."""
    if isinstance(x, bytes) or not x.numel():
        return x if isinstance(x, bytes) else b""
    count = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.detach().as_strided((count,), (1,)).view(torch.uint8).numpy().tobytes()


def calls() -> None:
    """Calls of every family, with gradients where it has them."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 90, 13, generator=generator).requires_grad_() for _ in range(3))

    def run(operator: zonal.Operator, path: str) -> None:
        y = zonal.attention(q, k[:, :2], v[:, :2], operator, causal=True, path=path)
        torch.autograd.grad(y.square().sum(), [q, k, v, *operator.parameters()], allow_unused=True)

    run(m.softmax(), "tiled")
    run(m.yat(), "tiled")
    run(m.rewa(), "tiled")
    run(m.squared_affine(), "chunked")
    run(m.slay(scale="small"), "chunked")
    run(m.hedgehog(), "chunked")
    run(m.ska(power=1), "chunked")
    run(m.softmax().replace(anchor=anchor.TopK(8, search=hashing.LSH())), "sparse")
    with torch.no_grad():
        for operator in (m.squared_affine(), m.slay(scale="small"), m.local_global(8, "hedgehog", first=2), m.ska()):
            first, last = ([x[:, :, part] for x in (q, k, v)] for part in (slice(88), slice(88, 90)))
            _, memory = zonal.attention(*first, operator, causal=True, return_memory=True)
            zonal.attention(*last, operator, causal=True, memory=memory, path="streaming")
    x = torch.randn(2, 40, 24, generator=generator).requires_grad_()
    y = nn.ShortConvolution(24, 4, "silu", True)(x)
    y = nn.GatedNorm(24, 2, 1e-3)(*(y[0] if isinstance(y, tuple) else y,) * 2)
    torch.autograd.grad(y.square().sum(), x)


def calls_in_pairs() -> None:
    """Calls in bfloat16: whole numbers, of which every product is exact, and softmax and SKO of any numbers."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randint(-1, 2, (1, heads, 150, 80), generator=generator) for heads in (4, 2, 2)]
    anything = [torch.randn(1, heads, 150, 80, generator=generator) for heads in (4, 2, 2)]
    linear = zonal.Operator(score=zonal.score.Dot(scale=1.0), link=zonal.link.Identity(), anchor=anchor.Raw())
    for operator, tensors in ((linear, whole), (m.softmax(), anything), (m.sko(), anything)):
        q, k, v = (x.bfloat16().requires_grad_() for x in tensors)
        y = zonal.attention(q, k, v, operator, causal=True, path="tiled")
        torch.autograd.grad(y, [q, k, v, *operator.parameters()], tensors[0].bfloat16(), allow_unused=True)


def main() -> int:
    """Returns 0 when every recorded call gives the same there."""
    sets = {isa.name: isa for isa in (*build.SETS, AMX)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cxx", default="aarch64-linux-gnu-g++")
    parser.add_argument("--emulator", default="qemu-aarch64", help="a command; the program to run follows it")
    parser.add_argument("--isa", default="portable", choices=list(sets))
    options = parser.parse_args()
    isa, emulator = sets[options.isa], shlex.split(options.emulator)
    for tool in (options.cxx, *emulator[:1]):
        if shutil.which(tool) is None:
            sys.exit(
                f"emulated: {tool} is required (aarch64 on Debian: g++-aarch64-linux-gnu, qemu-user; AMX: Intel's SDE, "
                "or another emulator that runs programs of Linux)."
            )
    torch.set_num_threads(1)
    recorder = Recorder()
    with typical_rates():  # no set is timed: such calls would be recorded, too
        (calls_in_pairs if isa.pairs else calls)()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="zonal-emulated-") as name:
        folder = Path(name)
        for (link, source), records in recorder.records.items():
            functions = " ".join(sorted({f"X({function})" for function, _ in records}))
            text, driver = folder / f"{link}-{source}.cpp", folder / f"{link}-{source}"
            kernel, around = build.FOLDER / f"{source}.cpp", Path(__file__).with_suffix(".cpp")
            more = f'#include "{kernel}"\n#define FUNCTIONS {functions}\n#include "{around}"\n'
            text.write_text(build.defines(FORMULAS[link]) + more)
            flags = ("-O1", "-w", "-std=c++17", "-static", *isa.flags)
            subprocess.run([options.cxx, *flags, str(text), "-o", str(driver)], check=True)
            files = []
            for index, (_, data) in enumerate(records):
                files.append(folder / f"{link}-{source}-{index}.bin")
                files[-1].write_bytes(data)
            command = [*emulator, str(driver), *map(str, files)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            sys.stdout.write(f"{link} {source}: {' '.join(done.stdout.split())}{done.stderr[-300:]}\n")
            sys.stdout.flush()
            failed += done.returncode != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
