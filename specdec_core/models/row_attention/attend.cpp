// Attention over rows of a slot cache, where every token pays for the positions that it sees.
//
// Queries that share a row and a key head are attended together, up to a register's lanes of them,
// block by block of positions with a running softmax.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

constexpr int kBlock = 32;      // positions at a time
constexpr int kMostLanes = 16;  // queries at a time
constexpr int kKeys = 8;        // keys at a time
constexpr float kNever = -1e30f;

template <int L>
struct Lanes {
  typedef float F __attribute__((vector_size(4 * L), aligned(4)));
  typedef int32_t I __attribute__((vector_size(4 * L), aligned(4)));
};

// e^x for x <= 0, to some 1e-7 of the value: 2^n times a polynomial of the rest.
template <int L>
typename Lanes<L>::F exponential(typename Lanes<L>::F x) {
  using F = typename Lanes<L>::F;
  using I = typename Lanes<L>::I;
  F t = x * 1.44269504088896341f;
  t = t < -126.0f ? F{} - 126.0f : t;
  const I n = __builtin_convertvector(t - 0.5f, I);  // towards zero: rounds, as t is not positive
  const F f = (t - __builtin_convertvector(n, F)) * 0.69314718055994531f;
  F p = f * (1.0f / 5040) + 1.0f / 720;
  p = p * f + 1.0f / 120;
  p = p * f + 1.0f / 24;
  p = p * f + 1.0f / 6;
  p = p * f + 0.5f;
  p = p * f + 1.0f;
  p = p * f + 1.0f;
  const I power = (n + 127) << 23;
  F scale;
  std::memcpy(&scale, &power, sizeof scale);
  return p * scale;
}

template <typename T>
const float* widen(const T* from, int64_t count, float* buffer) {
  if constexpr (std::is_same_v<T, float>) {
    return from;
  } else {
    const uint16_t* __restrict bits = reinterpret_cast<const uint16_t*>(from);
    uint32_t* __restrict wide = reinterpret_cast<uint32_t*>(buffer);
    for (int64_t i = 0; i < count; ++i) wide[i] = static_cast<uint32_t>(bits[i]) << 16;
    return buffer;
  }
}

// What a token sees: positions [first, end) of its row, and those of `count` nodes from `nodes` on.
struct Token {
  int32_t row, first, end, nodes, count;
};

// The running softmax of some queries.
struct State {
  float best[kMostLanes], total[kMostLanes];
  std::vector<float> sum;  // (queries, size)
};

// One query and `n` keys.
void attend_one(const float* __restrict query, const float* key, const float* value, int n,
                int64_t size, int lane, State& state) {
  float s[kBlock];
  float top = state.best[lane];
  for (int j = 0; j < n; ++j) {
    const float* __restrict k = key + j * size;
    float dot = 0;
    for (int64_t d = 0; d < size; ++d) dot += query[d] * k[d];
    s[j] = dot;
    top = std::max(top, dot);
  }
  for (int j = n; j < kBlock; ++j) s[j] = kNever;
  const float decay = std::exp(state.best[lane] - top);
  float weight = 0;
  using F = Lanes<16>::F;
  for (int j = 0; j < n; j += 16) {
    F x;
    std::memcpy(&x, s + j, sizeof x);
    x = exponential<16>(x - top);
    std::memcpy(s + j, &x, sizeof x);
  }
  for (int j = 0; j < n; ++j) weight += s[j];
  state.best[lane] = top;
  state.total[lane] = state.total[lane] * decay + weight;
  float* __restrict sum = state.sum.data() + lane * size;
  for (int64_t d = 0; d < size; ++d) sum[d] *= decay;
  for (int j = 0; j < n; ++j) {
    const float* __restrict v = value + j * size;
    for (int64_t d = 0; d < size; ++d) sum[d] += s[j] * v[d];
  }
}

// L queries, as (size, L) in `lanes`, and `n` keys from position `at` on. Lane l sees [first, end).
template <int L>
void attend_lanes(const float* lanes, const float* key, const float* value, int n, int at,
                  const int32_t* first, const int32_t* end, bool masked, int queries, int64_t size,
                  State& state) {
  using F = typename Lanes<L>::F;
  using I = typename Lanes<L>::I;
  F s[kBlock];
  const F* q = reinterpret_cast<const F*>(lanes);
  int j = 0;
  for (; j + kKeys <= n; j += kKeys) {  // so many that no product waits for the one before
    F a[kKeys] = {};
    for (int64_t d = 0; d < size; ++d)
      for (int i = 0; i < kKeys; ++i) a[i] += q[d] * key[(j + i) * size + d];
    for (int i = 0; i < kKeys; ++i) s[j + i] = a[i];
  }
  for (; j < n; ++j) {
    F a{};
    for (int64_t d = 0; d < size; ++d) a += q[d] * key[j * size + d];
    s[j] = a;
  }
  if (masked) {
    I low, high;
    std::memcpy(&low, first, sizeof low);
    std::memcpy(&high, end, sizeof high);
    for (j = 0; j < n; ++j) s[j] = ((low <= at + j) & (high > at + j)) ? s[j] : F{} + kNever;
  }
  F best, total;
  std::memcpy(&best, state.best, sizeof best);
  std::memcpy(&total, state.total, sizeof total);
  // More than what is masked, which weighs nothing then.
  F top = best > 0.1f * kNever ? best : F{} + 0.1f * kNever;
  for (j = 0; j < n; ++j) top = s[j] > top ? s[j] : top;
  const F decay = exponential<L>(best - top);
  F weight{};
  for (j = 0; j < n; ++j) weight += s[j] = exponential<L>(s[j] - top);
  total = total * decay + weight;
  std::memcpy(state.best, &top, sizeof top);
  std::memcpy(state.total, &total, sizeof total);
  using V = Lanes<16>::F;
  for (int l = 0; l < queries; l += 4)
    for (int64_t d = 0; d < size; d += 32) {
      const int parts = d + 32 <= size ? 2 : 1;
      V a[2][4];
      for (int p = 0; p < parts; ++p)
        for (int i = 0; i < 4; ++i) {
          std::memcpy(&a[p][i], state.sum.data() + (l + i) * size + d + 16 * p, sizeof(V));
          a[p][i] *= decay[l + i];
        }
      const float* weights = reinterpret_cast<const float*>(s) + l;
      if (parts == 2) {
        for (j = 0; j < n; ++j) {
          V x, y;
          std::memcpy(&x, value + j * size + d, sizeof x);
          std::memcpy(&y, value + j * size + d + 16, sizeof y);
          for (int i = 0; i < 4; ++i) {
            a[0][i] += x * weights[j * L + i];
            a[1][i] += y * weights[j * L + i];
          }
        }
      } else {
        for (j = 0; j < n; ++j) {
          V x;
          std::memcpy(&x, value + j * size + d, sizeof x);
          for (int i = 0; i < 4; ++i) a[0][i] += x * weights[j * L + i];
        }
      }
      for (int p = 0; p < parts; ++p)
        for (int i = 0; i < 4; ++i)
          std::memcpy(state.sum.data() + (l + i) * size + d + 16 * p, &a[p][i], sizeof(V));
    }
}

// Query heads [first, first + count), which share the key head `key`.
struct Heads {
  int64_t key, first, count;
};

template <typename Q, typename T>
struct Worker {
  const at::Tensor &query, &keys, &values;
  const Token* tokens;
  const int32_t* nodes;
  float scale;
  Q* out;
  int64_t all_heads, size;

  std::vector<float> plain, lanes, k_buffer, v_buffer;
  State state;

  // Asks for the next block while this one is worked on: the processor itself stops at page ends.
  void fetch(const T* from, int64_t left) {
    const char* byte = reinterpret_cast<const char*>(from);
    const int64_t bytes = std::min<int64_t>(left, kBlock * size) * static_cast<int64_t>(sizeof(T));
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(byte + b);
  }

  // The queries of tokens [first, first + count) and of `heads`: at most kMostLanes.
  void run(int64_t first, int count, const Heads& heads) {
    const int queries = count * static_cast<int>(heads.count);
    const bool together = queries > 1 && size % 16 == 0;
    const int width = queries <= 4 ? 4 : queries <= 8 ? 8 : 16;
    plain.resize(kMostLanes * size);
    k_buffer.resize(kBlock * size);
    v_buffer.resize(kBlock * size);
    state.sum.assign(kMostLanes * size, 0.0f);
    std::fill_n(state.best, kMostLanes, kNever);
    std::fill_n(state.total, kMostLanes, 0.0f);
    int32_t begin[kMostLanes] = {}, end[kMostLanes] = {};
    int32_t low = INT32_MAX, high = 0, inner_low = 0, inner_high = INT32_MAX;
    const Q* q = query.const_data_ptr<Q>();
    for (int t = 0; t < count; ++t) {
      const Token& token = tokens[first + t];
      low = std::min(low, token.first);
      high = std::max(high, token.end);
      inner_low = std::max(inner_low, token.first);
      inner_high = std::min(inner_high, token.end);
      for (int64_t h = 0; h < heads.count; ++h) {
        const int64_t l = t * heads.count + h;
        begin[l] = token.first, end[l] = token.end;
        const Q* from = q + (first + t) * query.stride(0) + (heads.first + h) * query.stride(1);
        float* to = plain.data() + l * size;
        for (int64_t d = 0; d < size; ++d) to[d] = static_cast<float>(from[d]) * scale;
      }
    }
    const int64_t row = tokens[first].row;
    const T* key = keys.const_data_ptr<T>() + row * keys.stride(0) + heads.key * keys.stride(1);
    const int64_t place = row * values.stride(0) + heads.key * values.stride(1);
    const T* value = values.const_data_ptr<T>() + place;
    if (together) {
      lanes.assign(size * width, 0.0f);
      for (int l = 0; l < queries; ++l)
        for (int64_t d = 0; d < size; ++d) lanes[d * width + l] = plain[l * size + d];
    }
    for (int at = low; at < high; at += kBlock) {
      const int n = std::min(kBlock, high - at);
      fetch(key + (at + kBlock) * size, (high - at - kBlock) * size);
      fetch(value + (at + kBlock) * size, (high - at - kBlock) * size);
      const float* k = widen(key + at * size, n * size, k_buffer.data());
      const float* v = widen(value + at * size, n * size, v_buffer.data());
      const bool masked = at < inner_low || at + n > inner_high;
      if (!together) {
        for (int l = 0; l < queries; ++l) {
          const int from = std::max(at, begin[l]), to = std::min(at + n, end[l]);
          if (from < to)
            attend_one(plain.data() + l * size, k + (from - at) * size, v + (from - at) * size,
                       to - from, size, l, state);
        }
      } else if (width == 4) {
        attend_lanes<4>(lanes.data(), k, v, n, at, begin, end, masked, queries, size, state);
      } else if (width == 8) {
        attend_lanes<8>(lanes.data(), k, v, n, at, begin, end, masked, queries, size, state);
      } else {
        attend_lanes<16>(lanes.data(), k, v, n, at, begin, end, masked, queries, size, state);
      }
    }
    for (int t = 0; t < count; ++t) {
      const Token& token = tokens[first + t];
      const int64_t from = t * heads.count, to = from + heads.count;
      for (int node = 0; node < token.count; ++node) {
        const int64_t at = nodes[token.nodes + node];
        const float* k = widen(key + at * size, size, k_buffer.data());
        const float* v = widen(value + at * size, size, v_buffer.data());
        for (int64_t l = from; l < to; ++l)
          attend_one(plain.data() + l * size, k, v, 1, size, static_cast<int>(l), state);
      }
      Q* into = out + ((first + t) * all_heads + heads.first) * size;
      for (int64_t l = from; l < to; ++l, into += size) {
        const float* sum = state.sum.data() + l * size;
        const float inverse = 1.0f / state.total[l];
        for (int64_t d = 0; d < size; ++d) into[d] = static_cast<Q>(sum[d] * inverse);
      }
    }
  }
};

template <typename Q, typename T>
void attend_all(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                const at::Tensor& plan, const at::Tensor& nodes, double scale, at::Tensor& out) {
  const int64_t count = query.size(0), heads = query.size(1), group = heads / keys.size(1);
  const Token* tokens = reinterpret_cast<const Token*>(plan.const_data_ptr<int32_t>());
  const int64_t most = std::min<int64_t>(group, kMostLanes);  // heads together
  std::vector<Heads> shares;
  for (int64_t head = 0; head < heads;) {
    const int64_t key = head / group, own = std::min(most, (key + 1) * group - head);
    shares.push_back({key, head, own});
    head += own;
  }
  const int64_t tile = kMostLanes / most;  // tokens together
  std::vector<int64_t> tiles;              // the first token of each
  for (int64_t t = 0; t < count; ++t)
    if (tiles.empty() || tokens[t].row != tokens[tiles.back()].row || t - tiles.back() == tile)
      tiles.push_back(t);
  tiles.push_back(count);
  const int64_t width = static_cast<int64_t>(shares.size());
  const int64_t work = static_cast<int64_t>(tiles.size() - 1) * width;
  at::parallel_for(0, work, 1, [&](int64_t from, int64_t to) {
    Worker<Q, T> worker{query, keys, values, tokens, nodes.const_data_ptr<int32_t>(),
                        static_cast<float>(scale), out.mutable_data_ptr<Q>(), heads, query.size(2)};
    for (int64_t job = from; job < to; ++job) {
      const int64_t first = tiles[job / width], last = tiles[job / width + 1];
      worker.run(first, static_cast<int>(last - first), shares[job % width]);
    }
  });
}

at::Tensor attend(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                  const at::Tensor& plan, const at::Tensor& nodes, double scale) {
  at::Tensor out = at::empty(query.sizes(), query.options());
  const bool q16 = query.scalar_type() == at::kBFloat16, k16 = keys.scalar_type() == at::kBFloat16;
  if (q16 && k16)
    attend_all<at::BFloat16, at::BFloat16>(query, keys, values, plan, nodes, scale, out);
  else if (q16)
    attend_all<at::BFloat16, float>(query, keys, values, plan, nodes, scale, out);
  else if (k16)
    attend_all<float, at::BFloat16>(query, keys, values, plan, nodes, scale, out);
  else
    attend_all<float, float>(query, keys, values, plan, nodes, scale, out);
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.def(
      "attend(Tensor query, Tensor keys, Tensor values, Tensor plan, Tensor nodes, float scale)"
      " -> Tensor");
}
TORCH_LIBRARY_IMPL(specdec, CPU, m) { m.impl("attend", &attend); }
