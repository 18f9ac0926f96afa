// Attention over rows of a slot cache, where every token pays for the positions that it sees.
//
// Queries that share a row and a key head are attended together, block by block of positions with
// a running softmax. Scores lie with the keys side by side in a vector's lanes: for a few queries
// they are summed across lanes, for more the keys are turned over once. Sums of values lie with the
// dimensions side by side, in the order of `place`.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "stream.h"
#include "vectors.h"

namespace {

constexpr int kBlock = 64;        // positions at a time
constexpr int kMostQueries = 64;  // queries together
constexpr int kFew = 3;           // queries for which turning keys over does not pay
// Queries, and vectors of each, whose sums the registers hold.
constexpr int kTile = 6;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kWide = 4;
#else
constexpr int kWide = 2;
#endif
constexpr float kNever = -1e30f;
constexpr int32_t kCount[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Calls f with a function that says where each of kLanes rows is, from the j-th on: after the last
// of n rows, it is that one again.
template <typename T, typename F>
inline auto with_rows(const T* rows, int64_t size, int j, int n, const F& f) {
  const T* from = rows + j * size;
  const int last = n - 1 - j;
  if (last >= kLanes - 1) return f([=](int k) { return from + k * size; });
  return f([=](int k) { return from + std::min(k, last) * size; });
}

// The scores of one query and of kLanes keys from the j-th on, of n.
template <bool asking, typename Word, typename T>
inline V scores_of_one(const Word* query, int64_t parts, const T* key, int64_t size, int j, int n,
                       const Ahead& ahead) {
  constexpr int kV = kVectors<Word>;
  return with_rows(key, size, j, n, [&](const auto& row) {
    return sums<kLanes>([&](int k) {
      const char* next = ahead.row(j + k);
      V sum{};
      for (int64_t part = 0; part < parts; ++part) {
        if constexpr (asking) ask<T>(next, part);
        for (int v = 0; v < kV; ++v)
          sum = plus_product(sum, words<Word>(row(k), part, v),
                             load<Vector<Word>>(query + (part * kV + v) * kLanes));
      }
      return sum;
    });
  });
}

// The scores of N queries and of G kLanes keys, which are turned over.
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

// Adds n values with the weights of N queries to their sums: P parts of each, from `part` on.
template <int N, int P, bool asking, typename T>
void add_values(const T* value, int64_t size, int n, const float* weights, const float* decays,
                float* sums, int64_t part, const Ahead& ahead) {
  constexpr int M = 2 * P;
  V a[N][M];
  for (int i = 0; i < N; ++i)
    for (int m = 0; m < M; ++m)
      a[i][m] = load<V>(sums + i * size + part * kPart + m * kLanes) * decays[i];
  for (int j = 0; j < n; ++j) {
    V v[M];
    for (int m = 0; m < M; ++m) {
      if (asking && m % 2 == 0) ask<T>(ahead.row(j), part + m / 2);
      v[m] = words<float>(value + j * size, part + m / 2, m % 2);
    }
    for (int i = 0; i < N; ++i)
      for (int m = 0; m < M; ++m) a[i][m] += v[m] * weights[i * kBlock + j];
  }
  for (int i = 0; i < N; ++i)
    for (int m = 0; m < M; ++m) store(sums + i * size + part * kPart + m * kLanes, a[i][m]);
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
          add<N, false>(wide, seen, decays, l, values);
        else if (tile)
          add<N, false>(value, seen, decays, l, values);
        else
          add<N, true>(value, seen, decays, l, values);
      });
    }
  }

  const Word* turn_over(const T* key, int n, const Ahead& ahead) {
    Word* to = room<Word>(scratch_.turned, kBlock * count_);
    constexpr int kV = kVectors<Word>;
    for (int j = 0; j < n; j += kLanes)
      with_rows(key, full_, j, n, [&](const auto& row) {
        for (int64_t part = 0; part < full_ / kPart; ++part)
          for (int v = 0; v < kV; ++v) {
            Vector<Word> x[kLanes];
#pragma GCC unroll 16
            for (int k = 0; k < kLanes; ++k) {
              if (v == 0) ask<T>(ahead.row(j + k), part);
              x[k] = words<Word>(row(k), part, v);
            }
            turn(x, to + (part * kV + v) * kLanes * kBlock + j, kBlock);
          }
      });
    return to;
  }

  const float* widen(const T* value, int n, const Ahead& ahead) {
    float* to = room<float>(scratch_.wide, kBlock * full_);
    for (int j = 0; j < n; ++j) {
      const char* next = ahead.row(j);
      for (int64_t part = 0; part < full_ / kPart; ++part) {
        ask<T>(next, part);
        for (int v = 0; v < 2; ++v)
          store(to + j * full_ + part * kPart + v * kLanes,
                words<float>(value + j * full_, part, v));
      }
    }
    return to;
  }

  void score(int l, int count, const T* key, int n, const Ahead& ahead) {
    const int64_t parts = full_ / kPart;
    for (int j = 0; j < n; j += kLanes) {
      const Word* query = asked_ + l * count_;
      store(scores_ + j, scores_of_one<true>(query, parts, key, full_, j, n, ahead));
      for (int i = 1; i < count; ++i)
        store(scores_ + i * kBlock + j,
              scores_of_one<false>(query + i * count_, parts, key, full_, j, n, ahead));
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
        const I position = load<I>(kCount) + at + g * kLanes;
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

  template <int N, bool asking, typename S>
  void add(const S* value, int n, const float* decays, int l, const Ahead& ahead) {
    constexpr int P = kWide / 2;
    float* sums = sums_ + l * full_;
    int64_t part = 0;
    for (; part + P <= full_ / kPart; part += P)
      add_values<N, P, asking>(value, full_, n, scores_, decays, sums, part, ahead);
    for (; part < full_ / kPart; ++part)
      add_values<N, 1, asking>(value, full_, n, scores_, decays, sums, part, ahead);
  }

  void finish(const Job& job) {
    int64_t l = 0;
    for (int64_t t = job.first; t < job.last; ++t)
      for (int64_t h = 0; h < job.heads; ++h, ++l) {
        const float total = sum_of(totals_[l]);
        const float inverse = total > 0 ? 1.0f / total : 0.0f;  // 0 where nothing is seen
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

TORCH_LIBRARY_IMPL(specdec, CPU, m) { m.impl("attend", &attend); }
