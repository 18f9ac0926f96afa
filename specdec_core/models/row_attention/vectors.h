// Vectors as the processor has them, and rows of numbers as vectors.
//
// Rows are taken in parts of two vectors. Where they are of bfloat16, words of two are read: a
// vector of those gives the numbers of even places, then those of odd ones.
#pragma once

#include <c10/util/BFloat16.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kPart = 2 * kLanes;  // dimensions; heads are filled up to whole parts
#ifdef __AVX512BF16__
constexpr bool kPairProducts = true;  // of bfloat16: exact, and summed in float32
#else
constexpr bool kPairProducts = false;
#endif

typedef float V __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t I __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint32_t W __attribute__((vector_size(4 * kLanes), aligned(4)));
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

// Vectors of words in a part.
template <typename Word>
constexpr int kVectors = std::is_same_v<Word, float> ? 2 : 1;

// The v-th vector of words in a part of a row: as they are, or widened to float32.
template <typename Word, typename T>
inline Vector<Word> words(const T* row, int64_t part, int v) {
  if constexpr (std::is_same_v<Word, uint32_t> || std::is_same_v<T, float>) {
    return load<Vector<Word>>(reinterpret_cast<const Word*>(row + part * kPart) + v * kLanes);
  } else {
    const W pairs = load<W>(row + part * kPart);
    const bool upper = (v == 1) == (std::endian::native == std::endian::little);
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
inline __attribute__((always_inline)) void cross_all(X (&x)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & step) continue;
    const X a = x[i], b = x[i + step];
    x[i] = cross<step, false>(a, b);
    x[i + step] = cross<step, true>(a, b);
  }
}

// Turns kLanes vectors over: lane l of the i-th becomes lane i of the l-th in `to`.
template <typename X, typename Word>
inline __attribute__((always_inline)) void turn(X (&x)[kLanes], Word* to, int64_t stride) {
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
inline __attribute__((always_inline)) void turn(X (&x)[kLanes], Word* to, int64_t stride) {
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

}  // namespace
