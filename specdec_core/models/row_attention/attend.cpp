// Attention over rows of a slot cache, where every token pays for the positions that it sees.
//
// Queries that share a row and a key head are attended together, block by block of positions with
// a running softmax. Scores lie with the keys side by side in a vector's lanes, sums of values with
// the dimensions. Rows of bfloat16 are read as words of two numbers: a vector of words gives the
// numbers of even places, then those of odd ones, and so lie queries and sums too meanwhile.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;
constexpr int kPart = 2 * kLanes;  // dimensions; heads are filled up to whole parts
constexpr int kBlock = 64;         // positions at a time
constexpr int kMostQueries = 64;   // queries together
constexpr int kFew = 3;            // queries for which turning keys over does not pay
constexpr int kAhead = 8192;       // bytes of keys, and of values, asked for before their use
#ifdef __AVX512F__
constexpr int kTile = 6, kWide = 4;  // queries and vectors whose sums the registers hold
#else
constexpr int kTile = 3, kWide = 2;
#endif
#ifdef __AVX512BF16__
constexpr bool kPairProducts = true;  // of bfloat16: exact, and summed in float32
#else
constexpr bool kPairProducts = false;
#endif
constexpr float kNever = -1e30f;

typedef float V __attribute__((vector_size(64), aligned(4)));
typedef int32_t I __attribute__((vector_size(64), aligned(4)));
typedef uint32_t W __attribute__((vector_size(64), aligned(4)));
template <typename Word>
using Vector = std::conditional_t<std::is_same_v<Word, float>, V, W>;

template <typename X, typename T>
X load(const T* from) {
  X x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

template <typename X, typename T>
void store(T* to, X x) {
  std::memcpy(to, &x, sizeof x);
}

// 2^x for |x| <= 0.5.
inline V fraction_power(V x) {
  V p = x * 1.5345811565804071e-4f + 1.3399931215509753e-3f;
  p = p * x + 9.618488958724004e-3f;
  p = p * x + 5.550328776976595e-2f;
  p = p * x + 0.24022646890619395f;
  p = p * x + 0.69314720573726f;
  return p * x + 1.0f;
}

// 2^x for x <= 0, to some 1e-7 of the value: 2^n times a polynomial of the rest. Less than 2^-126
// is 0.
inline V power(V x) {
#ifdef __AVX512F__
  const V n = (V)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
  const __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
  return (V)_mm512_maskz_scalef_ps(kept, (__m512)fraction_power(x - n), (__m512)n);
#else
  const I lost = x < -126.0f;
  x = lost ? V{} - 126.0f : x;
  const I n = __builtin_convertvector(x - 0.5f, I);  // towards zero: rounds, as x is not positive
  const V p = fraction_power(x - __builtin_convertvector(n, V));
  const I exponent = (n + 127) << 23;
  return lost ? V{} : p * load<V>(&exponent);
#endif
}

template <typename F>
inline float across(V x, const F& both) {
  float y[kLanes];
  store(y, x);
  for (int half = kLanes / 2; half; half /= 2)
    for (int l = 0; l < half; ++l) y[l] = both(y[l], y[l + half]);
  return y[0];
}

inline float largest(V x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)x);
#else
  return across(x, [](float a, float b) { return a > b ? a : b; });
#endif
}

inline float sum_of(V x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)x);
#else
  return across(x, [](float a, float b) { return a + b; });
#endif
}

inline V plus_product(V sum, V a, V b) { return sum + a * b; }
#ifdef __AVX512BF16__
inline V plus_product(V sum, W a, W b) {
  return (V)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#endif

// The i-th vector of a row's words: as they are, or widened to float32.
template <typename Word, typename T>
Vector<Word> words(const T* row, int64_t i) {
  if constexpr (std::is_same_v<Word, uint32_t> || std::is_same_v<T, float>) {
    return load<Vector<Word>>(reinterpret_cast<const Word*>(row) + i * kLanes);
  } else {
    const W pairs = load<W>(reinterpret_cast<const uint16_t*>(row) + i / 2 * kPart);
    const bool upper = (i % 2 != 0) == (std::endian::native == std::endian::little);
    const W wide = upper ? pairs & 0xffff0000u : pairs << 16;
    return load<V>(&wide);
  }
}

// Words of bfloat16 from the numbers of even and of odd places.
inline W rounded(V even, V odd) {
  const auto round = [](V x) {
    const W bits = load<W>(&x);
    return x == x ? bits + 0x7fffu + (bits >> 16 & 1u) : W{} + 0x7fc00000u;
  };
  if constexpr (std::endian::native == std::endian::big) std::swap(even, odd);
  return round(even) >> 16 | (round(odd) & 0xffff0000u);
}

// Where the words of T have the dimension d.
template <typename T>
int64_t place(int64_t d) {
  if constexpr (std::is_same_v<T, float>) return d;
  return d / kPart * kPart + d % 2 * kLanes + d % kPart / 2;
}

// 16 vectors of words turned over: lane l of the i-th is lane i of the l-th in `to`.
template <typename X, typename Word>
void turn(const X (&x)[kLanes], Word* to, int64_t stride);

#ifdef __AVX512F__
struct Crossing {
  alignas(64) int32_t low[kLanes], high[kLanes];
  constexpr explicit Crossing(int step) : low(), high() {
    for (int l = 0; l < kLanes; ++l) {
      low[l] = l & step ? (l ^ step) + kLanes : l;
      high[l] = l & step ? l + kLanes : l ^ step;
    }
  }
};

// Two vectors' lanes, of which those with the bit `step` change places with those without.
template <int step, bool high, typename X>
X cross(const X& a, const X& b) {
  static constexpr Crossing kCrossing(step);
  const __m512i from = _mm512_load_si512(high ? kCrossing.high : kCrossing.low);
  return (X)_mm512_permutex2var_epi32((__m512i)a, from, (__m512i)b);
}

template <int step, typename X>
inline void cross_all(X (&x)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & step) continue;
    const X a = x[i], b = x[i + step];
    x[i] = cross<step, false>(a, b);
    x[i + step] = cross<step, true>(a, b);
  }
}

template <typename X, typename Word>
inline void turn(X (&x)[kLanes], Word* to, int64_t stride) {
  cross_all<1>(x);
  cross_all<2>(x);
  cross_all<4>(x);
  cross_all<8>(x);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) store(to + i * stride, x[i]);
}

// Lane l is the sum of the l-th of n vectors' lanes, over those lanes that are l modulo n.
template <int n, typename F>
inline V sums(const F& vector, int first = 0) {
  if constexpr (n == 1) {
    return vector(first);
  } else {
    const V a = sums<n / 2>(vector, first), b = sums<n / 2>(vector, first + n / 2);
    return cross<n / 2, false>(a, b) + cross<n / 2, true>(a, b);
  }
}
#else
template <typename X, typename Word>
inline void turn(X (&x)[kLanes], Word* to, int64_t stride) {
  typedef Word Four __attribute__((vector_size(16), aligned(4)));
  for (int i = 0; i < kLanes; i += 4)
    for (int l = 0; l < kLanes; l += 4) {
      Four a[4];
      for (int k = 0; k < 4; ++k) a[k] = load<Four>(reinterpret_cast<const Word*>(&x[i + k]) + l);
      for (int k = 0; k < 4; ++k)
        store(to + (l + k) * stride + i, Four{a[0][k], a[1][k], a[2][k], a[3][k]});
    }
}

template <int n, typename F>
inline V sums(const F& vector) {
  float s[n];
  for (int i = 0; i < n; ++i) s[i] = sum_of(vector(i));
  return load<V>(s);
}
#endif

// What a token sees: positions [first, end) of its row, and those of `count` nodes from `nodes` on.
struct Token {
  int32_t row, first, end, nodes, count;
};

// Tokens [first, last) of a row with query heads [head, head + heads), which share the key head
// `key`. Together they see positions within [low, high).
struct Job {
  int64_t first, last, key, head, heads;
  int32_t low, high;
};

// Rows to ask memory for: the j-th is asked for while the j-th of a block is worked on.
struct Ahead {
  const char *first, *second;  // `second` from row `cut` on
  int64_t cut, bytes;

  // The i-th vector of a row of T, and the line that it is in.
  template <typename T>
  inline void ask(int64_t j, int64_t i) const {
    const char* row = (j < cut ? first : second) + j * bytes;
    __builtin_prefetch(row + i * kLanes * static_cast<int64_t>(sizeof(T)));
  }
};

// The keys or the values that some jobs read, in that order. Memory is asked for them well before
// their use: the processor itself foresees little, as it stops at page ends.
class Stream {
 public:
  Stream(const void* start, const at::Tensor& kept, const Token* tokens, const Job* job,
         const Job* last)
      : start_(static_cast<const char*>(start)), row_(kept.stride(0) * kept.element_size()),
        head_(kept.stride(1) * kept.element_size()), bytes_(kept.size(3) * kept.element_size()),
        tokens_(tokens), job_(job), last_(last) {
    for (int64_t ahead = 0; ahead < kAhead && (left_ || next()); ahead += bytes_) ask();
  }

  // The next n rows.
  Ahead take(int n) {
    if (left_ == 0) next();
    const int64_t cut = std::min<int64_t>(left_, n);
    Ahead ahead{at_, at_ - cut * bytes_, cut, bytes_};  // at the end, rows that there were
    at_ += cut * bytes_, left_ -= cut;
    for (int64_t rest = n - cut; rest && next();) {
      if (left_ >= rest) {
        ahead.second = at_ - cut * bytes_;
        at_ += rest * bytes_, left_ -= rest;
        break;
      }
      for (; left_; --rest) ask();
    }
    return ahead;
  }

 private:
  bool next() {
    for (; job_ != last_ && left_ == 0; ++job_) {
      at_ = start_ + tokens_[job_->first].row * row_ + job_->key * head_ + job_->low * bytes_;
      left_ = std::max(job_->high - job_->low, 0);
    }
    return left_ != 0;
  }

  void ask() {
    for (int64_t b = 0; b < bytes_; b += 64) __builtin_prefetch(at_ + b);
    at_ += bytes_, --left_;
  }

  const char *start_, *at_ = nullptr;
  int64_t row_, head_, bytes_, left_ = 0;
  const Token* tokens_;
  const Job *job_, *last_;
};

// The scores of one query and of 16 keys from the j-th on, of n.
template <typename Word, typename T>
inline V scores_of_one(const Word* query, int64_t vectors, const T* key, int64_t size, int j, int n,
                       const Ahead& ahead) {
  return sums<kLanes>([&](int k) {
    const T* row = key + std::min(j + k, n - 1) * size;
    V sum{};
    for (int64_t i = 0; i < vectors; ++i) {
      ahead.ask<Word>(j + k, i);
      sum = plus_product(sum, words<Word>(row, i), load<Vector<Word>>(query + i * kLanes));
    }
    return sum;
  });
}

// The scores of N queries and of 16 G keys, which are turned over.
template <int N, int G, typename Word>
void scores_of_some(const Word* query, int64_t count, const Word* turned, float* scores) {
  V a[N][G] = {};
  for (int64_t d = 0; d < count; ++d) {
    Vector<Word> k[G];
    for (int g = 0; g < G; ++g) k[g] = load<Vector<Word>>(turned + d * kBlock + g * kLanes);
    for (int i = 0; i < N; ++i) {
      const Vector<Word> q = Vector<Word>{} + query[i * count + d];
      for (int g = 0; g < G; ++g) a[i][g] = plus_product(a[i][g], k[g], q);
    }
  }
  for (int i = 0; i < N; ++i)
    for (int g = 0; g < G; ++g) store(scores + i * kBlock + g * kLanes, a[i][g]);
}

// Adds n values with the weights of N queries to their sums: M vectors of each.
template <int N, int M, typename T, typename F>
void add_values(const T* value, int64_t size, int n, const float* weights, const float* decays,
                float* sums, int64_t vectors, int64_t at, const F& meanwhile) {
  V a[N][M];
  for (int i = 0; i < N; ++i)
    for (int m = 0; m < M; ++m)
      a[i][m] = load<V>(sums + (i * vectors + at + m) * kLanes) * decays[i];
  for (int j = 0; j < n; ++j) {
    V v[M];
    for (int m = 0; m < M; ++m) {
      meanwhile(j, at + m);
      v[m] = words<float>(value + j * size, at + m);
    }
    for (int i = 0; i < N; ++i)
      for (int m = 0; m < M; ++m) a[i][m] += v[m] * weights[i * kBlock + j];
  }
  for (int i = 0; i < N; ++i)
    for (int m = 0; m < M; ++m) store(sums + (i * vectors + at + m) * kLanes, a[i][m]);
}

// Calls f.template operator()<n>() for a number n that is known now only.
template <int most, typename F>
void with_count(int n, const F& f) {
  if constexpr (most > 1) {
    if (n < most) return with_count<most - 1>(n, f);
  }
  f.template operator()<most>();
}

// Memory that a thread keeps.
struct alignas(64) Line {
  float number[kLanes];
};
struct Scratch {
  std::vector<Line> asked, sums, turned, wide, keys, values;
};
template <typename X>
X* room(std::vector<Line>& lines, int64_t count) {
  const size_t needed = (count * sizeof(X) + sizeof(Line) - 1) / sizeof(Line);
  if (lines.size() < needed) lines.resize(needed);
  return reinterpret_cast<X*>(lines.data());
}

// Attends the queries of Q to a cache of T, job by job.
template <typename Q, typename T>
class Worker {
  static constexpr bool kPairs =
      kPairProducts && std::is_same_v<Q, at::BFloat16> && std::is_same_v<T, at::BFloat16>;
  using Word = std::conditional_t<kPairs, uint32_t, float>;

 public:
  Worker(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
         const Token* tokens, const int32_t* nodes, double scale, Q* out, const Job* job,
         const Job* last)
      : tokens_(tokens), nodes_(nodes), scale_(static_cast<float>(scale * 1.4426950408889634)),
        query_(query.const_data_ptr<Q>()), query_token_(query.stride(0)),
        query_head_(query.stride(1)), all_heads_(query.size(1)), out_(out),
        keys_(keys.const_data_ptr<T>()), key_row_(keys.stride(0)), key_head_(keys.stride(1)),
        values_(values.const_data_ptr<T>()), value_row_(values.stride(0)),
        value_head_(values.stride(1)), size_(query.size(2)),
        full_((size_ + kPart - 1) / kPart * kPart), count_(kPairs ? full_ / 2 : full_),
        ahead_keys_(keys_, keys, tokens, job, last),
        ahead_values_(values_, values, tokens, job, last) {}

  void run(const Job& job) {
    prepare(job);
    const int queries = static_cast<int>((job.last - job.first) * job.heads);
    const T* key = keys_ + tokens_[job.first].row * key_row_ + job.key * key_head_;
    const T* value = values_ + tokens_[job.first].row * value_row_ + job.key * value_head_;
    for (int at = job.low; at < job.high; at += kBlock) {
      const int n = std::min(kBlock, job.high - at);
      const bool whole = size_ == full_;
      const auto place = [&](int j) { return at + j; };
      const T* k = whole ? key + at * size_ : gather(key, n, place, scratch_.keys);
      const T* v = whole ? value + at * size_ : gather(value, n, place, scratch_.values);
      attend(0, queries, k, v, n, at, ahead_keys_.take(n), ahead_values_.take(n));
    }
    const int heads = static_cast<int>(job.heads);
    for (int64_t t = job.first, l = 0; t < job.last; ++t, l += heads) {
      const int count = tokens_[t].count;
      std::fill_n(first_ + l, heads, 0);
      std::fill_n(end_ + l, heads, count);
      for (int at = 0; at < count; at += kBlock) {
        const int n = std::min(kBlock, count - at);
        const auto place = [&](int j) { return nodes_[tokens_[t].nodes + at + j]; };
        const T* k = gather(key, n, place, scratch_.keys);
        const T* v = gather(value, n, place, scratch_.values);
        attend(static_cast<int>(l), static_cast<int>(l) + heads, k, v, n, at,
               ahead_keys_.take(0), ahead_values_.take(0));
      }
    }
    finish(job);
  }

 private:
  void prepare(const Job& job) {
    const int64_t queries = (job.last - job.first) * job.heads;
    asked_ = room<Word>(scratch_.asked, queries * count_);
    sums_ = room<float>(scratch_.sums, queries * full_);
    std::fill_n(sums_, queries * full_, 0.0f);
    if (size_ != full_) std::memset(asked_, 0, queries * count_ * sizeof(Word));
    int64_t l = 0;
    for (int64_t t = job.first; t < job.last; ++t)
      for (int64_t h = 0; h < job.heads; ++h, ++l) {
        first_[l] = tokens_[t].first, end_[l] = tokens_[t].end;
        best_[l] = 0.1f * kNever;  // more than what is masked, which weighs nothing then
        totals_[l] = V{};
        const Q* from = query_ + t * query_token_ + (job.head + h) * query_head_;
        if constexpr (kPairs) {
          std::memcpy(asked_ + l * count_, from, size_ * sizeof(Q));
        } else {
          float* to = asked_ + l * count_;
          for (int64_t d = 0; d < size_; ++d) to[place<T>(d)] = static_cast<float>(from[d]);
        }
      }
  }

  // n rows one after the other, filled up with zeros.
  template <typename Place>
  const T* gather(const T* from, int n, const Place& place, std::vector<Line>& lines) {
    T* to = room<T>(lines, kBlock * full_);
    for (int j = 0; j < n; ++j) {
      std::memcpy(to + j * full_, from + place(j) * size_, size_ * sizeof(T));
      std::memset(to + j * full_ + size_, 0, (full_ - size_) * sizeof(T));
    }
    return to;
  }

  // Queries [from, to) and n keys, which begin at position `at`. Asks for others meanwhile.
  void attend(int from, int to, const T* key, const T* value, int n, int at, const Ahead& keys,
              const Ahead& values) {
    const int tiles = (to - from + kTile - 1) / kTile;
    const Word* turned = to - from > kFew ? turn_over(key, n, keys) : nullptr;
    const bool often = tiles > 1 && !std::is_same_v<T, float>;
    const float* wide = often ? widen(value, n, values) : nullptr;
    const auto nothing = [](int64_t, int64_t) {};
    for (int tile = 0; tile < tiles; ++tile) {
      const int l = from + (to - from) * tile / tiles;
      const int count = from + (to - from) * (tile + 1) / tiles - l;
      const int low = *std::min_element(first_ + l, first_ + l + count);
      const int seen = std::min(*std::max_element(end_ + l, end_ + l + count) - at, n);
      if (seen <= 0 || low >= at + n) continue;
      if (turned)
        score_turned(l, count, turned, seen);
      else
        score(l, count, key, seen, keys);
      float decays[kTile];
      for (int i = 0; i < count; ++i) decays[i] = weigh(scores_ + i * kBlock, l + i, seen, at);
      with_count<kTile>(count, [&]<int N>() {
        if (wide)
          add<N>(wide, seen, decays, l, nothing);
        else if (tile)
          add<N>(value, seen, decays, l, nothing);
        else
          add<N>(value, seen, decays, l, [&](int64_t j, int64_t i) { values.ask<T>(j, i); });
      });
    }
  }

  const Word* turn_over(const T* key, int n, const Ahead& ahead) {
    Word* to = room<Word>(scratch_.turned, kBlock * count_);
    for (int j = 0; j < n; j += kLanes)
      for (int64_t i = 0; i < count_ / kLanes; ++i) {
        Vector<Word> x[kLanes];
#pragma GCC unroll 16
        for (int k = 0; k < kLanes; ++k) {
          ahead.ask<Word>(j + k, i);
          x[k] = words<Word>(key + std::min(j + k, n - 1) * full_, i);
        }
        turn(x, to + i * kLanes * kBlock + j, kBlock);
      }
    return to;
  }

  const float* widen(const T* value, int n, const Ahead& ahead) {
    float* to = room<float>(scratch_.wide, kBlock * full_);
    for (int j = 0; j < n; ++j)
      for (int64_t i = 0; i < full_ / kLanes; ++i) {
        ahead.ask<T>(j, i);
        store(to + j * full_ + i * kLanes, words<float>(value + j * full_, i));
      }
    return to;
  }

  void score(int l, int count, const T* key, int n, const Ahead& ahead) {
    for (int j = 0; j < n; j += kLanes)
      for (int i = 0; i < count; ++i) {
        const V scores = scores_of_one<Word>(asked_ + (l + i) * count_, count_ / kLanes, key, full_,
                                             j, n, ahead);
        store(scores_ + i * kBlock + j, scores);
      }
  }

  void score_turned(int l, int count, const Word* turned, int n) {
    constexpr int G = kWide;
    const Word* query = asked_ + l * count_;
    with_count<kTile>(count, [&]<int N>() {
      int j = 0;
      for (; j + G * kLanes <= n; j += G * kLanes)
        scores_of_some<N, G>(query, count_, turned + j, scores_ + j);
      for (; j < n; j += kLanes) scores_of_some<N, 1>(query, count_, turned + j, scores_ + j);
    });
  }

  // Makes weights of the n scores of query l. Returns by what its sums so far decay.
  float weigh(float* scores, int l, int n, int at) {
    const int groups = (n + kLanes - 1) / kLanes;
    const bool masked = first_[l] > at || end_[l] < at + groups * kLanes;
    V s[kBlock / kLanes], top = V{} + best_[l];
    for (int g = 0; g < groups; ++g) {
      s[g] = load<V>(scores + g * kLanes) * scale_;
      if (masked) {
        const I position = I{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + at + g * kLanes;
        s[g] = ((position >= first_[l]) & (position < end_[l])) ? s[g] : V{} + kNever;
      }
      top = s[g] > top ? s[g] : top;
    }
    const float best = largest(top);
    const float decay = best == best_[l] ? 1.0f : power(V{} + (best_[l] - best))[0];
    V total = totals_[l] * decay;
    for (int g = 0; g < groups; ++g) {
      s[g] = power(s[g] - best);
      total += s[g];
      store(scores + g * kLanes, s[g]);
    }
    best_[l] = best;
    totals_[l] = total;
    return decay;
  }

  template <int N, typename S, typename F>
  void add(const S* value, int n, const float* decays, int l, const F& meanwhile) {
    const int64_t vectors = full_ / kLanes;
    float* sums = sums_ + l * full_;
    int64_t at = 0;
    for (; at + kWide <= vectors; at += kWide)
      add_values<N, kWide>(value, full_, n, scores_, decays, sums, vectors, at, meanwhile);
    for (; at < vectors; at += 2)
      add_values<N, 2>(value, full_, n, scores_, decays, sums, vectors, at, meanwhile);
  }

  void finish(const Job& job) {
    int64_t l = 0;
    for (int64_t t = job.first; t < job.last; ++t)
      for (int64_t h = 0; h < job.heads; ++h, ++l) {
        const float inverse = 1.0f / sum_of(totals_[l]);
        float* sums = sums_ + l * full_;
        Q* to = out_ + (t * all_heads_ + job.head + h) * size_;
        for (int64_t d = 0; d < full_; ++d) sums[d] *= inverse;
        if constexpr (std::is_same_v<Q, T> && std::is_same_v<T, at::BFloat16>) {
          for (int64_t d = 0; d < full_; d += kPart)  // in place: two numbers become one word
            store(sums + d / 2, rounded(load<V>(sums + d), load<V>(sums + d + kLanes)));
          std::memcpy(to, sums, size_ * sizeof(Q));
        } else {
          for (int64_t d = 0; d < size_; ++d) to[d] = static_cast<Q>(sums[place<T>(d)]);
        }
      }
  }

  const Token* tokens_;
  const int32_t* nodes_;
  const float scale_;  // for scores that are powers of two
  const Q* query_;
  int64_t query_token_, query_head_, all_heads_;
  Q* out_;
  const T* keys_;
  int64_t key_row_, key_head_;
  const T* values_;
  int64_t value_row_, value_head_;
  const int64_t size_, full_, count_;  // dimensions; filled up; words of a query
  Stream ahead_keys_, ahead_values_;

  static thread_local Scratch scratch_;
  Word* asked_;
  float* sums_;  // (queries, full_)
  float best_[kMostQueries];
  V totals_[kMostQueries];  // by lane
  int32_t first_[kMostQueries], end_[kMostQueries];
  alignas(64) float scores_[kTile * kBlock];
};

template <typename Q, typename T>
thread_local Scratch Worker<Q, T>::scratch_;

std::vector<Job> jobs_of(const Token* tokens, int64_t count, int64_t heads, int64_t group) {
  const int64_t most = std::min<int64_t>(group, kMostQueries);  // heads together
  const int64_t tile = kMostQueries / most;                     // tokens together
  std::vector<Job> jobs;
  for (int64_t first = 0, last; first < count; first = last) {
    Job job{first, first, 0, 0, 0, INT32_MAX, 0};
    for (last = first; last < count && last - first < tile; ++last) {
      if (tokens[last].row != tokens[first].row) break;
      job.low = std::min(job.low, tokens[last].first);
      job.high = std::max(job.high, tokens[last].end);
    }
    job.last = last;
    for (int64_t head = 0; head < heads; head += job.heads) {
      job.key = head / group, job.head = head;
      job.heads = std::min(most, (job.key + 1) * group - head);
      jobs.push_back(job);
    }
  }
  return jobs;
}

template <typename Q, typename T>
void attend_all(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                const at::Tensor& plan, const at::Tensor& nodes, double scale, at::Tensor& out) {
  const Token* tokens = reinterpret_cast<const Token*>(plan.const_data_ptr<int32_t>());
  const int32_t* places = nodes.const_data_ptr<int32_t>();
  const int64_t heads = query.size(1);
  const std::vector<Job> jobs = jobs_of(tokens, query.size(0), heads, heads / keys.size(1));
  Q* to = out.mutable_data_ptr<Q>();
  at::parallel_for(0, static_cast<int64_t>(jobs.size()), 1, [&](int64_t first, int64_t last) {
    const Job *job = jobs.data() + first, *end = jobs.data() + last;
    Worker<Q, T> worker(query, keys, values, tokens, places, scale, to, job, end);
    for (; job != end; ++job) worker.run(*job);
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
