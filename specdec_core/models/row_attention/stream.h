// What jobs of attention read, and asking memory for it in time.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

#include "vectors.h"

namespace {

constexpr int kAhead = 8192;  // bytes of keys, and of values, asked for before their use

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

  const char* row(int64_t j) const { return (j < cut ? first : second) + j * bytes; }
};

// Asks the second-level cache for a line: the first is too small for what comes and what is there,
// and has few requests under way at a time.
inline void ask(const char* line) { __builtin_prefetch(line, 0, 2); }

// Asks for a part of a row of T.
template <typename T>
inline void ask(const char* row, int64_t part) {
  constexpr int64_t bytes = kPart * sizeof(T);
  if (bytes < 64 && part * bytes % 64 != 0) return;  // in the line of the part before
  for (int64_t b = 0; b < bytes; b += 64) ask(row + part * bytes + b);
}

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
    for (int64_t b = 0; b < bytes_; b += 64) ::ask(at_ + b);
    at_ += bytes_, --left_;
  }

  const char *start_, *at_ = nullptr;
  int64_t row_, head_, bytes_, left_ = 0;
  const Token* tokens_;
  const Job *job_, *last_;
};

}  // namespace
