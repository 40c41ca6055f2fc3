"""Sizes of the kernels. It does not import triton, which may be missing where a call is planned."""


def padded(width: int) -> int:
    """The width of a tile that holds ``width`` columns: a power of two that the matrix units take."""
    return max(16, power_of_two(width))


def power_of_two(number: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << max(number - 1, 0).bit_length()


def ceil_div(count: int, size: int) -> int:
    """How many blocks of ``size`` hold ``count``."""
    return -(-count // size)


# the widest keys and values of which all tiles stay in registers
RIDGE_LARGEST = 64
# Keys per block: about as many as a key has numbers, so that the block's matrices are as large as its state's. Not 64
# where keys are wider: Triton 3.6 then multiplies by warp groups (wgmma), and on an H200 the numbers were wrong.
RIDGE_BLOCK = 32

__all__ = ["RIDGE_BLOCK", "RIDGE_LARGEST", "ceil_div", "padded", "power_of_two"]
