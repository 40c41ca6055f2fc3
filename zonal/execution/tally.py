"""Adding up what a path does: operations, bytes, torch calls and, with a machine's constants, seconds."""

from dataclasses import dataclass

from zonal.execution.constants import Constants

# Buffers of some megabytes are handed out again by the C library; from here to eight times as much the chance of that fades.
# Even then a long-lived process often has a hole of the size, so that half of the new pages is what to expect
_REUSED = 8 << 20
_FRESH_SHARE = 0.5
# a core's own cache: what is kept for backward is not in it any more when its turn comes
_NEAR = 1 << 20


@dataclass(frozen=True)
class Estimate:
    """The predicted cost of one path, backward included where the call needs gradients.

    flops: products, solves and elementwise operations. products: the part in matrix products. bytes_moved: read and written.
    calls: torch calls. peak_bytes: the most memory in use at once beyond the inputs, what backward keeps and the output included.
    """

    path: str
    seconds: float
    flops: float
    products: float
    bytes_moved: float
    calls: int
    peak_bytes: int


class Tally:
    """The running sum of a path's torch calls. ``itemsize``: bytes of a number; the constants are those of four.

    far: bytes that the path keeps while it works; past a core's own cache each elementwise call has to fetch its operands.
    """

    def __init__(self, constants: Constants, itemsize: int = 4, far: float = 0.0) -> None:
        self.constants = constants
        self.far = far > _NEAR
        self.itemsize = itemsize
        self.wide = itemsize / 4
        self.seconds = self.flops = self.products = self.bytes_moved = self.calls = 0.0

    def _fresh(self, size: float) -> float:
        """Seconds for the pages of a new buffer of ``size`` bytes."""
        if self.constants.fresh == 0 or size <= _REUSED:
            return 0.0
        return _FRESH_SHARE * min(1.0, (size - _REUSED) / (7 * _REUSED)) * size * self.constants.fresh

    def add(self, seconds: float, *, calls: float = 0, flops: float = 0.0, moved: float = 0.0) -> None:
        """Work whose time is known as a whole; its operations are all of products."""
        self.seconds += seconds
        self.calls += calls
        self.flops += flops
        self.products += flops
        self.bytes_moved += moved

    def views(self, count: float) -> None:
        """Calls that move nothing worth counting: slices, small masks, questions about a few numbers."""
        self.calls += count
        self.seconds += count * self.constants.call

    def recorded(self, count: float) -> None:
        """What autograd adds to ``count`` calls, their backward not included."""
        self.seconds += count * self.constants.record

    def passes(self, kind: str, elements: float, count: float = 1, *, operands: int = 2, fresh: bool = True) -> None:
        """Elementwise calls: simple, select, exp or reduce over ``elements`` numbers. fresh: each makes a new buffer of that size."""
        if count <= 0 or elements <= 0:
            return
        curves = {
            "simple": self.constants.simple,
            "select": self.constants.select,
            "exp": self.constants.exp,
            "reduce": self.constants.reduce,
        }
        seconds = curves[kind].at(elements * self.wide)
        if fresh and kind != "reduce":
            seconds += self._fresh(elements * self.itemsize)
        if self.far:
            seconds += elements * self.itemsize * operands * self.constants.traffic
        self.seconds += count * seconds
        self.calls += count
        self.flops += count * elements
        self.bytes_moved += count * elements * self.itemsize * operands

    def product(self, batch: float, rows: float, cols: float, inner: float, count: float = 1) -> None:
        """Batched matrix products (rows, inner) x (inner, cols)."""
        if count <= 0:
            return
        flops = 2.0 * rows * cols * inner
        moved = batch * (rows * inner + inner * cols + rows * cols) * self.itemsize
        one = (
            self.constants.product
            + batch * self.constants.matmul.at(max(flops, 1)) * self.wide
            + moved * self.constants.traffic
        )
        self.seconds += count * (one + self._fresh(batch * rows * cols * self.itemsize))
        # what surrounds a product in torch: the flattening of its batch
        self.calls += count
        self.flops += count * batch * flops
        self.products += count * batch * flops
        self.bytes_moved += count * moved

    def cholesky(self, batch: float, order: float, count: float = 1) -> None:
        """Factors of ``batch`` matrices: order^3 / 3 operations each."""
        if count <= 0 or order <= 0:
            return
        flops = order**3 / 3
        self.seconds += count * (
            self.constants.product
            + batch * self.constants.cholesky.at(flops) * self.wide
            + self._fresh(batch * order**2 * self.itemsize)
        )
        self.calls += count
        self.flops += count * batch * flops
        self.bytes_moved += count * batch * order**2 * self.itemsize * 2

    def solve(self, batch: float, order: float, columns: float, count: float = 1) -> None:
        """Triangular solves with ``columns`` right-hand sides: order^2 columns operations each."""
        if count <= 0 or order <= 0:
            return
        one = self.constants.solve.at(order**3) * columns / order
        self.seconds += count * (
            self.constants.product + batch * one * self.wide + self._fresh(batch * order * columns * self.itemsize)
        )
        self.calls += count
        self.flops += count * batch * order**2 * columns
        self.bytes_moved += count * batch * (order**2 + 2 * order * columns) * self.itemsize

    def estimate(self, path: str, peak_numbers: float, peak_bytes: float = 0.0) -> Estimate:
        """The sum, for a path that holds at most ``peak_numbers`` numbers and ``peak_bytes`` more."""
        peak = round(peak_numbers * self.itemsize + peak_bytes)
        return Estimate(path, self.seconds, self.flops, self.products, self.bytes_moved, round(self.calls), peak)


__all__ = ["Estimate", "Tally"]
