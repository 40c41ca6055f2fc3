"""Structs of the C++ kernels, filled in by Python. Members are read from the C++ sources: each is declared once."""

import ctypes
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

FOLDER = Path(__file__).parent / "cpp"
Anchor = Literal["row", "count", "raw"]
"""What a kernel divides each row by: its sum, the number of visible keys, nothing."""
ANCHORS: dict[Anchor, int] = {"row": 0, "count": 1, "raw": 2}
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The numbers of anchors, and of the types of queries, keys and values, in the C++ sources."""
_NUMBERS = {"int64_t": "q", "float": "f", "double": "d"}
_POINTERS = {
    "float": (torch.float32,),
    "double": (torch.float64,),
    "int64_t": (torch.int64,),
    "int32_t": (torch.int32,),
    "uint8_t": (torch.uint8, torch.bool),
}


NONE: Mapping[str, Any] = MappingProxyType({})


class Member(NamedTuple):
    """A number or a pointer of a struct. code: its type, for ``struct``. dtypes: of a pointer, () for void."""

    name: str
    code: str
    dtypes: tuple[torch.dtype, ...] = ()


class Pointer(NamedTuple):
    """What a member points to.

    dtypes: element types that fit, the first by default; none for void. sizes: the names of its sizes. strides: the
    members for the strides of all axes but the last; where there are none, it must be contiguous.
    """

    dtypes: tuple[torch.dtype, ...]
    sizes: tuple[str, ...]
    strides: tuple[str, ...]


class Struct:
    """A struct of a kernel, flattened: "qs.batch" is a member of the nested struct qs, "heads.0" of an array.

    shapes: of the tensors that it points to, such as "B H T D"; each size is a member, or named by ``Arguments``.
    strides: of a tensor, the members for them; by default those of the nested struct with its name and an s.

    Raises: ValueError for a declaration that is not understood.
    """

    def __init__(
        self, file: str, name: str, shapes: Mapping[str, str] = NONE, strides: Mapping[str, Sequence[str]] = NONE
    ) -> None:
        text = (FOLDER / file).read_text(encoding="utf-8")
        self.members = {member.name: member for member in _members(text, name)}
        # "0q" pads the end as a C++ compiler does
        packer = struct.Struct("@" + "".join(member.code for member in self.members.values()) + "0q")
        self.size, self.pack = packer.size, packer.pack
        self.zeros: dict[str, float] = dict.fromkeys(self.members, 0)
        self.pointers: dict[str, Pointer] = {}
        for name, shape in shapes.items():
            found = strides.get(name) or [member for member in self.members if member.startswith(f"{name}s.")]
            self.pointers[name] = Pointer(self.members[name].dtypes, tuple(shape.split()), tuple(found))


def _members(text: str, name: str) -> list[Member]:
    for place in (text, (FOLDER / "common.hpp").read_text(encoding="utf-8")):
        found = re.search(rf"^struct {name} \{{(.*?)^\}};", place, re.MULTILINE | re.DOTALL)
        if found is not None:
            body = re.sub(r"//.*", "", found[1])
            return [member for line in body.split(";") if line.strip() for member in _declared(place, line.strip())]
    raise ValueError(f"kernel: the C++ sources were expected to declare a struct {name}.")


def _declared(text: str, line: str) -> list[Member]:
    """Of one declaration, such as ``const float *q, *k`` or ``Rows y[3]``."""
    made: list[Member] = []
    kind, rest = re.fullmatch(r"(?:const )?(\w+)(.*)", line, re.DOTALL).groups()  # type: ignore[union-attr]
    for declarator in rest.split(","):
        found = re.fullmatch(r"(\*?)\s*(\w+)(?:\[(\w+)\])?", declarator.strip())
        if found is None:
            raise ValueError(f"kernel: numbers, pointers and structs were expected in a C++ struct, received {line!r}.")
        star, name, count = found.groups()
        for each in [name] if count is None else [f"{name}.{i}" for i in range(_constant(text, count))]:
            if star:
                made.append(Member(each, "q", _POINTERS.get(kind, ())))
            elif kind in _NUMBERS:
                made.append(Member(each, _NUMBERS[kind]))
            else:
                made += [member._replace(name=f"{each}.{member.name}") for member in _members(text, kind)]
    return made


def _constant(text: str, name: str) -> int:
    """A number, or a constant of the source."""
    found = re.search(rf"constexpr \w+ {name} = (\d+);", text)
    return int(name if found is None else found[1])


class Arguments:
    """The numbers of a struct by name, zero unless given, and the tensors that it points to, which live as long.

    sizes: those of tensors that are no members, or not under that name.
    """

    def __init__(self, kind: Struct, numbers: Mapping[str, float], sizes: Mapping[str, int] = NONE) -> None:
        self.kind, self.kept, self.sizes = kind, list[object](), dict[str, int]()
        self.numbers = kind.zeros.copy()
        self.set(numbers, sizes)

    def set(self, numbers: Mapping[str, float], sizes: Mapping[str, int] = NONE) -> None:
        """Give members and sizes their numbers. Raises: KeyError for a member that the struct does not have."""
        self.numbers.update(numbers)
        if len(self.numbers) != len(self.kind.zeros):
            raise KeyError(*(name for name in numbers if name not in self.kind.zeros))
        self.sizes.update(sizes)

    def copy(self) -> "Arguments":
        """The same numbers and tensors, to be given others without a change of these."""
        made = Arguments(self.kind, self.numbers, self.sizes)
        made.kept.extend(self.kept)
        return made

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        sizes, numbers = self.sizes, self.numbers
        # a list first: it takes half the time of a generator
        return tuple([sizes[each] if each in sizes else int(numbers[each]) for each in self.kind.pointers[name].sizes])

    def point(self, name: str, x: Tensor | None, dtype: torch.dtype | None = None) -> None:
        """Let a member point to a tensor that the kernel reads, converted and made contiguous as it requires.

        dtype: the element type behind a ``void`` pointer.
        """
        if x is not None:
            dtypes, _, strides = self.kind.pointers[name]
            dtype = dtype or (x.dtype if x.dtype in dtypes else dtypes[0])
            self.fill(name, dense_last(x, dtype) if strides else plain(x, dtype), dtype)

    def fill(self, name: str, x: Tensor | None, dtype: torch.dtype | None = None) -> None:
        """Let a member point to a tensor that the kernel writes. Raises: TypeError as ``address``."""
        if x is not None:
            dtypes, _, strides = self.kind.pointers[name]
            self.numbers[name] = address(x, dtype or dtypes[0], self.shape(name), strided=bool(strides))
            self.kept.append(x)
            if strides:
                self.numbers.update(zip(strides, x.stride()[:-1], strict=False))

    def new(self, name: str, *, zero: bool = False, dtype: torch.dtype | None = None) -> Tensor:
        """A new tensor, to which the member points. zero: the kernel adds to it."""
        dtypes, _, strides = self.kind.pointers[name]
        dtype = dtype or dtypes[0]
        x = (torch.zeros if zero else torch.empty)(self.shape(name), dtype=dtype, device="cpu")
        if strides:
            self.fill(name, x, dtype)
        else:
            self.numbers[name] = x.data_ptr()
            self.kept.append(x)
        return x

    def point_at_bytes(self, name: str, data: bytes) -> None:
        """Let a member point to bytes, such as an array of packed structs."""
        buffer = ctypes.create_string_buffer(data, max(len(data), 1))
        self.kept.append(buffer)
        self.numbers[name] = ctypes.addressof(buffer)

    def run(self, function: object, name: str = "attention") -> int:
        """Call a kernel and return its code. name: of the call, for messages.

        Raises: MemoryError when the kernel could not allocate its buffers.
        """
        code = function(self.packed())  # type: ignore[operator]
        if code == 1:
            raise MemoryError(f"{name}: the CPU kernel could not allocate its buffers.")
        return code

    def packed(self) -> bytes:
        """The struct."""
        return self.kind.pack(*self.numbers.values())


def address(x: Tensor | None, dtype: torch.dtype, shape: Sequence[int], *, strided: bool = False) -> int:
    """The address of a buffer, 0 for None, after a check of its shape and type: a wrong buffer would be overrun.

    strided: only the last axis has to be contiguous.

    Raises: TypeError for another dtype, device, shape or layout, which is a defect of the caller.
    """
    if x is None:
        return 0
    if (
        x.dtype is dtype
        and x.shape == shape
        and x.is_cpu
        and not x.is_neg()
        and (x.is_contiguous() or (strided and (shape[-1] <= 1 or x.stride(-1) == 1)))
    ):
        return x.data_ptr()
    raise TypeError(
        f"kernel: a buffer must be {dtype} of shape {tuple(shape)} on the CPU and "
        f"{'contiguous in its last axis' if strided else 'contiguous'}, received {x.dtype} of shape {tuple(x.shape)} "
        f"on {x.device} with strides {x.stride()}{' and the negative bit' if x.is_neg() else ''}."
    )


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A buffer of the CPU that a kernel fills. Neither the default dtype nor the default device of torch changes it."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A buffer of zeros, as ``empty`` makes them."""
    return torch.zeros(shape, dtype=dtype, device="cpu")


def plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as the kernels read small tensors: contiguous, of one type."""
    x = x.resolve_neg()  # a view like torch's imag of a conjugate has its sign in a bit beside its memory
    return x if x.dtype is dtype and x.is_contiguous() else x.to(dtype).contiguous()


def dense_last(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in ``dtype`` with a last axis of stride 1, as the kernels read it. Other axes stay expanded if they were."""
    x = x.resolve_neg().to(dtype)
    if x.shape[-1] <= 1 or x.stride(-1) == 1:
        return x
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride()[:-1])
    return x[once].contiguous().expand_as(x)


__all__ = ["ANCHORS", "TYPES", "Anchor", "Arguments", "Struct", "address", "dense_last", "empty", "plain", "zeros"]
