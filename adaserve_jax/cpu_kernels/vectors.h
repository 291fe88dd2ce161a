// Vectors of f32 in the compiler's own extension (GCC and Clang), as wide as this processor's registers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace adaserve {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
constexpr int64_t kLine = 64;  // bytes of a cache line

template <int N>
struct VectorOf {
  typedef float type __attribute__((vector_size(4 * N)));
  typedef float unaligned __attribute__((vector_size(4 * N), aligned(4)));
};

template <int N>
inline typename VectorOf<N>::type load(const float* from) {
  return *reinterpret_cast<const typename VectorOf<N>::unaligned*>(from);
}
template <int N>
inline void store(float* to, typename VectorOf<N>::type x) {
  *reinterpret_cast<typename VectorOf<N>::unaligned*>(to) = x;
}

// The eight values that 4 bytes hold, from the lowest bits on.
inline VectorOf<8>::type nibbles(const uint8_t* from) {
  typedef int32_t Eight __attribute__((vector_size(32)));
  int32_t word;
  __builtin_memcpy(&word, from, sizeof(word));
  const Eight shifts = {0, 4, 8, 12, 16, 20, 24, 28};
  return __builtin_convertvector((Eight{} + word) >> shifts & 15, VectorOf<8>::type);
}

using Floats = VectorOf<kLanes>::type;
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

// One step of `sum_lanes`: of segments `Width` wide, add the upper half to the lower, those of a and b in turns.
template <int Width, size_t... Lane>
inline Floats fold(Floats a, Floats b, std::index_sequence<Lane...>) {
  constexpr auto low = [](int lane) {
    int within = lane % Width;
    return lane - within + within % (Width / 2) + (within >= Width / 2 ? kLanes : 0);
  };
  return __builtin_shufflevector(a, b, low(Lane)...) + __builtin_shufflevector(a, b, low(Lane) + Width / 2 ...);
}

// Sum each of kLanes vectors: lane i of the result is the sum of rows[i]'s lanes. Overwrites `rows`.
template <int Width = kLanes>
inline Floats sum_lanes(Floats* rows) {
  for (int i = 0; i < Width / 2; ++i)
    rows[i] = fold<Width>(rows[i], rows[i + Width / 2], std::make_index_sequence<kLanes>());
  if constexpr (Width > 2) return sum_lanes<Width / 2>(rows);
  return rows[0];
}

// e^x for x <= 0, to 2 units in the last place; below -87 it is the smallest normal number or 0.
inline Floats exp_negative(Floats x) {
  x = x < -87.0f ? (Floats{} - 87.0f) : x;
  Ints power = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints);
  Floats n = __builtin_convertvector(power, Floats);
  Floats rest = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats series = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  series = series * rest + 8.3334519073e-3f;
  series = series * rest + 4.1665795894e-2f;
  series = series * rest + 1.6666665459e-1f;
  series = series * rest + 5.0000001201e-1f;
  series = series * rest * rest + rest + 1.0f;
  return series * (Floats)((power + 127) << 23);
}

// tanh(x) by e^(-2|x|), to 2e-7 of 1.
inline Floats tanh(Floats x) {
  const Floats size = x < 0.0f ? -x : x;
  const Floats falling = exp_negative(-2.0f * size);
  const Floats rising = (1.0f - falling) / (1.0f + falling);
  return x < 0.0f ? -rising : rising;
}

template <int Width, size_t... Lane>
inline Floats swap_halves(Floats x, std::index_sequence<Lane...>) {
  return __builtin_shufflevector(x, x, Lane ^ (Width / 2)...);
}
// Combine all lanes: halves with halves, until every lane holds the result.
template <int Width = kLanes, typename Combine>
inline float reduce(Floats x, const Combine& combine) {
  x = combine(x, swap_halves<Width>(x, std::make_index_sequence<kLanes>()));
  if constexpr (Width > 2) return reduce<Width / 2>(x, combine);
  return x[0];
}
inline float sum(Floats x) {
  return reduce(x, [](Floats a, Floats b) { return a + b; });
}
inline float largest(Floats x) {
  return reduce(x, [](Floats a, Floats b) { return a > b ? a : b; });
}

}  // namespace adaserve
