// Attention of some tokens of one row, for query heads that share a key head. A score is summed over head_dim, a
// softmax over the lanes position % 16 and then over the lanes, a value over positions in rising order: no bit depends
// on what stands beside.
//
// A token sees the slots start .. prefix - 1, where slot = position, and then its own path, whose positions follow. In
// a causal chunk the path is empty; in a tree the prefix is the committed text, which the nodes read together.
#pragma once
#include <new>
#include "products.h"

namespace STEP {
struct Token { long index; int row, prefix, num_path; long slot, position; const int* path; };
struct Memory {  // numbers that grow; std::bad_alloc where there are none
  float* p = nullptr; size_t size = 0;
  float* need(size_t n) {
    if (n <= size) return p;
    give_back();
    const size_t more = (n + n / 2 + 79) / 16 * 16;
    if (!(p = (float*)aligned_alloc(64, more * 4))) throw std::bad_alloc();
    memset(p, 0, more * 4); size = more;  // rows of a panel that hold no token are computed, too
    return p;
  }
  void give_back() { free(p); p = nullptr; size = 0; }
};
struct OwnMemory : Memory { ~OwnMemory() { give_back(); } };  // of a thread
constexpr int MOST_QUERIES = 32, SLOTS = 16, MOST_SCORES = LANES == 16 ? 8 : LANES == 8 ? 6 : 4;

// Numbers of the cache.
INLINE void write(float* p, float x) { *p = x; }
INLINE void write(uint16_t* p, float x) { *p = to_half(x); }
template <class T> constexpr float too_large() { return sizeof(T) == 2 ? 65520.f : INFINITY; }

typedef const float* const* From; typedef float* const* To;  // rows
template <int R, class T>
APART void score_block(const T* key, const Model& m, From q, To out) {
  const float scale = m.attention_scale, cap = m.attention_cap;
  F s[R][STRIPS];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int h = 0; h < STRIPS; h++) s[r][h] = F{};
  for (int d = 0; d < m.head_dim; d++) {
    F k[STRIPS];
    __builtin_prefetch(key + SLOTS * (m.head_dim + d));  // of the next block: the processor stops at each page
    UNROLL for (int h = 0; h < STRIPS; h++) k[h] = numbers(key + SLOTS * d + h * LANES);
    UNROLL for (int r = 0; r < R; r++) {
      const F x = all(q[r][d]);
      UNROLL for (int h = 0; h < STRIPS; h++) s[r][h] = fma(k[h], x, s[r][h]);
    }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int h = 0; h < STRIPS; h++) {
    F x = s[r][h] * scale;
    if (cap > 0) x = hyperbolic_tangent(x * (1.f / cap)) * cap;
    store(out[r] + h * LANES, x);
  }
}
template <int R, class T>  // R rows at a time, and fewer at the end
static void score_rows(const T* key, const Model& m, int num, From q, To out) {
  for (; num >= R; num -= R, q += R, out += R) score_block<R>(key, m, q, out);
  if constexpr (R > 1) score_rows<R - 1>(key, m, num, q, out);
}
// out [R, stride] += weights [R][num] times values [num, stride], C vectors of columns from column c on
template <int R, int C, class T>
APART void add_values(const T* value, long stride, int num, From weight, int first, To out, long c) {
  F o[R][C];
  const float* w[R];
  UNROLL for (int r = 0; r < R; r++) {
    w[r] = weight[r] + first;
    UNROLL for (int i = 0; i < C; i++) o[r][i] = load(out[r] + c + i * LANES);
  }
  for (int j = 0; j < num; j++) {
    F v[C];
    __builtin_prefetch(value + (num + j) * stride + c);
    UNROLL for (int i = 0; i < C; i++) v[i] = numbers(value + j * stride + c + i * LANES);
    UNROLL for (int r = 0; r < R; r++) {
      const F x = all(w[r][j]);
      UNROLL for (int i = 0; i < C; i++) o[r][i] = fma(x, v[i], o[r][i]);
    }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < C; i++) store(out[r] + c + i * LANES, o[r][i]);
}
template <int R, class T>
static void add_rows(const T* value, long stride, int num, int rows, From weight, int first, To out) {
  constexpr int C = LANES == 16 ? 4 : 2;
  for (; rows >= R; rows -= R, weight += R, out += R) {
    long c = 0;
    for (; c + C * LANES <= stride; c += C * LANES) add_values<R, C>(value, stride, num, weight, first, out, c);
    for (; c < stride; c += LANES) add_values<R, 1>(value, stride, num, weight, first, out, c);
  }
  if constexpr (R > 1) add_rows<R - 1>(value, stride, num, rows, weight, first, out);
}
template <class T>
static void add_all_values(const T* value, long stride, int num, int rows, From weight, To out) {
  const int near = bigger<int>(SLOTS, 16384 / (stride * sizeof(T)));  // slots that stay in the first cache for all rows
  for (int j = 0; j < num; j += near)
    add_rows<LANES == 8 ? 6 : 4>(value + j * stride, stride, lesser(near, num - j), rows, weight, j, out);
}
// tokens: `num` of one row; q: the first query of the first token, heads side by side; out: as q, of another width
template <class T>
static void attend(const Model& m, const Layer& layer, const T* keys, const T* values, const Token* token, int num,
    int heads, const float* q, long q_width, float* out, long out_width) {
  static thread_local OwnMemory memory;
  const int dim = m.head_dim, wide = padded(dim, 16), rows = num * heads;
  int start[MOST_QUERIES], least_start = 1 << 30, most_start = 0, least_prefix = 1 << 30, most_prefix = 0, most_end = 0;
  for (int t = 0; t < num; t++) {
    start[t] = layer.window > 0 ? (int)bigger(0L, token[t].position - layer.window + 1) : 0;
    least_start = lesser(least_start, start[t]); most_start = bigger(most_start, start[t]);
    least_prefix = lesser(least_prefix, token[t].prefix); most_prefix = bigger(most_prefix, token[t].prefix);
    most_end = bigger(most_end, token[t].prefix + token[t].num_path);
  }
  const long width = padded(most_end, SLOTS) + 2 * SLOTS;
  float* base = memory.need(rows * (width + wide) + dim * SLOTS);
  T* const gathered = (T*)(base + rows * (width + wide));
  float *score[MOST_QUERIES], *sum[MOST_QUERIES], *to[MOST_QUERIES], inverse[MOST_QUERIES];
  const float *query[MOST_QUERIES], *weight[MOST_QUERIES];
  for (int r = 0; r < rows; r++) {
    score[r] = base + r * width; sum[r] = base + rows * width + r * wide;
    query[r] = q + (r / heads) * q_width + (r % heads) * dim;
    memset(sum[r], 0, 4 * wide);
  }
  for (int j = least_start / SLOTS * SLOTS; j < most_prefix; j += SLOTS) {
    for (int r = 0; r < rows; r++) to[r] = score[r] + j;
    score_rows<MOST_SCORES>(keys + (long)j * dim, m, rows, query, to);
  }
  for (int t = 0; t < num; t++)
    for (int e = 0; e < token[t].num_path; e += SLOTS) {  // keys of the path, put together as a block
      for (int i = 0; i < lesser(SLOTS, token[t].num_path - e); i++) {  // what else stands there is not read
        const int s = token[t].path[e + i];
        const T* key = keys + (long)(s / SLOTS) * dim * SLOTS + s % SLOTS;
        for (int d = 0; d < dim; d++) gathered[SLOTS * d + i] = key[SLOTS * d];
      }
      for (int h = 0; h < heads; h++) to[h] = score[t * heads + h] + token[t].prefix + e;
      score_rows<MOST_SCORES>(gathered, m, heads, query + t * heads, to);
    }
  for (int r = 0; r < rows; r++) {
    const Token& t = token[r / heads];
    const int from = start[r / heads], end = t.prefix + t.num_path;
    const int first = from / SLOTS * SLOTS, last = padded(end, SLOTS);
    float* s = score[r];
    for (int j = first; j < from; j++) s[j] = -INFINITY;
    for (int j = end; j < last; j++) s[j] = -INFINITY;
    F most = all(-INFINITY), total[STRIPS]{};
    for (int j = first; j < last; j += LANES) most = greater(most, load(s + j));
    const F top = all(largest(most));
    for (int j = first; j < last; j += SLOTS) UNROLL for (int h = 0; h < STRIPS; h++) {
      const F e = exponential(load(s + j + h * LANES) - top);
      store(s + j + h * LANES, e); total[h] += e;
    }
    for (int h = 1; h < STRIPS; h++) total[0] += total[h];
    inverse[r] = 1.f / STEP::sum(total[0]);
  }
  // Sums run over rising positions: what a token sees alone, the common slots, the rest, the path.
  const int common = lesser(most_start, least_prefix);
  auto add = [&](int t, int position, int slot, int count) {
    for (int h = 0; h < heads; h++) weight[h] = score[t * heads + h] + position;
    add_all_values(values + (long)slot * wide, wide, count, heads, weight, sum + t * heads);
  };
  for (int t = 0; t < num; t++) add(t, start[t], start[t], common - start[t]);
  for (int r = 0; r < rows; r++) weight[r] = score[r] + common;
  if (common == most_start)
    add_all_values(values + (long)common * wide, wide, least_prefix - common, rows, weight, sum);
  for (int t = 0; t < num; t++) {
    const int from = bigger(least_prefix, start[t]);
    add(t, from, from, token[t].prefix - from);
    for (int e = bigger(0, start[t] - token[t].prefix); e < token[t].num_path; e++)
      add(t, token[t].prefix + e, token[t].path[e], 1);
  }
  for (int r = 0; r < rows; r++) {
    float* o = out + (r / heads) * out_width + (r % heads) * dim;
    for (int d = 0; d < dim; d++) o[d] = sum[r][d] * inverse[r];
  }
}
}  // namespace STEP
