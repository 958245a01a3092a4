// Products of rows with a matrix in blocks, one block of 16 outputs at a time. Every output is one sum in one order: input by
// input, or over groups of 32 inputs.
#pragma once
#include "lanes.h"
#include "layout.h"

namespace STEP {
constexpr int GROUP = 32;
inline int padded(int n, int unit) { return (n + unit - 1) / unit * unit; }

// Activations of N rows. The rows lie in panels of `rows` rows, input by input, so that one address leads to all rows of a panel:
// input k of row n is x[(n / rows * stride + k) * rows + n % rows]. In 8 bits, four inputs stand where one stands here.
struct Rows {
  float* x;           // as they are
  int32_t* q;         // rounded, four inputs a word: x = q * scale in groups of 32
  float* scale;       // of every 32 inputs
  // What the offsets of weights are multiplied by, or add; computed once for all outputs:
  float* sum;         // scale times the sum of the q's of every 32 inputs
  int32_t* minus_8;   // -8 times this sum of q's
  int32_t* minus_128; // -128 times the sum of the q's of every 16 inputs
  long stride;        // inputs of a row, a multiple of 32
  int rows;
  Rows panel(long p) const {
    const long groups = p * stride / 32 * rows;
    return {x + p * stride * rows, q + 8 * groups, scale + groups, sum + groups, minus_8 + groups, minus_128 + 2 * groups, stride, rows};
  }
};
constexpr int MOST_ROWS = LANES == 16 ? 12 : 6;
static int panel_rows(int N) {  // 1, 2, 3, 4, 6, 8 or 12: the rows that one template computes
  const int parts = (N + MOST_ROWS - 1) / MOST_ROWS, m = (N + parts - 1) / parts;
  return m <= 4 ? m : m <= 6 ? 6 : m <= 8 ? 8 : 12;
}
// Inputs from .. to - 1, whole groups, of row n of the panels, from its numbers: as they are, or rounded.
static void place(const Rows& panels, int n, const float* x, long from, long to, bool is_rounded) {
  const int R = panels.rows, r = n % R; const Rows p = panels.panel(n / R);
  if (!is_rounded) {
    for (long k = from; k < to; k++) p.x[k * R + r] = x[k];
    return;
  }
  for (long g = from / GROUP; g < to / GROUP; g++) {
    F most{}; int32_t words[GROUP / 4], total[2];
    UNROLL for (int i = 0; i < GROUP; i += LANES) { const F v = load(x + g * GROUP + i); most = greater(most, greater(v, -v)); }
    const float m = largest(most), inverse = m > 0 ? 127.f / m : 0.f;
    UNROLL for (int h = 0; h < 2; h++) {
      I n{};
      UNROLL for (int i = 16 * h; i < 16 * h + 16; i += LANES) { const I v = round(load(x + g * GROUP + i) * inverse); store_bytes((int8_t*)words + i, v); n += v; }
      total[h] = sum(n); p.minus_128[(2 * g + h) * R + r] = -128 * total[h];
    }
    UNROLL for (int i = 0; i < GROUP / 4; i++) p.q[(GROUP / 4 * g + i) * R + r] = words[i];
    p.scale[g * R + r] = m / 127.f; p.sum[g * R + r] = m / 127.f * (total[0] + total[1]); p.minus_8[g * R + r] = -8 * (total[0] + total[1]);
  }
}

// ---- float weights: a format reads input k, which is even, or k + 1 of one vector of outputs ----
struct InF32 {
  static constexpr int BYTES = 4;  // of a weight
  static constexpr bool IS_PAIRED = false;
  template <int ODD> INLINE F input(const char* w, long k) { return load((const float*)(w + 64 * (k + ODD))); }
};
struct InF16 {
  static constexpr int BYTES = 2;
  static constexpr bool IS_PAIRED = false;
  template <int ODD> INLINE F input(const char* w, long k) { return half((const uint16_t*)(w + 32 * (k + ODD))); }
};
struct InBF16 {
  static constexpr int BYTES = 2;
  static constexpr bool IS_PAIRED = true;
  template <int ODD> INLINE F input(const char* w, long k) { const I v = load((const void*)(w + 32 * k)); return bits((ODD ? pinned(v >> 16) : v) << 16); }  // a mask would take a register
};
template <class T> constexpr int strip_bytes() { return T::BYTES * LANES * (T::IS_PAIRED ? 2 : 1); }

// S vectors of outputs from strip `first` on, M rows; out [M, S, LANES]. M S sums at once hide the time of an addition, and leave
// registers for the weights.
template <class T, int M, int S> APART void float_strips(const char* w, long block_bytes, int first, long inputs, Rows x, float* out) {
  F sum[M][S];
  UNROLL for (int r = 0; r < M; r++) UNROLL for (int s = 0; s < S; s++) sum[r][s] = F{};
  const char* p[S];
  UNROLL for (int s = 0; s < S; s++) p[s] = w + (first + s) / STRIPS * block_bytes + (first + s) % STRIPS * strip_bytes<T>();
  const float* v = x.x;
  for (long k = 0; k < inputs; k += 2, v += 2 * M) {
    F weight[S];
    UNROLL for (int s = 0; s < S; s++) { if (s % STRIPS == 0) __builtin_prefetch(p[s] + 16 * T::BYTES * (k + 64)); weight[s] = T::template input<0>(p[s], k); }
    UNROLL for (int r = 0; r < M; r++) { const F x_r = S > 1 ? pinned(all(v[r])) : all(v[r]); UNROLL for (int s = 0; s < S; s++) sum[r][s] = fma(weight[s], x_r, sum[r][s]); }
    UNROLL for (int s = 0; s < S; s++) weight[s] = T::template input<1>(p[s], k);
    UNROLL for (int r = 0; r < M; r++) { const F x_r = S > 1 ? pinned(all(v[M + r])) : all(v[M + r]); UNROLL for (int s = 0; s < S; s++) sum[r][s] = fma(weight[s], x_r, sum[r][s]); }
  }
  UNROLL for (int r = 0; r < M; r++) UNROLL for (int s = 0; s < S; s++) store(out + (r * S + s) * LANES, sum[r][s]);
}

// ---- integer weights: a format adds up the products of one group, and scales the sum ----
template <int ZERO, class SCALE, bool HAS_OFFSET> struct In4 {
  static constexpr int SCALES = BLOCK * sizeof(SCALE), BYTES = SCALES * (HAS_OFFSET ? 2 : 1) + 256;
  INLINE F scale(const char* p, int strip) { return sizeof(SCALE) == 2 ? half((const uint16_t*)p + strip * LANES) : load((const float*)p + strip * LANES); }
  struct Weights { I low[4], high[4]; F scale, offset; };
  INLINE Weights read(const char* b, int strip) {
    Weights w; const char* q = b + SCALES * (HAS_OFFSET ? 2 : 1) + strip * 4 * LANES;
    UNROLL for (int j = 0; j < 4; j++) { const I v = load((const void*)(q + 64 * j)); w.low[j] = v & 0x0f0f0f0f; w.high[j] = (v >> 4) & 0x0f0f0f0f; }
    w.scale = scale(b, strip); w.offset = HAS_OFFSET ? scale(b + SCALES, strip) : F{};
    return w;
  }
  template <int M> INLINE void add(const Weights& w, Rows x, long g, F* sum) {
    UNROLL for (int r = 0; r < M; r++) {
      const int32_t* q = x.q + 8 * g * M + r;
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
      // Eight products of 4 bits by 8 fit into 16 bits: 8 * 15 * 127 < 2^15.
      __m256i a = _mm256_setzero_si256(), b = a;
      UNROLL for (int j = 0; j < 4; j++) {
        a = _mm256_add_epi16(a, _mm256_maddubs_epi16((__m256i)w.low[j], _mm256_set1_epi32(q[M * j])));
        b = _mm256_add_epi16(b, _mm256_maddubs_epi16((__m256i)w.high[j], _mm256_set1_epi32(q[M * (j + 4)])));
      }
      I n = (ZERO ? all(x.minus_8[g * M + r]) : I{}) + (I)_mm256_madd_epi16(_mm256_add_epi16(a, b), _mm256_set1_epi16(1));
#else
      I n = ZERO ? all(x.minus_8[g * M + r]) : I{}, m{};
      UNROLL for (int j = 0; j < 4; j++) { n = dot4(n, w.low[j], all(q[M * j])); m = dot4(m, w.high[j], all(q[M * (j + 4)])); }
      n += m;
#endif
      sum[r] = fma(number(n), w.scale * x.scale[g * M + r], sum[r]);
      if (HAS_OFFSET) sum[r] = fma(w.offset, all(x.sum[g * M + r]), sum[r]);
    }
  }
  INLINE void dense(const char* b, int strip, F* out) {  // 32 vectors: the weights as numbers
    const Weights w = read(b, strip);
    for (int j = 0; j < 8; j++) {
      const I v = j < 4 ? w.low[j] : w.high[j - 4];
      for (int i = 0; i < 4; i++) { const F n = number(((v >> (8 * i)) & 255) - ZERO); out[4 * j + i] = HAS_OFFSET ? n * w.scale + w.offset : n * w.scale; }
    }
  }
};
template <class SCALE, bool HAS_OFFSET, int HALVES> struct In8 {
  static constexpr int SCALES = BLOCK * sizeof(SCALE), BYTES = SCALES * (HALVES + HAS_OFFSET) + 512;
  INLINE F scale(const char* p, int strip) { return sizeof(SCALE) == 2 ? half((const uint16_t*)p + strip * LANES) : load((const float*)p + strip * LANES); }
  struct Weights { const char* q; F scale[HALVES], offset; };
  INLINE Weights read(const char* b, int strip) {
    Weights w; w.q = b + SCALES * (HALVES + HAS_OFFSET) + strip * 4 * LANES;
    UNROLL for (int h = 0; h < HALVES; h++) w.scale[h] = scale(b + h * SCALES, strip);
    w.offset = HAS_OFFSET ? scale(b + HALVES * SCALES, strip) : F{};
    return w;
  }
  template <int M> INLINE void products(const char* q, const int32_t* x, int from, int to, const int32_t* minus_128, I* n) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
    UNROLL for (int r = 0; r < M; r++) n[r] = I{};
    UNROLL for (int j = from; j < to; j++) {
      const __m256i w = _mm256_xor_si256(*(const __m256i_u*)(q + 64 * j), _mm256_set1_epi8((char)128)), size = _mm256_abs_epi8(w);
      UNROLL for (int r = 0; r < M; r++)
        n[r] += (I)_mm256_madd_epi16(_mm256_maddubs_epi16(size, _mm256_sign_epi8(_mm256_set1_epi32(x[M * j + r]), w)), _mm256_set1_epi16(1));
    }
#else
    UNROLL for (int r = 0; r < M; r++) n[r] = (from < 4 ? all(minus_128[r]) : I{}) + (to > 4 ? all(minus_128[M + r]) : I{});
    UNROLL for (int j = from; j < to; j++) {
      const I w = load((const void*)(q + 64 * j));
      UNROLL for (int r = 0; r < M; r++) n[r] = dot4(n[r], w, all(x[M * j + r]));
    }
#endif
  }
  template <int M> INLINE void add(const Weights& w, Rows x, long g, F* sum) {
    I n[M];
    UNROLL for (int h = 0; h < HALVES; h++) {
      products<M>(w.q, x.q + 8 * g * M, 8 / HALVES * h, 8 / HALVES * (h + 1), x.minus_128 + 2 * g * M, n);
      UNROLL for (int r = 0; r < M; r++) sum[r] = fma(number(n[r]), w.scale[h] * x.scale[g * M + r], sum[r]);
    }
    if (HAS_OFFSET) UNROLL for (int r = 0; r < M; r++) sum[r] = fma(w.offset, all(x.sum[g * M + r]), sum[r]);
  }
  INLINE void dense(const char* b, int strip, F* out) {
    const Weights w = read(b, strip);
    for (int j = 0; j < 8; j++) {
      const I v = load((const void*)(w.q + 64 * j)); const F s = w.scale[HALVES == 2 ? j / 4 : 0];
      for (int i = 0; i < 4; i++) { const F n = number(((v >> (8 * i)) & 255) - 128); out[4 * j + i] = HAS_OFFSET ? n * s + w.offset : n * s; }
    }
  }
};
typedef In4<8, uint16_t, false> InQ4_0;
typedef In4<0, uint16_t, true> InQ4_1;
typedef In4<0, float, true> InQ4_K;
typedef In8<uint16_t, false, 1> InQ8_0;
typedef In8<float, true, 1> InQ5_K;
typedef In8<float, false, 2> InQ6_K;

template <class T, int M> APART void rounded_strip(const char* w, int strip, long inputs, Rows x, float* out) {
  F sum[M];
  UNROLL for (int r = 0; r < M; r++) sum[r] = F{};
  for (long g = 0; g < inputs / GROUP; g++, w += T::BYTES) {
    if (strip == 0) prefetch(w + 16 * T::BYTES, T::BYTES);  // the next groups; takes a third off a step
    const typename T::Weights weights = T::read(w, strip);
    T::template add<M>(weights, x, g, sum);
  }
  UNROLL for (int r = 0; r < M; r++) store(out + r * LANES, sum[r]);
}
template <class T, int M> APART void dense_strip(const char* w, int strip, long inputs, Rows x, float* out) {
  F sum[M];
  UNROLL for (int r = 0; r < M; r++) sum[r] = F{};
  for (long g = 0; g < inputs / GROUP; g++, w += T::BYTES) {
    F weights[GROUP]; T::dense(w, strip, weights);
    const float* v = x.x + GROUP * g * M;
    for (int i = 0; i < GROUP; i++, v += M) UNROLL for (int r = 0; r < M; r++) sum[r] = fma(weights[i], all(v[r]), sum[r]);
  }
  UNROLL for (int r = 0; r < M; r++) store(out + r * LANES, sum[r]);
}

// ---- rows and blocks: which template runs. No choice here changes a bit. ----
INLINE void put(const float* from, int count, const float* bias, float* y) {  // one vector of outputs, of which `count` exist
  if (count >= LANES) { store(y, bias ? load(from) + load(bias) : load(from)); return; }
  for (int i = 0; i < count; i++) y[i] = bias ? from[i] + bias[i] : from[i];
}
template <class T, int M> static void float_rows(const Matrix& W, long block, Rows x, int num, long inputs, float* y, long width) {
  constexpr int S = lesser(STRIPS, 2);
  const long bytes = inputs * BLOCK * T::BYTES; float out[M * S * LANES];
  const char* w = (const char*)W.blocks + block * bytes;
  for (int first = 0; first < STRIPS; first += S) {
    float_strips<T, M, S>(w, bytes, first, inputs, x, out);
    for (int r = 0; r < num; r++) for (int s = 0; s < S; s++) {
      const long o = BLOCK * block + (first + s) * LANES;
      if (o < W.outputs) put(out + (r * S + s) * LANES, W.outputs - o, W.bias ? W.bias + o : nullptr, y + r * width + o);
    }
  }
}
template <class T, int M, bool ROUNDED> static void integer_rows(const Matrix& W, long block, Rows x, int num, long inputs, float* y, long width) {
  const char* w = (const char*)W.blocks + block * (inputs / GROUP) * T::BYTES; float out[M * LANES];
  for (int s = 0; s < STRIPS; s++) {
    const long o = BLOCK * block + s * LANES;
    if (o >= W.outputs) break;
    if (ROUNDED) rounded_strip<T, M>(w, s, inputs, x, out); else dense_strip<T, M>(w, s, inputs, x, out);
    for (int r = 0; r < num; r++) put(out + r * LANES, W.outputs - o, W.bias ? W.bias + o : nullptr, y + r * width + o);
  }
}
template <template <int> class K, class... A> static inline void by_rows(int m, A... a) {
  switch (m) {
    case 1: K<1>::run(a...); break; case 2: K<2>::run(a...); break; case 3: K<3>::run(a...); break; case 4: K<4>::run(a...); break; case 6: K<6>::run(a...); break;
    default: if constexpr (LANES == 16) { if (m == 8) K<8>::run(a...); else K<12>::run(a...); }
  }
}
template <class T> struct Floats { template <int M> struct K { static void run(const Matrix& W, long b, Rows x, int num, long k, float* y, long width) { float_rows<T, M>(W, b, x, num, k, y, width); } }; };
template <class T, bool ROUNDED> struct Integers { template <int M> struct K { static void run(const Matrix& W, long b, Rows x, int num, long k, float* y, long width) { integer_rows<T, M, ROUNDED>(W, b, x, num, k, y, width); } }; };

// One row of float weights: four vectors of outputs at once, because a sum of one chain waits for each addition.
template <class T> static void float_row(const Matrix& W, long from, long to, Rows x, long inputs, float* y) {
  const long bytes = inputs * BLOCK * T::BYTES; constexpr int S = 4; float out[S * LANES];
  const char* w = (const char*)W.blocks;
  long s = from * STRIPS; const long end = to * STRIPS;
  for (; s < end; s += S) {
    const bool is_whole = s + S <= end;
    if (is_whole) float_strips<T, 1, S>(w, bytes, s, inputs, x, out);
    else for (long t = s; t < end; t++) float_strips<T, 1, 1>(w, bytes, t, inputs, x, out + (t - s) * LANES);
    for (long t = s; t < s + S && t < end && t * LANES < W.outputs; t++) put(out + (t - s) * LANES, W.outputs - t * LANES, W.bias ? W.bias + t * LANES : nullptr, y + t * LANES);
  }
}
template <template <int> class K> static void panels(const Matrix& W, long from, long to, Rows x, long inputs, int N, float* y, long width) {
  const int near = bigger(1, (int)(256 * 1024 / (inputs * x.rows * (W.is_rounded ? 1 : 4)))), num_panels = (N + x.rows - 1) / x.rows;  // panels that stay in the second cache
  for (int first = 0; first < num_panels; first += near)
    for (long b = from; b < to; b++)
      for (int p = first; p < lesser(num_panels, first + near); p++)
        by_rows<K>(x.rows, W, b, x.panel(p), lesser(x.rows, N - p * x.rows), inputs, y + (long)p * x.rows * width, width);
}
// y [N, width] = x W^T + bias, for the blocks from .. to - 1
static void multiply(const Matrix& W, long from, long to, Rows x, int N, float* y, long width) {
  const long k = padded(W.inputs, GROUP);
#define FLOATS(T) { if (N == 1) float_row<T>(W, from, to, x, k, y); else panels<Floats<T>::template K>(W, from, to, x, k, N, y, width); break; }
#define INTEGERS(T) { if (W.is_rounded) panels<Integers<T, true>::template K>(W, from, to, x, k, N, y, width); else panels<Integers<T, false>::template K>(W, from, to, x, k, N, y, width); break; }
  switch (W.format) {
    case F32: FLOATS(InF32)
    case BF16: FLOATS(InBF16)
    case F16: FLOATS(InF16)
    case Format::Q4_0: INTEGERS(InQ4_0)
    case Format::Q4_1: INTEGERS(InQ4_1)
    case Format::Q4_K: INTEGERS(InQ4_K)
    case Format::Q8_0: INTEGERS(InQ8_0)
    case Format::Q5_K: INTEGERS(InQ5_K)
    case Format::Q6_K: INTEGERS(InQ6_K)
  }
#undef FLOATS
#undef INTEGERS
}
static void unpack_row(const Matrix& W, long row, float* out) {
  const long k = padded(W.inputs, GROUP), block = row / BLOCK; const int strip = row % BLOCK / LANES, lane = row % LANES;
  F v[GROUP];
#define DENSE(T) T::dense((const char*)W.blocks + (block * (k / GROUP) + g) * T::BYTES, strip, v); break;
#define PAIRS(T) for (int i = 0; i < GROUP; i += 2) { const char* w = (const char*)W.blocks + block * k * BLOCK * T::BYTES + strip * strip_bytes<T>(); v[i] = T::template input<0>(w, GROUP * g + i); v[i + 1] = T::template input<1>(w, GROUP * g + i); } break;
  for (long g = 0; g < k / GROUP; g++) {
    switch (W.format) {
      case F32: PAIRS(InF32)
      case BF16: PAIRS(InBF16)
      case F16: PAIRS(InF16)
      case Format::Q4_0: DENSE(InQ4_0)
      case Format::Q4_1: DENSE(InQ4_1)
      case Format::Q4_K: DENSE(InQ4_K)
      case Format::Q8_0: DENSE(InQ8_0)
      case Format::Q5_K: DENSE(InQ5_K)
      case Format::Q6_K: DENSE(InQ6_K)
    }
    for (int i = 0; i < GROUP && GROUP * g + i < W.inputs; i++) out[GROUP * g + i] = v[i][lane];
  }
#undef DENSE
#undef PAIRS
}
}  // namespace STEP
