// weight @ x for the few columns of a decode or verify step: y[o, t] = sum over i of w[o, i] x[i, t].
//
// Such a product should cost what reading the weight costs. A tile keeps the sums of kRows outputs and up to two
// vectors of columns in registers while it streams those rows of the weight, and asks for the next rows meanwhile; more
// columns go over the same rows again, from the cache. A column's sums are
// taken in the same order whatever the number of columns from two on.
//
// A grouped product has a weight for each group of columns (the tokens of one expert), and reads the weights of groups
// that have columns only. There a single column too is summed in the order of several.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "parallel.h"
#include "vectors.h"

namespace adaserve {

namespace ffi = xla::ffi;

constexpr int kRows = 8;                   // rows of a tile: sums enough to hide the latency of a multiply-add
constexpr int64_t kInner = 1024;           // products in one sum before it is added to the total: bounds rounding
constexpr int64_t kWide = 128;             // weights of a row widened at a time, so that they stay in the L1 cache
constexpr int64_t kParallelBytes = 1 << 18;  // weight above which a second thread is worth waking

struct BFloat16 {
  uint16_t bits;
};

inline float widened(int8_t w) { return w; }
inline float widened(float w) = delete;  // f32 would become int8 without a word
inline float widened(BFloat16 w) {
  const uint32_t bits = static_cast<uint32_t>(w.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof(out));
  return out;
}
// f16, if it is finite.
inline float widened_half(uint16_t w) {
#if defined(__FLT16_MAX__)
  _Float16 half;
  std::memcpy(&half, &w, sizeof(half));
  return half;
#else  // XLA's threads take subnormal f32 for 0, so those of f16 do not go through one
  const int32_t size = w & 0x7fff;
  const uint32_t bits = static_cast<uint32_t>(size + 0x1c000) << 13;  // exponents are biased by 127 in place of 15
  float out;
  std::memcpy(&out, &bits, sizeof(out));
  if (size < 0x400) out = static_cast<float>(size) * 0x1p-24f;
  return w & 0x8000 ? -out : out;
#endif
}

// Weights of 4 bits, from the first of a row or of a group on; used as a pointer. 2^`shift` inputs, at most kWide,
// share a scale and a zero; a byte holds two inputs, the first in its low bits.
struct Int4 {
  const uint8_t* values;
  const uint16_t* scale;
  const int8_t* zero;
  int shift;

  Int4 operator+(int64_t count) const {
    return {values + count / 2, scale + (count >> shift), zero + (count >> shift), shift};
  }
  // Write `count` widened values. kShift: `shift`, if it is known.
  template <int kShift = 0>
  void widen(float* out, int64_t count) const {
    const int64_t group = int64_t{1} << (kShift ? kShift : shift);
    for (int64_t g = 0; g < count / group; ++g, out += group) {
      const float step = widened_half(scale[g]), least = -step * zero[g];
      const uint8_t* packed = values + g * group / 2;
      int64_t i = 0;
#pragma GCC unroll 4
      for (; i + 8 <= group; i += 8) store<8>(out + i, nibbles(packed + i / 2) * step + least);
      for (; i < group; ++i) out[i] = static_cast<float>(packed[i / 2] >> i % 2 * 4 & 15) * step + least;
    }
  }
};

// Bytes of `count` weights.
template <typename W>
inline int64_t bytes_of(const W*, int64_t count) {
  return count * sizeof(W);
}
inline int64_t bytes_of(const Int4&, int64_t count) { return count / 2; }

// Write `count` weights from w on as f32, and ask for those of the row `stride` weights later.
template <typename W>
inline void widen(const W* w, int64_t stride, float* out, int64_t count) {
  __builtin_prefetch(w + stride);
  if constexpr (sizeof(W) > 1) __builtin_prefetch(w + stride + kLine / sizeof(W) * 2);
  for (int64_t i = 0; i < count; ++i) out[i] = widened(w[i]);
}
inline void widen(const Int4& w, int64_t stride, float* out, int64_t count) {
  __builtin_prefetch((w + stride).values);
  if (w.shift == 5)
    w.widen<5>(out, count);
  else
    w.widen(out, count);
}

// Call body(rows f32, row stride, begin, end) for pieces of weights [begin, end) of R rows, widened if they are not
// f32. P: a pointer to weights, or Int4.
template <int R, typename P, typename Body>
inline void in_f32(P w, int64_t inputs, int64_t begin, int64_t end, const Body& body) {
  if constexpr (std::is_convertible_v<P, const float*>) {
    body(w + begin, inputs, begin, end);
  } else {
    float wide[R * kWide];
    for (int64_t at = begin; at < end; at += kWide) {
      const int64_t some = std::min(kWide, end - at);
      for (int r = 0; r < R; ++r) widen(w + (r * inputs + at), R * inputs, wide + r * kWide, some);
      body(wide, kWide, at, at + some);
    }
  }
}

// Multiply R rows of w with V vectors of N columns; store rows from `first` on and `columns` columns. x has whole
// vectors of columns.
template <int N, int V, int R, typename P>
void multiply_tile(P w, int64_t inputs, const float* x, int64_t x_stride, float* y, int64_t y_stride,
                   int64_t columns, int first) {
  using Vector = typename VectorOf<N>::type;
  Vector total[R][V] = {};
  for (int64_t begin = 0; begin < inputs; begin += kInner) {
    Vector sums[R][V] = {};
    in_f32<R>(w, inputs, begin, std::min(inputs, begin + kInner),
              [&](const float* rows, int64_t stride, int64_t from, int64_t to) {
                for (int64_t i = from; i < to; ++i) {
                  if constexpr (std::is_convertible_v<P, const float*>) {
                    if (i % (kLine / 4) == 0)
                      for (int r = 0; r < R; ++r) __builtin_prefetch(w + (R + r) * inputs + i);
                  }
                  Vector column[V];
#pragma GCC unroll 4
                  for (int v = 0; v < V; ++v) column[v] = load<N>(x + i * x_stride + v * N);
#pragma GCC unroll 16
                  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
                    for (int v = 0; v < V; ++v) sums[r][v] += rows[r * stride + i - from] * column[v];
                  }
                }
              });
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) total[r][v] += sums[r][v];
  }
  for (int r = first; r < R; ++r) {
    float row[V * N];
    std::memcpy(row, total[r], sizeof(row));
    for (int64_t t = 0; t < columns; ++t) y[r * y_stride + t] = row[t];
  }
}

// Multiply one row of w with one column.
template <typename P>
float multiply_row(P w, int64_t inputs, const float* x) {
  constexpr int kSums = 4;
  Floats sums[kSums] = {};
  float rest = 0;
  in_f32<1>(w, inputs, 0, inputs, [&](const float* row, int64_t, int64_t from, int64_t to) {
    const int64_t count = to - from;
    int64_t i = 0;
    for (; i + kSums * kLanes <= count; i += kSums * kLanes) {
#pragma GCC unroll 4
      for (int n = 0; n < kSums; ++n) {
        const int64_t at = i + n * kLanes;
        sums[n] += load<kLanes>(row + at) * load<kLanes>(x + from + at);
      }
    }
    for (; i < count; ++i) rest += row[i] * x[from + i];
  });
  return sum(sums[0] + sums[1] + (sums[2] + sums[3])) + rest;
}

// Multiply R rows of w with all columns; store rows from `first` on. x_stride 1: one column that is not padded.
template <int R, typename P>
void multiply_rows(P w, int64_t inputs, const float* x, int64_t x_stride, float* y, int64_t y_stride,
                   int64_t columns, int first) {
  if (x_stride == 1) {
    for (int r = first; r < R; ++r) y[r * y_stride] = multiply_row(w + r * inputs, inputs, x);
    return;
  }
  for (int64_t done = 0; done < columns;) {
    const int64_t left = columns - done;
    const auto tile = [&](auto lanes, auto vectors) {
      constexpr int N = decltype(lanes)::value, V = decltype(vectors)::value;
      multiply_tile<N, V, R>(w, inputs, x + done, x_stride, y + done, y_stride, std::min<int64_t>(left, N * V), first);
      done += N * V;
    };
    using std::integral_constant;
    if (left <= 8)
      tile(integral_constant<int, 8>(), integral_constant<int, 1>());
    else if (left <= kLanes)
      tile(integral_constant<int, kLanes>(), integral_constant<int, 1>());
    else
      tile(integral_constant<int, kLanes>(), integral_constant<int, 2>());
  }
}

// Multiply rows [from, to) of w, in tiles. The last tile begins earlier if it would pass the end of all `outputs`, so
// that each row is summed as in any other tile.
template <typename P>
void multiply_range(P w, int64_t outputs, int64_t inputs, const float* x, int64_t x_stride, float* y,
                    int64_t y_stride, int64_t columns, int64_t from, int64_t to) {
  for (int64_t o = from; o < to; o += kRows) {
    const int64_t begin = std::min(o, outputs - kRows);
    if (begin >= 0) {
      multiply_rows<kRows>(w + begin * inputs, inputs, x, x_stride, y + begin * y_stride, y_stride, columns, o - begin);
    } else {
      for (int64_t row = 0; row < outputs; ++row)
        multiply_rows<1>(w + row * inputs, inputs, x, x_stride, y + row * y_stride, y_stride, columns, 0);
    }
  }
}

// Columns rounded up to whole vectors.
inline int64_t padded_columns(int64_t columns) {
  const int64_t lanes = columns <= 8 ? 8 : columns <= kLanes ? kLanes : 2 * kLanes;
  return (columns + lanes - 1) / lanes * lanes;
}

// w: [outputs, inputs]; x: [inputs, columns]; y: [outputs, columns].
template <typename P>
void multiply(ffi::ThreadPool& pool, P w, ffi::Buffer<ffi::F32>& x, float* y, int64_t outputs) {
  const int64_t inputs = x.dimensions()[0], columns = x.dimensions()[1];
  const int64_t stride = columns == 1 ? 1 : padded_columns(columns);
  const float* from = x.typed_data();
  std::vector<float> padded;
  if (stride != columns) {
    padded.resize(inputs * stride);
    for (int64_t i = 0; i < inputs; ++i) std::memcpy(&padded[i * stride], from + i * columns, columns * sizeof(float));
    from = padded.data();
  }
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t tiles = (outputs + kRows - 1) / kRows;
  const int64_t chunk = std::max<int64_t>(1, tiles / (8 * threads));
  const bool parallel = bytes_of(w, outputs * inputs) >= kParallelBytes;
  parallel_for(pool, parallel ? threads - 1 : 0, (tiles + chunk - 1) / chunk, [&](int64_t index) {
    const int64_t end = std::min(outputs, (index + 1) * chunk * kRows);
    multiply_range(w, outputs, inputs, from, stride, y, columns, columns, index * chunk * kRows, end);
  });
}

// w: [groups, outputs, inputs]; x: [inputs, columns], group after group; sizes: columns of each group; y: [outputs,
// columns], 0 behind the last group.
template <typename P>
void multiply_groups(ffi::ThreadPool& pool, P w, ffi::Buffer<ffi::F32>& x, ffi::Buffer<ffi::S32>& sizes,
                     float* y, int64_t outputs) {
  struct Group {
    P w;
    int64_t first, columns, stride, packed;
  };
  const int64_t inputs = x.dimensions()[0], columns = x.dimensions()[1];
  std::vector<Group> groups;
  int64_t first = 0, packed = 0;
  for (int64_t g = 0; g < sizes.dimensions()[0]; ++g) {
    const int64_t size = std::min<int64_t>(sizes.typed_data()[g], columns - first);
    if (size <= 0) continue;
    groups.push_back({w + g * outputs * inputs, first, size, padded_columns(size), packed});
    first += size;
    packed += inputs * groups.back().stride;
  }
  if (first < columns)
    for (int64_t o = 0; o < outputs; ++o) std::memset(y + o * columns + first, 0, (columns - first) * sizeof(float));
  const int64_t count = groups.size();
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t tiles = (outputs + kRows - 1) / kRows;
  const int64_t chunk = std::max<int64_t>(1, tiles * count / (8 * threads));
  const int64_t chunks = (tiles + chunk - 1) / chunk;
  const bool parallel = count * bytes_of(w, outputs * inputs) >= kParallelBytes;
  const int64_t helpers = parallel ? threads - 1 : 0;
  std::vector<float> columns_of(packed);
  parallel_for(pool, helpers, count, [&](int64_t index) {
    const Group& group = groups[index];
    for (int64_t i = 0; i < inputs; ++i)
      std::memcpy(&columns_of[group.packed + i * group.stride], x.typed_data() + i * columns + group.first,
                  group.columns * sizeof(float));
  });
  parallel_for(pool, helpers, count * chunks, [&](int64_t index) {
    const Group& group = groups[index / chunks];
    const int64_t from = index % chunks * chunk * kRows;
    multiply_range(group.w, outputs, inputs, &columns_of[group.packed], group.stride, y + group.first, columns,
                   group.columns, from, std::min(outputs, from + chunk * kRows));
  });
}

}  // namespace adaserve
