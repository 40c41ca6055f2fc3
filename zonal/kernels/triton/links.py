"""Links on a tile: prefix_value, prefix_derivative and prefix_base of (x, c, n), elementwise in float32.

x: a tile of scores. c: address of the head's float32 numbers, the n coefficients and then the constants of the link.
The derivative with respect to coefficient k is base * x^k. A new link is three functions here and their prefix in its
Formula. exp has none: it is kept in log space, and kernels know it. Functions of a map before exp are of its logarithm.
"""

# bodies of jit functions are triton's language, whose declared types change from version to version
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl


@triton.jit
def horner_value(x, c, n: tl.constexpr):
    """sum_k c_k x^k for k < n."""
    total = tl.zeros_like(x) + tl.load(c + (n - 1))
    for k in tl.static_range(2, n + 1):
        total = total * x + tl.load(c + (n - k))
    return total


@triton.jit
def horner_derivative(x, c, n: tl.constexpr):
    """sum_k k c_k x^(k - 1)."""
    total = tl.zeros_like(x)
    if n > 1:
        total += (n - 1) * tl.load(c + (n - 1))
        for k in tl.static_range(2, n):
            total = total * x + (n - k) * tl.load(c + (n - k))
    return total


@triton.jit
def horner_base(x, c, n: tl.constexpr):
    return 1.0


@triton.jit
def identity_value(x, c, n: tl.constexpr):
    """x."""
    return x


@triton.jit
def identity_derivative(x, c, n: tl.constexpr):
    return tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def identity_base(x, c, n: tl.constexpr):
    return 1.0


@triton.jit
def yat_value(x, c, n: tl.constexpr):
    """x^2 / (2 + eps - 2x) = x r with r = x / (2 + eps - 2x), eps the link's one constant."""
    return x * (x / (2 + tl.load(c + n) - 2 * x))


@triton.jit
def yat_derivative(x, c, n: tl.constexpr):
    """2x (2 + eps - x) / (2 + eps - 2x)^2 = 2r (1 + r)."""
    r = x / (2 + tl.load(c + n) - 2 * x)
    return 2 * r * (1 + r)


@triton.jit
def yat_base(x, c, n: tl.constexpr):
    return 1.0


@triton.jit
def squared_affine_value(x, c, n: tl.constexpr):
    """(x + c_0)^2."""
    shifted = x + tl.load(c)
    return shifted * shifted


@triton.jit
def squared_affine_derivative(x, c, n: tl.constexpr):
    return 2 * (x + tl.load(c))


@triton.jit
def squared_affine_base(x, c, n: tl.constexpr):
    return 2 * (x + tl.load(c))


@triton.jit
def polynomial_square_value(x, c, n: tl.constexpr):
    """p(x)^2 + floor with p(x) = sum_k c_k x^k, floor the link's one constant."""
    p = horner_value(x, c, n)
    return p * p + tl.load(c + n)


@triton.jit
def polynomial_square_derivative(x, c, n: tl.constexpr):
    return 2 * horner_value(x, c, n) * horner_derivative(x, c, n)


@triton.jit
def polynomial_square_base(x, c, n: tl.constexpr):
    return 2 * horner_value(x, c, n)


@triton.jit
def euclidean_value(x, c, n: tl.constexpr):
    """eps - sqrt(max(x, 0) + eps^2) of a squared distance x: the logarithm of evidence. eps: the map's one constant."""
    eps = tl.load(c + n)
    return eps - tl.sqrt(tl.maximum(x, 0.0) + eps * eps)


@triton.jit
def euclidean_derivative(x, c, n: tl.constexpr):
    eps = tl.load(c + n)
    return tl.where(x > 0, -0.5 / tl.sqrt(tl.maximum(x, 0.0) + eps * eps), 0.0)


@triton.jit
def euclidean_base(x, c, n: tl.constexpr):
    return 1.0
