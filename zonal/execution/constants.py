"""The numbers of a machine that the cost model is made of."""

import itertools
import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from zonal.errors import FileFormatError

SCHEMA = 3


@dataclass(frozen=True)
class Curve:
    """Seconds of one piece of work by its size: straight between points in log-log, flat before them, proportional after them."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, size: float) -> float:
        if size <= self.sizes[0]:
            return self.seconds[0]
        for i in range(1, len(self.sizes)):
            if size <= self.sizes[i]:
                a, b = self.sizes[i - 1], self.sizes[i]
                share = math.log(size / a) / math.log(b / a)
                return self.seconds[i - 1] ** (1 - share) * self.seconds[i] ** share
        return self.seconds[-1] * size / self.sizes[-1]


@dataclass(frozen=True)
class Constants:
    """Seconds of one machine for float32 work.

    threads: of torch on a CPU, multiprocessors of a CUDA device.
    call: a torch call that moves nothing (a view). record: what a call that autograd records costs more, forward and backward.
    simple (add, multiply, clamp), select (masked fill), exp, reduce (a sum or maximum of rows): one call, by elements.
    fresh: a byte of new memory in a buffer too big to be reused (the operating system clears its pages); 0 where memory is pooled.
    product: a batched matrix product of nothing; matmul: one more matrix in it, by its operations 2 m n k; traffic: a byte it touches.
    cholesky: one factor in a batch, by its operations n^3 / 3; solve: a triangular solve with n columns, by n^3.
    tile: an operation of the compiled tile kernel (a multiplication or an addition of its products), with all threads; tile_call: one
    call of it on next to nothing. sums, sums_call: the same of the kernel for sums over features. All 0 where they could not be built.
    contended: the processor was busy, so that speeds of several threads are those of one thread scaled up.
    memory_bytes: what the device has. note: where the numbers come from; it does not count in comparisons.
    """

    machine: str
    threads: int
    torch: str
    call: float
    record: float
    simple: Curve
    select: Curve
    exp: Curve
    reduce: Curve
    fresh: float
    product: float
    matmul: Curve
    traffic: float
    cholesky: Curve
    solve: Curve
    tile: float
    tile_call: float
    sums: float
    sums_call: float
    contended: bool
    memory_bytes: int
    note: str = field(default="", compare=False)

    def __hash__(self) -> int:
        # asked at every call of attention: the few numbers that no two machines share are enough
        return hash((self.machine, self.threads, self.call, self.fresh))

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **{k: v for k, v in asdict(self).items() if k != "note"}}

    @staticmethod
    def from_dict(read: Any, note: str = "") -> "Constants":
        """The constants that ``to_dict`` wrote. Raises: FileFormatError when anything is missing, foreign or not a positive number."""
        if not isinstance(read, dict) or read.get("schema") != SCHEMA:
            raise FileFormatError(f"calibration: schema {SCHEMA} was required.")
        values: dict[str, Any] = {"note": note}
        for each in fields(Constants):
            if each.name == "note":
                continue
            value = read.get(each.name)
            if each.type is Curve:
                values[each.name] = _curve(each.name, value)
            elif each.type in (str, bool):
                if not isinstance(value, each.type):  # type: ignore[arg-type]
                    raise FileFormatError(f"calibration: {each.name} must be {each.type.__name__}, found {value!r}.")  # type: ignore[union-attr]
                values[each.name] = value
            else:
                if (
                    isinstance(value, bool)
                    or not isinstance(value, int | float)
                    or not math.isfinite(value)
                    or value < 0
                ):
                    raise FileFormatError(f"calibration: {each.name} must be a number >= 0, found {value!r}.")
                values[each.name] = value
        return Constants(**values)


def _curve(name: str, value: Any) -> Curve:
    if not isinstance(value, dict):
        raise FileFormatError(f"calibration: {name} must have sizes and seconds, found {value!r}.")
    sizes, seconds = _numbers(name, value.get("sizes")), _numbers(name, value.get("seconds"))
    if len(sizes) != len(seconds) or any(b <= a for a, b in itertools.pairwise(sizes)):
        raise FileFormatError(f"calibration: {name} needs rising sizes and as many seconds.")
    return Curve(sizes, seconds)


def _numbers(name: str, value: Any) -> tuple[float, ...]:
    good = isinstance(value, list | tuple) and len(value) > 0
    if not good or not all(
        isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) and x > 0 for x in value
    ):
        raise FileFormatError(f"calibration: {name} must hold positive numbers, found {value!r}.")
    return tuple(value)


_ELEMENTS = (64.0, 4096.0, 32768.0, 262144.0, 1048576.0, 4194304.0)
# a server processor with two threads, and a data-centre accelerator: used where nothing can be measured or kept, so that the choice
# is still the same each time
DEFAULT_CPU = Constants(
    machine="a typical processor", threads=2, torch="", call=1.7e-6, record=3e-6,
    simple=Curve(_ELEMENTS, (1.3e-6, 1.7e-6, 3.7e-6, 1.8e-5, 6e-5, 6e-4)),
    select=Curve(_ELEMENTS, (2.4e-6, 6.7e-6, 3.7e-5, 1.5e-4, 5e-4, 2.4e-3)),
    exp=Curve(_ELEMENTS, (1.2e-6, 4.7e-6, 2e-5, 1.2e-4, 4.4e-4, 2e-3)),
    reduce=Curve(_ELEMENTS, (1.7e-6, 2.4e-6, 5e-6, 1.8e-5, 5.7e-5, 2e-4)),
    fresh=4.5e-10, product=3.3e-6, matmul=Curve((8192.0, 524288.0, 4194304.0, 33554432.0), (9e-8, 2.7e-6, 2.2e-5, 2e-4)), traffic=1.3e-11,
    cholesky=Curve((1365.0, 87381.0, 5592405.0), (6.3e-7, 1.5e-5, 2.4e-4)), solve=Curve((4096.0, 262144.0, 16777216.0), (1.1e-6, 2.2e-5, 5e-4)),
    tile=6e-12, tile_call=1e-4, sums=7e-12, sums_call=1.5e-4, contended=False, memory_bytes=8 << 30,
)  # fmt: skip
DEFAULT_GPU = Constants(
    machine="a typical accelerator", threads=1, torch="", call=4e-6, record=1e-5,
    simple=Curve(_ELEMENTS, (6e-6, 6e-6, 6e-6, 6e-6, 8e-6, 1.5e-5)), select=Curve(_ELEMENTS, (7e-6, 7e-6, 7e-6, 7e-6, 1e-5, 1.8e-5)),
    exp=Curve(_ELEMENTS, (6e-6, 6e-6, 6e-6, 6e-6, 8e-6, 1.5e-5)), reduce=Curve(_ELEMENTS, (8e-6, 8e-6, 8e-6, 8e-6, 9e-6, 1.2e-5)),
    fresh=0.0, product=1e-5, matmul=Curve((8192.0, 524288.0, 4194304.0, 33554432.0), (1e-8, 5e-8, 2e-7, 1.2e-6)), traffic=5e-13,
    cholesky=Curve((1365.0, 87381.0, 5592405.0), (5e-7, 5e-6, 5e-4)), solve=Curve((4096.0, 262144.0, 16777216.0), (3e-7, 2e-6, 5e-5)),
    tile=0.0, tile_call=0.0, sums=0.0, sums_call=0.0, contended=False, memory_bytes=16 << 30,
)  # fmt: skip


def default(device: torch.device, note: str) -> Constants:
    """Typical constants of a kind of device."""
    return replace(DEFAULT_CPU if device.type == "cpu" else DEFAULT_GPU, note=note)


__all__ = ["DEFAULT_CPU", "DEFAULT_GPU", "Constants", "Curve", "default"]
