// What each instruction set offers; library.cpp picks one.
#pragma once
#include "layout.h"

struct Kernels {
  void (*forward)(const Model&, const Cache&, const Tokens&, const float* embedding, float* hidden, int num_states, const int32_t* state_layers, float* states);
  void (*multiply)(const Matrix&, int num_rows, const float* x, float* y);
  void (*search)(const Drafter&, const Search&);
  void (*unpack_rows)(const Matrix&, int num, const int64_t* row, float* out);
  int64_t (*largest)(const float* x, int64_t size);
};
