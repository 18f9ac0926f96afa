// From logits to probabilities, and from probabilities to tokens: a row of the vocabulary after the
// other, in as few passes as it takes.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr int64_t kPart = 32;  // numbers that are looked at together

// e to the power of x <= 0, 0 where that is no normal number; loops of it become vectors.
inline float power(float x) {
  const float y = std::max(x, -88.0f);
  const float n = std::floor(y * 1.44269504f + 0.5f);
  // The logarithm of 2 in two parts, or less would be left of it.
  const float a = std::fma(n, 1.90465432e-9f, std::fma(n, -0.693147182f, y));
  float p = 1.9875691500e-4f;
  p = p * a + 1.3981999507e-3f;
  p = p * a + 8.3334519073e-3f;
  p = p * a + 4.1665795894e-2f;
  p = p * a + 1.6666665459e-1f;
  p = p * a + 5.0000001201e-1f;
  p = p * a * a + a + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof(scale));
  return x < -87.0f ? 0.0f : p * scale;
}

// The largest of n numbers: side by side, because compilers keep the order of comparisons.
inline float top_of(const float* x, int64_t n) {
  constexpr int64_t kLanes = 32;
  float tops[kLanes];
  std::fill_n(tops, kLanes, kNever);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane)
      tops[lane] = x[i + lane] > tops[lane] ? x[i + lane] : tops[lane];
  float top = kNever;
  for (; i < n; ++i) top = x[i] > top ? x[i] : top;
  for (int64_t lane = 0; lane < kLanes; ++lane) top = tops[lane] > top ? tops[lane] : top;
  return top;
}

// The `count`-th largest of n numbers, or the least one where fewer are numbers. So many are not
// below the `count`-th largest of the largest of every part: only those are looked at.
float largest(const float* x, int64_t n, int64_t count, std::vector<float>& tops,
              std::vector<float>& some) {
  tops.clear(), some.clear();
  for (int64_t first = 0; first < n; first += kPart)
    tops.push_back(top_of(x + first, std::min(kPart, n - first)));
  float least = kNever;
  if (static_cast<int64_t>(tops.size()) >= count) {
    some = tops;
    std::nth_element(some.begin(), some.begin() + count - 1, some.end(), std::greater<>());
    least = some[count - 1];
    some.clear();
  }
  for (size_t part = 0; part < tops.size(); ++part) {
    if (tops[part] < least) continue;
    const int64_t first = static_cast<int64_t>(part) * kPart, last = std::min(first + kPart, n);
    for (int64_t i = first; i < last; ++i)
      if (x[i] >= least) some.push_back(x[i]);
  }
  if (static_cast<int64_t>(some.size()) < count) return kNever;
  std::nth_element(some.begin(), some.begin() + count - 1, some.end(), std::greater<>());
  return some[count - 1];
}

struct Weight {
  float weight;
  int32_t token;
};

// Leaves of n weights that sum to `total` the smallest set of the largest with at least this
// `mass` of it. Returns its sum.
template <typename T>
double nucleus(const T* logits, float* x, int64_t n, double total, double mass,
               std::vector<Weight>& likely) {
  // All that weigh less than this weigh, together, less than what may be left out.
  const float least = static_cast<float>((1 - mass) * total / static_cast<double>(n) * 0.999);
  likely.clear();
  for (int64_t first = 0; first < n; first += kPart) {
    const int64_t last = std::min(first + kPart, n);
    if (top_of(x + first, last - first) < least) continue;
    for (int64_t i = first; i < last; ++i)
      if (x[i] >= least) likely.push_back({x[i], static_cast<int32_t>(i)});
  }
  // [0, low) belong to the set, [high, …) do not: halves are told apart without sorting all.
  const auto before = [&](const Weight& a, const Weight& b) {
    if (a.weight != b.weight) return a.weight > b.weight;
    const float first = logits[a.token], second = logits[b.token];  // may differ all the same
    return first != second ? first > second : a.token < b.token;
  };
  int64_t low = 0, high = static_cast<int64_t>(likely.size());
  double reached = 0;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    std::nth_element(likely.begin() + low, likely.begin() + middle, likely.begin() + high, before);
    double sum = 0;
    for (int64_t i = low; i < middle; ++i) sum += likely[i].weight;
    if (reached + sum >= mass * total) {
      high = middle;
    } else {
      reached += sum, low = middle;
    }
  }
  std::fill(x, x + n, 0.0f);
  double kept = 0;
  for (int64_t i = 0; i < high; ++i) {
    x[likely[i].token] = likely[i].weight;
    kept += likely[i].weight;
  }
  return kept;
}

struct Scratch {
  std::vector<float> tops, some;
  std::vector<Weight> likely;
};

template <typename T>
void warp_row(const T* logits, int64_t n, float temperature, float min_p, int64_t top_k,
              double top_p, float* out, Scratch& scratch) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(logits[i]);
  float best = top_of(out, n);
  if (temperature != 1.0f) {
    // The largest becomes 0: where the others overflow, they have probability 0.
    for (int64_t i = 0; i < n; ++i) out[i] = (out[i] - best) / temperature;
    best = 0;
  }
  float least = min_p > 0 ? best + std::log(min_p) : kNever;
  if (top_k > 0 && top_k < n)
    least = std::max(least, largest(out, n, top_k, scratch.tops, scratch.some));
  double total = 0;
  for (int64_t first = 0; first < n; first += kPart) {
    const int64_t last = std::min(first + kPart, n);
    float sum = 0;
    for (int64_t i = first; i < last; ++i) {
      const float weight = out[i] < least ? 0.0f : power(out[i] - best);
      out[i] = weight, sum += weight;
    }
    total += sum;
  }
  if (top_p < 1) total = nucleus(logits, out, n, total, top_p, scratch.likely);
  const float share = static_cast<float>(1 / total);
  for (int64_t i = 0; i < n; ++i) out[i] *= share;
}

template <typename T>
void warp_rows(const at::Tensor& logits, double temperature, double min_p, int64_t top_k,
               double top_p, at::Tensor& out) {
  const T* from = logits.const_data_ptr<T>();
  float* to = out.mutable_data_ptr<float>();
  const int64_t n = logits.size(1), line = logits.stride(0);
  at::parallel_for(0, logits.size(0), 1, [&](int64_t first, int64_t last) {
    Scratch scratch;
    for (int64_t row = first; row < last; ++row)
      warp_row(from + row * line, n, static_cast<float>(temperature), static_cast<float>(min_p),
               top_k, top_p, to + row * n, scratch);
  });
}

at::Tensor warp(const at::Tensor& logits, double temperature, double min_p, int64_t top_k,
                double top_p) {
  at::Tensor out = at::empty(logits.sizes(), logits.options().dtype(at::kFloat));
  if (logits.scalar_type() == at::kBFloat16)
    warp_rows<at::BFloat16>(logits, temperature, min_p, top_k, top_p, out);
  else
    warp_rows<float>(logits, temperature, min_p, top_k, top_p, out);
  return out;
}

double sum_of(const float* x, int64_t first, int64_t last) {
  double sum = 0;
  for (int64_t i = first; i < last; ++i) sum += x[i];
  return sum;
}

// The token whose slice of the sum of n weights holds that part of it; never one of weight 0.
int64_t token_at(const float* x, int64_t n, const std::vector<double>& sums, double uniform) {
  double total = 0;
  for (const double sum : sums) total += sum;
  const double place = uniform * total;
  double reached = 0;
  int64_t token = 0;  // where no weight is above 0
  for (size_t part = 0; part < sums.size(); ++part) {
    if (sums[part] <= 0) continue;
    const int64_t first = static_cast<int64_t>(part) * kPart, last = std::min(first + kPart, n);
    const bool here = reached + sums[part] > place;
    double within = reached;
    for (int64_t i = here ? first : last; i < last; ++i) {
      if (x[i] <= 0) continue;
      token = i, within += x[i];
      if (within > place) return token;
    }
    reached += sums[part];
  }
  // Rounding may reach the end.
  for (int64_t i = n - 1; i >= 0; --i)
    if (x[i] > 0) return i;
  return token;
}

at::Tensor quantiles(const at::Tensor& weights, const at::Tensor& uniforms) {
  at::Tensor out = at::empty(uniforms.sizes(), uniforms.options().dtype(at::kLong));
  const float* from = weights.const_data_ptr<float>();
  const double* at = uniforms.const_data_ptr<double>();
  int64_t* to = out.mutable_data_ptr<int64_t>();
  const int64_t n = weights.size(1), line = weights.stride(0), count = uniforms.size(1);
  std::vector<double> sums((n + kPart - 1) / kPart);
  for (int64_t row = 0; row < weights.size(0); ++row) {
    const float* x = from + row * line;
    for (size_t part = 0; part < sums.size(); ++part) {
      const int64_t first = static_cast<int64_t>(part) * kPart;
      sums[part] = sum_of(x, first, std::min(first + kPart, n));
    }
    for (int64_t i = 0; i < count; ++i)
      to[row * count + i] = token_at(x, n, sums, at[row * count + i]);
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("warp", &warp);
  m.impl("quantiles", &quantiles);
}
