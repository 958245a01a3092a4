// Attention of some tokens of one row, for query heads that share a key head. A score is summed over head_dim, a softmax over the
// lanes position % 16 and then over the lanes, a value over positions in rising order: the bits depend on nothing that stands beside.
//
// A token sees the slots start .. prefix - 1, where slot = position, and then the slots of its own path, whose positions follow.
// In a causal chunk the path is empty; in a tree the prefix is the committed text, which the nodes read together.
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
constexpr int MOST_QUERIES = 32, SLOTS = 16;

// Numbers of the cache.
INLINE F numbers(const float* p) { return load(p); }
INLINE F numbers(const uint16_t* p) { return half(p); }
INLINE void write(float* p, float x) { *p = x; }
INLINE void write(uint16_t* p, float x) {  // to nearest, ties to even
#if defined(__F16C__)
  *p = _cvtss_sh(x, 0);
#else
  uint32_t w; memcpy(&w, &x, 4); const uint32_t sign = w >> 16 & 0x8000, size = w & 0x7fffffff;
  if (size < 0x38800000) *p = (uint16_t)(sign | (uint32_t)nearbyintf(fabsf(x) * 16777216.f));
  else *p = (uint16_t)(sign | (size < 0x477ff000 ? (size + 0xfff + (size >> 13 & 1) - (112u << 23)) >> 13 : 0x7c00));
#endif
}
template <class T> constexpr float too_large() { return sizeof(T) == 2 ? 65520.f : INFINITY; }

template <int R, class T> static void score_block(const T* key, int dim, const float* const* q, float scale, float cap, float* const* out) {
  F s[R][STRIPS];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int h = 0; h < STRIPS; h++) s[r][h] = F{};
  for (int d = 0; d < dim; d++) UNROLL for (int h = 0; h < STRIPS; h++) {
    const F k = numbers(key + SLOTS * d + h * LANES);
    UNROLL for (int r = 0; r < R; r++) s[r][h] = fma(k, all(q[r][d]), s[r][h]);
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int h = 0; h < STRIPS; h++) {
    F x = s[r][h] * scale;
    if (cap > 0) x = hyperbolic_tangent(x * (1.f / cap)) * cap;
    store(out[r] + h * LANES, x);
  }
}
template <class T> static void score_blocks(const T* key, int dim, int num, const float* const* q, float scale, float cap, float* const* out) {
  constexpr int MOST = LANES == 16 ? 8 : 4;
  for (int r = 0; r < num;) {
    const int left = num - r;
    if (left >= 8 && MOST == 8) { score_block<8, T>(key, dim, q + r, scale, cap, out + r); r += 8; }
    else if (left >= 4) { score_block<4, T>(key, dim, q + r, scale, cap, out + r); r += 4; }
    else if (left >= 3) { score_block<3, T>(key, dim, q + r, scale, cap, out + r); r += 3; }
    else if (left >= 2) { score_block<2, T>(key, dim, q + r, scale, cap, out + r); r += 2; }
    else { score_block<1, T>(key, dim, q + r, scale, cap, out + r); r += 1; }
  }
}
// out [R, stride] += weights [R][num] times values [num, stride], C vectors of columns
template <int R, int C, class T> static void add_values(const T* value, long stride, int num, const float* const* weight, float* const* out) {
  F o[R][C];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) o[r][c] = load(out[r] + c * LANES);
  for (int j = 0; j < num; j++) {
    F v[C];
    UNROLL for (int c = 0; c < C; c++) v[c] = numbers(value + j * stride + c * LANES);
    UNROLL for (int r = 0; r < R; r++) { const F w = all(weight[r][j]); UNROLL for (int c = 0; c < C; c++) o[r][c] = fma(w, v[c], o[r][c]); }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) store(out[r] + c * LANES, o[r][c]);
}
template <class T> static void add_all_values(const T* value, long stride, int num, int rows, const float* const* weight, float* const* out) {
  constexpr int C = LANES == 16 ? 4 : 2;
  if (num <= 0) return;
  for (int r = 0; r < rows;) {
    const int m = lesser(4, rows - r);
    for (long c = 0; c < stride;) {
      float* o[4]; for (int i = 0; i < m; i++) o[i] = out[r + i] + c;
      const bool is_wide = stride - c >= C * LANES;
#define ADD(R) case R: if (is_wide) add_values<R, C, T>(value + c, stride, num, weight + r, o); else add_values<R, 1, T>(value + c, stride, num, weight + r, o); break;
      switch (m) { ADD(1) ADD(2) ADD(3) ADD(4) }
#undef ADD
      c += is_wide ? C * LANES : LANES;
    }
    r += m;
  }
}
// tokens: `num` of one row; q: the first query of the first token, heads side by side; out: as q, of another width
template <class T> static void attend(const Model& m, const Layer& layer, const T* keys, const T* values, const Token* token, int num, int heads,
                                      const float* q, long q_width, float* out, long out_width) {
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
  float *score[MOST_QUERIES], *sum[MOST_QUERIES], *to[MOST_QUERIES];
  const float *query[MOST_QUERIES], *weight[MOST_QUERIES];
  for (int r = 0; r < rows; r++) {
    score[r] = base + r * width; sum[r] = base + rows * width + r * wide; query[r] = q + (r / heads) * q_width + (r % heads) * dim;
    memset(sum[r], 0, 4 * wide);
  }
  for (int j = least_start / SLOTS * SLOTS; j < most_prefix; j += SLOTS) {
    for (int r = 0; r < rows; r++) to[r] = score[r] + j;
    score_blocks(keys + (long)j * dim, dim, rows, query, m.attention_scale, m.attention_cap, to);
  }
  for (int t = 0; t < num; t++)
    for (int e = 0; e < token[t].num_path; e += SLOTS) {  // keys of the path, put together as a block
      for (int i = 0; i < lesser(SLOTS, token[t].num_path - e); i++) {  // what else stands there is not read
        const int s = token[t].path[e + i];
        const T* key = keys + (long)(s / SLOTS) * dim * SLOTS + s % SLOTS;
        for (int d = 0; d < dim; d++) gathered[SLOTS * d + i] = key[SLOTS * d];
      }
      for (int h = 0; h < heads; h++) to[h] = score[t * heads + h] + token[t].prefix + e;
      score_blocks(gathered, dim, heads, query + t * heads, m.attention_scale, m.attention_cap, to);
    }
  float inverse[MOST_QUERIES];
  for (int r = 0; r < rows; r++) {
    const Token& t = token[r / heads]; const int from = start[r / heads], end = t.prefix + t.num_path, first = from / SLOTS * SLOTS, last = padded(end, SLOTS);
    float* s = score[r];
    for (int j = first; j < from; j++) s[j] = -INFINITY;
    for (int j = end; j < last; j++) s[j] = -INFINITY;
    F most = all(-INFINITY), total[STRIPS];
    for (int j = first; j < last; j += LANES) most = greater(most, load(s + j));
    const F top = all(largest(most));
    for (int h = 0; h < STRIPS; h++) total[h] = F{};
    for (int j = first; j < last; j += SLOTS) UNROLL for (int h = 0; h < STRIPS; h++) {
      const F e = exponential(load(s + j + h * LANES) - top);
      store(s + j + h * LANES, e); total[h] += e;
    }
    for (int h = 1; h < STRIPS; h++) total[0] += total[h];
    inverse[r] = 1.f / STEP::sum(total[0]);
  }
  // Every sum runs over rising positions: what a token sees alone before the common slots, the common slots, the rest, the path.
  const int common = lesser(most_start, least_prefix), common_end = least_prefix;
  for (int t = 0; t < num; t++) {
    for (int h = 0; h < heads; h++) weight[h] = score[t * heads + h] + start[t];
    add_all_values(values + (long)start[t] * wide, wide, common - start[t], heads, weight, sum + t * heads);
  }
  for (int r = 0; r < rows; r++) weight[r] = score[r] + bigger(common, start[r / heads]);
  if (common == most_start) add_all_values(values + (long)common * wide, wide, common_end - common, rows, weight, sum);
  for (int t = 0; t < num; t++) {
    const int from = bigger(common_end, start[t]);
    for (int h = 0; h < heads; h++) weight[h] = score[t * heads + h] + from;
    add_all_values(values + (long)from * wide, wide, token[t].prefix - from, heads, weight, sum + t * heads);
    for (int e = bigger(0, start[t] - token[t].prefix); e < token[t].num_path; e++) {
      for (int h = 0; h < heads; h++) weight[h] = score[t * heads + h] + token[t].prefix + e;
      add_all_values(values + (long)token[t].path[e] * wide, wide, 1, heads, weight, sum + t * heads);
    }
  }
  for (int r = 0; r < rows; r++) {
    float* o = out + (r / heads) * out_width + (r % heads) * dim;
    for (int d = 0; d < dim; d++) o[d] = sum[r][d] * inverse[r];
  }
}
}  // namespace STEP
