// Paged tree attention: an online softmax over a row's pages, then over its in-flight keys.
//
// Axes as in reference.py: R rows, T packed tokens, H/K query/KV heads, G = H / K, D head dim, S page slots, P pages,
// L layers, W beam width, N keys of a beam. A unit of work is the queries of one row (at most kQueries of them) under
// one KV head, so that a page is read once for G * kQueries query rows. Keys are taken kBlock at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "parallel.h"
#include "vectors.h"

namespace adaserve {

namespace ffi = xla::ffi;

constexpr int64_t kQueries = 16;
constexpr int kBlock = 64;   // keys, as many as a mask has bits
constexpr int64_t kParallelPairs = 1 << 13;  // pairs of query row and key above which a second thread is worth waking
constexpr float kLowest = -1e30f;

// Query rows of a unit and their running softmax. q: [M, D], scaled; weighted: [M, D]; peak, mass: [M]; softcap: 0 for
// none.
struct Queries {
  int64_t head_dim;
  float softcap;
  std::vector<float> q, weighted, peak, mass;

  // sinks: of the G heads of the unit, whose rows lie one head after another; null for none. A sink is a key that has a
  // score and no value.
  Queries(int64_t rows, int64_t head_dim, float softcap, const float* sinks, int64_t group)
      : head_dim(head_dim), softcap(softcap), q(rows * head_dim), weighted(rows * head_dim, 0.0f), peak(rows, kLowest),
        mass(rows, 0.0f) {
    for (int64_t m = 0; sinks && m < rows; ++m) peak[m] = sinks[m / (rows / group)], mass[m] = 1.0f;
  }
};

// Fetches the block after the present one into the second-level cache, a share of it at a time, so that memory is busy
// while the present one is computed with.
struct Fetch {
  const float *k = nullptr, *v = nullptr;
  int64_t count = 0, at = 0, share = 0;  // f32 of k, and as many of v; those that were fetched; those of one share
  void next() {
    const int64_t end = std::min(count, at + share);
    for (; at < end; at += kLine / sizeof(float)) {
      __builtin_prefetch(k + at, 0, 2);
      __builtin_prefetch(v + at, 0, 2);
    }
  }
};

// Up to kBlock keys and values that lie one after another, f32[D] each.
struct Keys {
  const float *k, *v;
  int count;
  uint64_t all() const { return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1; }
  int groups() const { return (count + kLanes - 1) / kLanes; }
};

// Return the products of q with kLanes keys. key(j): the j-th, f32[D].
template <int D, typename Key>
inline Floats dot_products(const float* q, int64_t dim, const Key& key) {
  Floats products[kLanes];
  for (int j = 0; j < kLanes; ++j) {
    const float* k = key(j);
    products[j] = load<kLanes>(q) * load<kLanes>(k);
    for (int64_t d = kLanes; d < (D ? D : dim); d += kLanes) products[j] += load<kLanes>(q + d) * load<kLanes>(k + d);
  }
  return sum_lanes(products);
}

// Let query row m see the keys of `seen`, bits over the block. D: head dim, or 0 for one known at run time.
template <int D>
inline void absorb(Queries& queries, int64_t m, const Keys& keys, uint64_t seen, Fetch& fetch) {
  const int64_t dim = D ? D : queries.head_dim;
  const int groups = keys.groups();
  const float* q = &queries.q[m * dim];
  Ints lane;
  for (int j = 0; j < kLanes; ++j) lane[j] = j;
  Floats scores[kBlock / kLanes], top = Floats{} + kLowest;
  for (int g = 0; g < groups; ++g) {
    fetch.next();
    const float* group = keys.k + g * kLanes * dim;
    const int last = keys.count - 1 - g * kLanes;
    scores[g] = last >= kLanes - 1 ? dot_products<D>(q, dim, [&](int j) { return group + j * dim; })
                                   : dot_products<D>(q, dim, [&](int j) { return group + std::min(j, last) * dim; });
    if (queries.softcap > 0) scores[g] = queries.softcap * tanh(scores[g] / queries.softcap);
    Ints hidden = ((Ints{} + static_cast<int32_t>(seen >> (g * kLanes))) >> lane & 1) == 0;
    scores[g] = hidden ? Floats{} + kLowest : scores[g];
    top = scores[g] > top ? scores[g] : top;
  }
  const float peak = std::max(queries.peak[m], largest(top));
  const float shrink = exp_negative(Floats{} + (queries.peak[m] - peak))[0];
  float weights[kBlock];
  Floats mass{};
  for (int g = 0; g < groups; ++g) {
    Floats weight = scores[g] <= kLowest ? Floats{} : exp_negative(scores[g] - peak);
    mass += weight;
    store<kLanes>(weights + g * kLanes, weight);
  }
  queries.peak[m] = peak;
  queries.mass[m] = queries.mass[m] * shrink + sum(mass);
  float* weighted = &queries.weighted[m * dim];
  constexpr int kParts = D ? D / kLanes : 1;  // registers that hold the sum of a part of the head dim
  for (int64_t d = 0; d < dim; d += kParts * kLanes) {
    Floats out[kParts];
    for (int i = 0; i < kParts; ++i) out[i] = load<kLanes>(weighted + d + i * kLanes) * shrink;
    for (int j = 0; j < keys.count; ++j) {
      const float* v = keys.v + j * dim + d;
      for (int i = 0; i < kParts; ++i) out[i] += weights[j] * load<kLanes>(v + i * kLanes);
    }
    for (int i = 0; i < kParts; ++i) store<kLanes>(weighted + d + i * kLanes, out[i]);
  }
}

template <typename Seen>
void absorb_all(Queries& queries, const Keys& keys, const Seen& seen, Fetch fetch = {}) {
  const int64_t rows = queries.peak.size();
  fetch.share = fetch.count / (rows * keys.groups()) + 1;
  for (int64_t m = 0; m < rows; ++m) {
    uint64_t mask = seen(m);
    if (!mask) continue;
    if (queries.head_dim == 64)
      absorb<64>(queries, m, keys, mask, fetch);
    else if (queries.head_dim == 128)
      absorb<128>(queries, m, keys, mask, fetch);
    else
      absorb<0>(queries, m, keys, mask, fetch);
  }
}

// Keys or values of one layer in pages: a pool, and the pages after it while it is extended.
struct Pages {
  const float *base, *extension;
  int64_t base_pages, page, kv_heads, slots, head_dim;

  Pages(ffi::Buffer<ffi::F32>& pool, ffi::Buffer<ffi::F32>& more, int64_t layer) {
    auto shape = pool.dimensions();
    base_pages = shape[1], kv_heads = shape[2], slots = shape[3], head_dim = shape[4];
    page = kv_heads * slots * head_dim;
    base = pool.typed_data() + layer * base_pages * page;
    extension = more.typed_data() + layer * more.dimensions()[1] * page;
  }
  const float* at(int64_t id, int64_t head) const {
    const float* from = id < base_pages ? base + id * page : extension + (id - base_pages) * page;
    return from + head * slots * head_dim;
  }
};

// Keys and values of one KV head that a row has in pages.
struct Context {
  const Pages &k, &v;
  const int32_t* page_table;
  int64_t head, length;
  // The keys from position `at` to the end of their page; none at the end of the context.
  Keys block(int64_t at) const {
    if (at >= length) return {nullptr, nullptr, 0};
    const int64_t id = page_table[at / k.slots], slot = at % k.slots, left = std::min(k.slots - slot, length - at);
    return {k.at(id, head) + slot * k.head_dim, v.at(id, head) + slot * k.head_dim,
            static_cast<int>(std::min<int64_t>(kBlock, left))};
  }
};

// Let every query row see the context of its row from position `floor` on. first(m): the first position that query row
// m sees. after: keys that the thread reads next.
template <typename First>
void absorb_context(Queries& queries, const Context& context, const Keys& after, int64_t floor, const First& first) {
  int64_t at = std::max<int64_t>(0, floor);
  for (Keys keys = context.block(at), next; keys.count; keys = next) {
    next = context.block(at + keys.count);
    const Keys& fetched = next.count ? next : after;
    auto seen = [&](int64_t m) -> uint64_t {
      const int64_t hidden = std::max<int64_t>(0, first(m) - at);
      return hidden >= keys.count ? 0 : keys.all() & ~((uint64_t{1} << hidden) - 1);
    };
    absorb_all(queries, keys, seen, Fetch{fetched.k, fetched.v, fetched.count * context.k.head_dim});
    at += keys.count;
  }
}

// Let every query row see in-flight keys, [N, D] each. seen(m, n): whether row m sees key n.
template <typename Seen>
void absorb_in_flight(Queries& queries, const float* k, const float* v, int64_t count, const Seen& seen) {
  for (int64_t at = 0; at < count; at += kBlock) {
    Keys keys{k + at * queries.head_dim, v + at * queries.head_dim,
              static_cast<int>(std::min<int64_t>(kBlock, count - at))};
    absorb_all(queries, keys, [&](int64_t m) {
      uint64_t mask = 0;
      for (int j = 0; j < keys.count; ++j) mask |= uint64_t(seen(m, at + j)) << j;
      return mask;
    });
  }
}

inline bool bit(const uint32_t* words, int64_t at) { return words[at / 32] >> (at % 32) & 1; }

inline const float* sinks_of(ffi::Buffer<ffi::F32>& sinks, int64_t head) {
  return sinks.dimensions()[0] ? sinks.typed_data() + head : nullptr;
}

inline float scale_of(int64_t head_dim) { return 1.0f / __builtin_sqrtf(static_cast<float>(head_dim)); }

// Call body(i) for each i below `count`, a few neighbours at a time on one thread; on this one if there is little work.
template <typename Body>
void parallel_chunks(ffi::ThreadPool& pool, int64_t pairs, int64_t count, const Body& body) {
  const int64_t threads = std::max<int64_t>(1, pool.num_threads()), chunk = std::max<int64_t>(1, count / (8 * threads));
  parallel_for(pool, pairs < kParallelPairs ? 0 : threads - 1, (count + chunk - 1) / chunk, [&](int64_t index) {
    for (int64_t i = index * chunk; i < std::min(count, (index + 1) * chunk); ++i) body(i);
  });
}

// q: [H, D, T]; k, v: [K, D, T]; count, context: i32[R]; position: i32[T]; bits: u32[T, words]; sinks: [H], or empty;
// window, softcap: 0 for none.
// Columns of `out` that no row's tokens use are 0.
inline ffi::Error packed_attention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k,
                  ffi::Buffer<ffi::F32> v, ffi::Buffer<ffi::F32> k_pool, ffi::Buffer<ffi::F32> v_pool,
                  ffi::Buffer<ffi::F32> k_more, ffi::Buffer<ffi::F32> v_more, ffi::Buffer<ffi::S32> page_table,
                  ffi::Buffer<ffi::S32> context, ffi::Buffer<ffi::S32> count, ffi::Buffer<ffi::S32> position,
                  ffi::Buffer<ffi::U32> bits, ffi::Buffer<ffi::F32> sinks, int64_t layer, int64_t window, float softcap,
                  ffi::ResultBuffer<ffi::F32> out) {
  const int64_t heads = q.dimensions()[0], dim = q.dimensions()[1], tokens = q.dimensions()[2];
  const int64_t kv_heads = k.dimensions()[0], group = heads / kv_heads, words = bits.dimensions()[1];
  const int64_t table_pages = page_table.dimensions()[1], rows = context.dimensions()[0];
  const Pages k_pages(k_pool, k_more, layer), v_pages(v_pool, v_more, layer);
  struct Unit {
    int64_t row, row_begin, begin, end, head;
  };
  std::vector<Unit> units;
  int64_t used = 0, pairs = 0;
  for (int64_t row = 0; row < rows; ++row) {
    int64_t some = count.typed_data()[row];
    for (int64_t begin = 0; begin < some; begin += kQueries)
      units.push_back({row, used, used + begin, used + std::min(some, begin + kQueries), 0});
    pairs += some * heads * (context.typed_data()[row] + some);
    used += some;
  }
  // Neighbouring tokens of a head share cache lines of q and out: a thread takes units of one head that are neighbours.
  const int64_t num_units = units.size();
  for (int64_t head = 1; head < kv_heads; ++head)
    for (int64_t index = 0; index < num_units; ++index) {
      units.push_back(units[index]);
      units.back().head = head;
    }
  if (used < tokens)
    for (int64_t line = 0; line < heads * dim; ++line)
      std::fill(out->typed_data() + line * tokens + used, out->typed_data() + (line + 1) * tokens, 0.0f);
  const float scale = scale_of(dim);
  const int32_t* positions = position.typed_data();
  auto context_of = [&](const Unit& unit) -> Context {
    return {k_pages, v_pages, page_table.typed_data() + unit.row * table_pages, unit.head,
            context.typed_data()[unit.row]};
  };
  parallel_chunks(pool, pairs, units.size(), [&](int64_t index) {
    const Unit unit = units[index];
    const int64_t num = unit.end - unit.begin;
    Queries queries(group * num, dim, softcap, sinks_of(sinks, unit.head * group), group);
    const float* from = q.typed_data() + unit.head * group * dim * tokens;
    for (int64_t g = 0; g < group; ++g)
      for (int64_t d = 0; d < dim; ++d)
        for (int64_t i = 0; i < num; ++i)
          queries.q[(g * num + i) * dim + d] = from[(g * dim + d) * tokens + unit.begin + i] * scale;
    auto first = [&](int64_t m) -> int64_t { return window ? positions[unit.begin + m % num] - window + 1 : 0; };
    int64_t floor = window ? first(0) : 0;
    for (int64_t i = 1; window && i < num; ++i) floor = std::min(floor, first(i));
    const Unit& next = units[std::min<int64_t>(index + 1, units.size() - 1)];
    absorb_context(queries, context_of(unit), context_of(next).block(0), floor, first);
    // A token's ancestors, and a prompt's earlier tokens, come before it in the packed array.
    const int64_t in_flight = unit.end - unit.row_begin;
    std::vector<float> own(2 * in_flight * dim);
    float *own_k = own.data(), *own_v = own_k + in_flight * dim;
    for (int64_t d = 0; d < dim; ++d) {
      const int64_t line = (unit.head * dim + d) * tokens + unit.row_begin;
      for (int64_t n = 0; n < in_flight; ++n) {
        own_k[n * dim + d] = k.typed_data()[line + n];
        own_v[n * dim + d] = v.typed_data()[line + n];
      }
    }
    absorb_in_flight(queries, own_k, own_v, in_flight, [&](int64_t m, int64_t n) {
      const int64_t token = unit.begin + m % num, key = unit.row_begin + n;
      return bit(bits.typed_data() + token * words, key) && (!window || positions[key] > positions[token] - window);
    });
    float* to = out->typed_data() + unit.head * group * dim * tokens;
    for (int64_t m = 0; m < group * num; ++m) {
      const float by = 1.0f / std::max(queries.mass[m], 1e-30f);
      for (int64_t d = 0; d < dim; ++d)
        to[(m / num * dim + d) * tokens + unit.begin + m % num] = queries.weighted[m * dim + d] * by;
    }
  });
  return ffi::Error::Success();
}

// q: [R, K, G, W, D]; k, v: [R, K, N, D]; context: i32[R]; first: i32[R, W]; bits: u32[R, W, words]; sinks, softcap: as
// above.
inline ffi::Error beam_attention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k,
                ffi::Buffer<ffi::F32> v, ffi::Buffer<ffi::F32> k_pool, ffi::Buffer<ffi::F32> v_pool,
                ffi::Buffer<ffi::F32> k_more, ffi::Buffer<ffi::F32> v_more, ffi::Buffer<ffi::S32> page_table,
                ffi::Buffer<ffi::S32> context, ffi::Buffer<ffi::S32> first, ffi::Buffer<ffi::U32> bits,
                ffi::Buffer<ffi::F32> sinks, int64_t layer, float softcap, ffi::ResultBuffer<ffi::F32> out) {
  auto shape = q.dimensions();
  const int64_t rows = shape[0], kv_heads = shape[1], group = shape[2], width = shape[3], dim = shape[4];
  const int64_t num_keys = k.dimensions()[2], words = bits.dimensions()[2], table_pages = page_table.dimensions()[1];
  const Pages k_pages(k_pool, k_more, layer), v_pages(v_pool, v_more, layer);
  int64_t pairs = 0;
  for (int64_t row = 0; row < rows; ++row) pairs += (context.typed_data()[row] + num_keys) * kv_heads * group * width;
  const float scale = scale_of(dim);
  auto context_of = [&](int64_t unit) -> Context {
    const int64_t row = unit / kv_heads;
    return {k_pages, v_pages, page_table.typed_data() + row * table_pages, unit % kv_heads, context.typed_data()[row]};
  };
  parallel_chunks(pool, pairs, rows * kv_heads, [&](int64_t unit) {
    const int64_t row = unit / kv_heads, size = group * width * dim;
    const int32_t* seen_from = first.typed_data() + row * width;
    Queries queries(group * width, dim, softcap, sinks_of(sinks, unit % kv_heads * group), group);
    for (int64_t at = 0; at < size; ++at) queries.q[at] = q.typed_data()[unit * size + at] * scale;
    absorb_context(queries, context_of(unit), context_of(std::min(unit + 1, rows * kv_heads - 1)).block(0),
                   *std::min_element(seen_from, seen_from + width),
                   [&](int64_t m) -> int64_t { return seen_from[m % width]; });
    absorb_in_flight(queries, k.typed_data() + unit * num_keys * dim, v.typed_data() + unit * num_keys * dim, num_keys,
                     [&](int64_t m, int64_t n) {
                       return bit(bits.typed_data() + (row * width + m % width) * words, n);
                     });
    for (int64_t m = 0; m < group * width; ++m) {
      const float by = 1.0f / std::max(queries.mass[m], 1e-30f);
      float* to = out->typed_data() + unit * size + m * dim;
      for (int64_t d = 0; d < dim; ++d) to[d] = queries.weighted[m * dim + d] * by;
    }
  });
  return ffi::Error::Success();
}

}  // namespace adaserve
