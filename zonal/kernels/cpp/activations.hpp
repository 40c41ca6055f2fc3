// The functions of feature maps of one layer: exponentials and squares of products with a matrix, and elementwise
// functions without one.

#include "common.hpp"

extern "C" {

// ``count`` features gain g(z), z = factor w_i . u + offset - norm |u|^2, by the function ``kind`` (enum Kind), of the
// rows w_i of a matrix from ``start`` on. Without a matrix w_i . u is u_i.
struct Block {
  int64_t kind, start, count;
  float factor, norm, offset, gain;
};
}

namespace {

enum Kind { EXP = 0, SQUARE = 1, ELU1 = 2, RELU = 3, SILU = 4 };

// e^x to two units in the last place; it overflows to infinity, and underflows through denormal numbers
inline V exponential(V x) {
  const V low = most(least(x, spread(89.f)), spread(-104.5f));
  const V whole = (low * LOG2E + 12582912.f) - 12582912.f;  // 1.5 * 2^23: rounds to the nearest whole number
  const V rest = (low - whole * 0.693359375f) + whole * 2.12194440e-4f;
  // either half is the exponent of a normal number
  const I power = __builtin_convertvector(whole, I), half = power >> 1;
  const I first = (half + 127) << 23, second = (power - half + 127) << 23;
  return polynomial(rest * LOG2E, EXPONENTIAL) * reinterpret_cast<const V&>(first) * reinterpret_cast<const V&>(second);
}

template <int KIND>
INLINE V activated(V z) {
  if (KIND == EXP) return exponential(z);
  if (KIND == SQUARE) return z * z;
  if (KIND == ELU1) return exponential(least(z, V{})) + most(V{}, z);  // e^z below 0, 1 + z above
  if (KIND == RELU) return most(z, V{});
  return z / (1.f + exponential(-z));
}

}  // namespace
