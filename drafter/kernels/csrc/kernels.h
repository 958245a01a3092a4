// What each instruction set offers; library.cpp picks one.
#pragma once
#include "layout.h"

struct Kernels {
  int (*forward)(const Model&, const Cache&, const Tokens&, const float* embedding, float* hidden, int num_states,
      const int32_t* state_layers, float* states);
  int (*multiply)(const Matrix&, int num_rows, const float* x, float* y);
  void (*search)(const Drafter&, const Search&);
  int (*unpack_rows)(const Matrix&, int num, const int64_t* row, float* out);
  void (*noise)(int B, int T, int64_t M, uint64_t stream, const int64_t* seed, const int64_t* position,
      const int64_t* token, int64_t stride, float* out);
  void (*pick)(int B, int N, int64_t V, const float* logits, const Sampling*, const int64_t* position, int64_t* out);
  void (*give_back)(bool is_lost);  // scratch memory
};
