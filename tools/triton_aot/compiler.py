"""Triton kernels compiled for devices that are not here: registers, spills and shared memory of each.

The compiled kernels are those that a call would launch: the launches of ``forward`` and ``backward`` on tensors without
data.
"""

import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from zonal.errors import ArgumentError
from zonal.kernels.triton import tiles

DEVICES = (80, 90)
DTYPES = ("bfloat16", "float16", "float32")
# bytes of shared memory a block can have
SHARED = {80: 163 * 1024, 90: 227 * 1024}
REGISTERS = 255
# the largest head size at which nothing may spill
UNSPILLED = 128
_TYPES = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8",
}  # fmt: skip


class Variant(NamedTuple):
    """What kernels are compiled for. device: compute capability times 10."""

    link: str
    mask: str
    dtype: str
    dim: int
    device: int


@dataclass(frozen=True)
class Compiled:
    """The outcome for one kernel. shared: bytes per block. wgmma: whether it uses Hopper's matrix instruction.

    unset: registers that are read and never written. The compiler leaves such where a kernel asks for what is not
    defined, as a division by 0; a device then loads from anywhere.
    """

    kernel: str
    link: str
    mask: str
    dtype: str
    dim: int
    device: int
    tiling: tiles.Tiling
    registers: int
    stack: int
    spills: int
    shared: int
    wgmma: bool
    unset: int

    @property
    def fits(self) -> bool:
        """Whether a device of its kind runs it, no register is unset, and up to ``UNSPILLED`` none spills."""
        held = self.stack == self.spills == 0 or self.dim > UNSPILLED
        return held and not self.unset and self.registers <= REGISTERS and self.shared <= SHARED[self.device]


_REGISTER = re.compile(r"%(?:rd|rs|rq|r|fd|f|p|b|h)\d+")
# instructions of ptx without a result
_WRITES_NONE = ("st.", "cp.", "red.", "bra", "bar.", "fence.", "membar", "mbarrier.arrive", "ret", "trap", "prefetch")

Kind = tuple[str, str, str]
"""A link, a mask and a type."""


def name_of(launch: tiles.Launch) -> str:
    """The kernel's name."""
    return launch.kernel.fn.__name__.removesuffix("_kernel")


class Family(NamedTuple):
    """Kernels that one command compiles.

    about: in words. links, masks, dims: the choices. kernels: their names, for the help. default(links, types): what is
    compiled when no mask is chosen. launches: of a variant. title: of a launch. only: whether there are no other dims.
    sample: the variants of ``--sample``.
    """

    about: str
    links: tuple[str, ...]
    masks: tuple[str, ...]
    dims: tuple[int, ...]
    kernels: str
    default: Callable[[list[str], list[str]], list[Kind]]
    launches: Callable[[Variant], list[tiles.Launch]]
    title: Callable[[tiles.Launch], str] = name_of
    only: bool = False
    sample: Callable[[], list[Variant]] | None = None

    def cover(
        self,
        links: list[str] | None = None,
        masks: list[str] | None = None,
        dtypes: list[str] | None = None,
        dims: list[int] | None = None,
        devices: list[int] | None = None,
    ) -> list[Variant]:
        """All combinations of the choices, by default all there are; of links and masks without a mask ``default``."""
        chosen, types = links or list(self.links), dtypes or list(DTYPES)
        kinds = list(itertools.product(chosen, masks, types)) if masks else self.default(chosen, types)
        sizes = list(itertools.product(dims or self.dims, devices or DEVICES))
        return [Variant(*kind, dim, device) for kind in dict.fromkeys(kinds) for dim, device in sizes]

    def compiled(self, variant: Variant, kernels: Iterable[str] | None = None) -> list[Compiled]:
        """Compile a variant's kernels, or those whose titles begin as one that is named."""
        wanted = ("",) if kernels is None else tuple(kernels)
        return [
            compiled(launch, variant, self.title(launch))
            for launch in self.launches(variant)
            if self.title(launch).startswith(wanted)
        ]


def source(launch: tiles.Launch) -> ASTSource:
    """A launch for the compiler, specialised as on a device: 1 and None are known, multiples of 16 are noted."""
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def kind(value: Any, path: tuple[int, ...]) -> Any:
        if isinstance(value, tuple):
            parts = [kind(part, (*path, index)) for index, part in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if value is None or (isinstance(value, int) and value == 1):
            constants[path] = value
            return "constexpr"
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[path] = [["tt.divisibility", 16]]
        if isinstance(value, Tensor):
            return _TYPES[value.dtype]
        if isinstance(value, float):
            return "fp32"
        return "i32" if -(2**31) <= value < 2**31 else "i64"

    names = launch.kernel.arg_names
    signature = {
        name: kind(value, (index,)) for index, (name, value) in enumerate(zip(names, launch.arguments, strict=False))
    }
    for name, value in launch.constants.items():
        signature[name] = "constexpr"
        constants[names.index(name),] = value
    return ASTSource(launch.kernel, signature, constants, attributes)


class Usage(NamedTuple):
    """Resources of a compiled kernel: registers and bytes of stack per thread, and instructions that use the stack."""

    registers: int
    stack: int
    spills: int


def usage(cubin: bytes) -> Usage:
    """Registers and stack of a kernel. Nothing but numbers that found no register are on the stack."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def listing(flag: str) -> str:
            return subprocess.run([str(tool), flag, file.name], check=True, capture_output=True, text=True).stdout

        found = re.search(r"REG:(\d+) STACK:(\d+)", listing("-res-usage"))
        if found is None:
            raise ArgumentError(
                f"compile: cuobjdump was expected to say REG and STACK, received {listing('-res-usage')[:200]!r}."
            )
        registers, stack = int(found[1]), int(found[2])
        # taking the code apart is slow, and without a stack there is nothing to find
        spills = len(re.findall(r"\b(?:LDL|STL)\b", listing("-sass"))) if stack else 0
    return Usage(registers, stack, spills)


def unset(ptx: str) -> set[str]:
    """Registers that are read and never written."""
    written: set[str] = set()
    read: set[str] = set()
    for statement in re.sub(r"//.*", "", ptx).split(";"):
        # what stands on the lines before is a label, or where the next instruction comes from
        found = re.match(r"[{\s]*(?:@!?(%p\d+)\s+)?([a-z][\w.:]*)\s+(.*)", statement.rpartition("\n")[2])
        if found is None:
            continue
        guard, name, operands = found.groups()
        # what is written comes first, several registers in braces; these write none
        first = "" if name.startswith(_WRITES_NONE) else re.match(r"\{[^}]*\}|[^,]*", operands)[0]
        written |= set(_REGISTER.findall(first))
        read |= set(_REGISTER.findall(operands[len(first) :])) | ({guard} if guard else set())
    return read - written


def compiled(launch: tiles.Launch, variant: Variant, title: str) -> Compiled:
    """Compile one kernel."""
    result = triton.compile(
        source(launch), target=GPUTarget("cuda", variant.device, 32), options=tiles.options(launch.tiling)
    )
    used = usage(result.asm["cubin"])
    ptx = result.asm["ptx"]
    return Compiled(title, *variant, launch.tiling, *used, result.metadata.shared, "wgmma" in ptx, len(unset(ptx)))


def summary(rows: list[Compiled]) -> str:
    """A table in Markdown: the most that any link and mask takes."""
    groups: dict[tuple[Any, ...], list[Compiled]] = {}
    for row in rows:
        groups.setdefault((row.kernel, row.dtype, row.dim, row.device), []).append(row)
    lines = [
        "| kernel | type | d | sm | tiles (queries x keys) | warps | stages | registers | stack | spills | shared "
        "KB | compiled |",
        "|" + "---|" * 12,
    ]
    for (kernel, dtype, dim, device), found in groups.items():
        tilings = sorted(
            {(f"{row.tiling.queries} x {row.tiling.keys}", row.tiling.warps, row.tiling.stages) for row in found}
        )
        shape, warps, stages = (", ".join(dict.fromkeys(str(tiling[i]) for tiling in tilings)) for i in range(3))
        most = [max(getattr(row, name) for row in found) for name in ("registers", "stack", "spills", "shared")]
        cells = kernel, dtype, dim, device, shape, warps, stages, *most[:3], f"{most[3] / 1024:.0f}", len(found)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def write(out: Path, rows: list[Compiled]) -> None:
    """The report as JSON, a line a kernel."""
    limits = {"registers": REGISTERS, "shared": SHARED, "no_spills_up_to_dim": UNSPILLED}
    head = json.dumps({"triton": triton.__version__, "limits": limits, "fit": all(row.fits for row in rows)}, indent=1)
    lines = ",\n".join("  " + json.dumps(asdict(row)) for row in rows)
    out.write_text(f'{head[:-2]},\n "kernels": [\n{lines}\n ]\n}}\n', encoding="utf-8")
