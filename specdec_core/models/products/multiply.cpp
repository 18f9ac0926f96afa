// Products of a few rows with a matrix in bfloat16, summed in float32, where the processor has
// such products but no tiles (AVX-512 without AMX).
//
// The matrix lies in panels of kWide columns, in each of which the pairs of numbers that are
// summed together are side by side: the panel is read from its beginning to its end. For a few rows
// that reading is what takes the time, for many the products are.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#ifdef __AVX512BF16__
#include <immintrin.h>

#include <cstdint>
#include <vector>

namespace {

constexpr int kLanes = 16;
constexpr int kWide = 2 * kLanes;  // columns of a panel
constexpr int kTile = 13;          // rows whose sums the registers hold
constexpr int kNear = 3;           // rows that one pointer reaches: a tile's must stay in registers
constexpr int kAhead = 4096;       // bytes of a panel asked for before their use

// N rows of `pairs` pairs with a panel.
template <int N>
void multiply_tile(const int32_t* x, int64_t pairs, const int32_t* panel, bool first, uint16_t* y,
                   int64_t width) {
  const int32_t* at[(N + kNear - 1) / kNear];
#pragma GCC unroll 16
  for (int i = 0; i < N; i += kNear) at[i / kNear] = x + i * pairs;
  __m512 sums[N][2];
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
  for (int64_t k = 0; k < pairs; ++k, panel += kWide) {
    const __m512bh low = (__m512bh)_mm512_loadu_si512(panel);
    const __m512bh high = (__m512bh)_mm512_loadu_si512(panel + kLanes);
    if (first) {  // the tiles after it find the panel in the cache
      __builtin_prefetch(reinterpret_cast<const char*>(panel) + kAhead);
      __builtin_prefetch(reinterpret_cast<const char*>(panel + kLanes) + kAhead);
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
      const __m512bh pair = (__m512bh)_mm512_set1_epi32(at[i / kNear][i % kNear * pairs + k]);
      sums[i][0] = _mm512_dpbf16_ps(sums[i][0], pair, low);
      sums[i][1] = _mm512_dpbf16_ps(sums[i][1], pair, high);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i)
    _mm512_storeu_si512(y + i * width, (__m512i)_mm512_cvtne2ps_pbh(sums[i][1], sums[i][0]));
}

using Multiply = void (*)(const int32_t*, int64_t, const int32_t*, bool, uint16_t*, int64_t);
constexpr Multiply kMultiply[kTile + 1] = {
    nullptr,           multiply_tile<1>,  multiply_tile<2>,  multiply_tile<3>,  multiply_tile<4>,
    multiply_tile<5>,  multiply_tile<6>,  multiply_tile<7>,  multiply_tile<8>,  multiply_tile<9>,
    multiply_tile<10>, multiply_tile<11>, multiply_tile<12>, multiply_tile<13>};

at::Tensor multiply(const at::Tensor& x, const at::Tensor& panels) {
  const at::Tensor from = x.contiguous();
  const int64_t pairs = panels.size(1), count = panels.size(0), width = count * kWide;
  const int64_t rows = from.numel() / (2 * pairs), tiles = (rows + kTile - 1) / kTile;
  std::vector<int64_t> sizes = x.sizes().vec();
  TORCH_CHECK(sizes.back() == 2 * pairs, "multiply: the rows have ", sizes.back(),
              " numbers, the matrix ", 2 * pairs);
  sizes.back() = width;
  at::Tensor out = at::empty(sizes, x.options());
  const auto* read = static_cast<const int32_t*>(from.const_data_ptr());
  const auto* matrix = static_cast<const int32_t*>(panels.const_data_ptr());
  auto* written = static_cast<uint16_t*>(out.mutable_data_ptr());
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel)
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t first = rows * tile / tiles, last = rows * (tile + 1) / tiles;
        kMultiply[last - first](read + first * pairs, pairs, matrix + panel * pairs * kWide,
                                tile == 0, written + first * width + panel * kWide, width);
      }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(specdec, CPU, m) { m.impl("multiply", &multiply); }
#endif
