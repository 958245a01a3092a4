// Products of rows with a matrix in blocks, one block of 16 outputs at a time. Every output is one sum in one order:
// input by input, or over groups of 32 inputs.
#pragma once
#include "lanes.h"

#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
#define ADDS_PAIRS true  // products of bytes are added in pairs, to 16 bits
#pragma GCC optimize("no-tree-ter,no-tree-reassoc")  // else GCC computes all products before it adds, and stores them
#else
#define ADDS_PAIRS false
#endif
namespace STEP {
constexpr int GROUP = 32;
inline int padded(int n, int unit) { return (n + unit - 1) / unit * unit; }

// Activations of N rows. The rows lie in panels of `rows` rows, input by input, so that one address leads to all rows
// of a panel: input k of row n is x[(n / rows * stride + k) * rows + n % rows]. In 8 bits, four inputs stand where one
// stands here.
struct Rows {
  float* x;           // as they are
  int32_t* q;         // rounded, four inputs a word: x = q * scale in groups of 32
  float* scale;       // of every 32 inputs
  // What the offsets of weights are multiplied by, or add; computed once for all outputs:
  float* sum;         // scale times the sum of the q's of every 32 inputs
  int32_t* minus;     // -32 times the sums of the q's of the first and the last 16 of every 32; minus the sum of all 32
  int32_t* pairs;     // of every 16 inputs, in 16 bits each: -32 times the sum of inputs 4 j and 4 j + 1; of the others
  long stride;        // inputs of a row, a multiple of 32
  int rows;
  Rows panel(long p) const {
    const long g = p * stride / 32 * rows;
    return {x + 32 * g, q + 8 * g, scale + g, sum + g, minus + 3 * g, pairs + 2 * g, stride, rows};
  }
};
constexpr bool is_panel(int rows) { return rows <= 4 || rows == 6 || rows == 8 || rows == 12 || rows == 16; }
constexpr int MOST_ROWS = LANES == 16 ? 16 : LANES == 8 ? (ADDS_PAIRS ? 8 : 6) : 4;
static int panel_rows(int N) {  // the rows that one template computes
  const int most = N > 16 ? lesser(MOST_ROWS, 12) : MOST_ROWS;  // rows six by six are fastest
  int best = LANES == 8 ? most : (N - 1) / ((N + most - 1) / most) + 1;
  while (!is_panel(best)) best++;
  // The least time: 8 lanes unpack weights of a panel in the time of about one row.
  auto time = [&](int m) { return (N + m - 1) / m * (m + 1); };
  for (int m = MOST_ROWS; LANES == 8 && m > 0; m--) if (is_panel(m) && time(m) < time(best)) best = m;
  return best;
}
// Inputs from .. to - 1, whole groups, of row n of the panels, from its numbers: as they are, or rounded.
static void place(const Rows& panels, int n, const float* x, long from, long to, bool is_rounded) {
  const int R = panels.rows, r = n % R;
  const Rows p = panels.panel(n / R);
  if (!is_rounded) { for (long k = from; k < to; k++) p.x[k * R + r] = x[k]; return; }
  for (long g = from / GROUP; g < to / GROUP; g++) {
    F most{}; int32_t words[GROUP / 4]; uint32_t total[2];  // sums of numbers that are not finite wrap
    UNROLL for (int i = 0; i < GROUP; i += LANES)
      most = greater(most, greater(load(x + g * GROUP + i), -load(x + g * GROUP + i)));
    const float m = largest(most), inverse = m > 0 ? 127.f / m : 0.f;
    UNROLL for (int h = 0; h < 2; h++) {
      Wrapping n{};
      UNROLL for (int i = 16 * h; i < 16 * h + 16; i += LANES) {
        const I v = round(load(x + g * GROUP + i) * inverse);
        store_bytes((int8_t*)words + i, v); n += (Wrapping)v;
      }
      total[h] = sum((I)n); p.minus[(3 * g + h) * R + r] = (int32_t)(-32 * total[h]);
    }
#if ADDS_PAIRS
    UNROLL for (int h = 0; h < 2; h++) {
      __m128i n = _mm_maddubs_epi16(_mm_set1_epi8(32), _mm_loadu_si128((const __m128i*)words + h));
      n = _mm_add_epi16(n, _mm_shuffle_epi32(n, 0x4e)); n = _mm_add_epi16(n, _mm_shuffle_epi32(n, 0xb1));
      p.pairs[(2 * g + h) * R + r] = _mm_cvtsi128_si32(_mm_sub_epi16(_mm_setzero_si128(), n));
    }
#endif
    UNROLL for (int i = 0; i < GROUP / 4; i++) p.q[(GROUP / 4 * g + i) * R + r] = words[i];
    p.scale[g * R + r] = m / 127.f; p.sum[g * R + r] = m / 127.f * (int32_t)(total[0] + total[1]);
    p.minus[(3 * g + 2) * R + r] = (int32_t)-(total[0] + total[1]);
  }
}
// Computes S vectors of 16 / LANES a block, from vector `first` of all blocks on, for M rows: out [M, S, LANES].
typedef void (*Kernel)(const char* blocks, long block_bytes, int first, long inputs, Rows x, float* out);
// Weights of one vector of outputs as numbers, one vector for each of 32 inputs.
typedef void (*Dense)(const char* groups, int group, int strip, F* out);

// ---- float weights: a format reads input k, which is even, or k + 1 of one vector of outputs ----
template <class N> struct Plain {
  static constexpr int BYTES = sizeof(N);  // of a weight
  static constexpr bool IS_PAIRED = false;
  template <int ODD> INLINE F input(const char* w, long k) { return numbers((const N*)w + BLOCK * (k + ODD)); }
};
typedef Plain<float> InF32;
typedef Plain<uint16_t> InF16;
struct InBF16 {
  static constexpr int BYTES = 2;
  static constexpr bool IS_PAIRED = true;
  template <int ODD> INLINE F input(const char* w, long k) {
    const I v = load((const void*)(w + 32 * k));
    return bits((ODD ? pinned(v >> 16) : v) << 16);  // a mask would take a register
  }
};
template <class T> constexpr int strip_bytes() { return T::BYTES * LANES * (T::IS_PAIRED ? 2 : 1); }
template <class T> static void dense_floats(const char* group, int, int strip, F* out) {
  const char* w = group + strip * strip_bytes<T>();
  for (int i = 0; i < GROUP; i += 2) { out[i] = T::template input<0>(w, i); out[i + 1] = T::template input<1>(w, i); }
}
// M S sums at once hide the time of an addition, and leave registers for the weights.
template <class T, int M, int S>
APART void float_strips(const char* w, long block_bytes, int first, long inputs, Rows x, float* out) {
  F sum[M][S];
  UNROLL for (int r = 0; r < M; r++) UNROLL for (int s = 0; s < S; s++) sum[r][s] = F{};
  const char* p[S];
  UNROLL for (int s = 0; s < S; s++)
    p[s] = w + (first + s) / STRIPS * block_bytes + (first + s) % STRIPS * strip_bytes<T>();
  const float* v = x.x;
  auto add = [&](const F* weight, int r, float x_k) {
    const F x_r = S > 1 ? pinned(all(x_k)) : all(x_k);
    UNROLL for (int s = 0; s < S; s++) sum[r][s] = fma(weight[s], x_r, sum[r][s]);
  };
  for (long k = 0; k < inputs; k += 2, v += 2 * M) {
    F weight[S];
    UNROLL for (int s = 0; s < S; s++) {
      if (s % STRIPS == 0) __builtin_prefetch(p[s] + 16 * T::BYTES * (k + 64));
      weight[s] = T::template input<0>(p[s], k);
    }
    UNROLL for (int r = 0; r < M; r++) add(weight, r, v[r]);
    UNROLL for (int s = 0; s < S; s++) weight[s] = T::template input<1>(p[s], k);
    UNROLL for (int r = 0; r < M; r++) add(weight, r, v[M + r]);
  }
  UNROLL for (int r = 0; r < M; r++) UNROLL for (int s = 0; s < S; s++) store(out + (r * S + s) * LANES, sum[r][s]);
}

// ---- integer weights: how a group becomes integers, scales and offsets, as layout.h describes ----
INLINE I field(const char* section, int width, int j, int to) {  // vector j of a section, its bits from bit `to` on
  const I v = load((const void*)(section + 64 * (j % width)));
  if (width == 8) return v;
  const int shift = width * (j / width) - to;
  return (shift < 0 ? v << -shift : v >> shift) & all(0x01010101 * (((1 << width) - 1) << to));
}
template <Format FORMAT> struct In {
  static constexpr Type T = types[FORMAT];
  static constexpr int SCALES = T.scales, VECTORS = 8 / SCALES, GROUPS = T.groups, BYTES = T.bytes();
  static constexpr int MOST = T.is_table ? 255 : (1 << (T.low + T.high)) - 1;  // of an integer
  struct Unit { F scale, offset; };
  INLINE Unit unit(const char* b, int strip) {
    const uint16_t* p = (const uint16_t*)b + strip * LANES;
    if constexpr (!T.has_offset) return {half(p), F{}};
    else return {half(p), T.scale_bits ? -half(p + BLOCK) : half(p + BLOCK)};
  }
  INLINE F factor(const char* b, F unit, int g, int n, int strip) {  // number n of group g: scales, then offsets
    const char* s = b + T.units() + strip * LANES;
    constexpr int NUM = SCALES * (1 + T.has_offset);
    if constexpr (T.scale_bits == 0) return unit;
    else if constexpr (T.scale_bits == 8) return unit * number(bytes(s + BLOCK * (NUM * g + n)));
    else if constexpr (T.scale_bits == 4) return unit * number(bytes(s + BLOCK * (2 * g + n % 2)) >> (n / 2 * 4) & 15);
    else {
      const I high = bytes(s + BLOCK * (8 + g / 2)) >> (g % 2 * 4 + 2 * n) & 3;
      return unit * number(((bytes(s + BLOCK * g) >> (4 * n) & 15) | high << 4) - 32);
    }
  }
  INLINE const char* start(const char* b, int g, int strip) {
    return b + T.units() + T.smalls() + g * T.integers() + strip * 4 * LANES;
  }
  INLINE I integers(const char* q, int j) {  // of the inputs 4 j .. 4 j + 3, in unsigned bytes
    I v = field(q, T.low, j, 0);
    if constexpr (T.high > 0) v |= field(q + 64 * T.low, T.high, j, T.low);
    if constexpr (T.is_table) v = look_up(TABLE, v);
    return v;
  }
  // sum [M] += scale * x's scale * sum of products, for group g of the rows, group i of those that lie together
  template <int M> INLINE void add(const char* b, Unit u, int i, int strip, const Rows& x, long g, F* sum) {
    const char* q = start(b, i, strip);
    UNROLL for (int h = 0; h < SCALES; h++) {
      const F scale = factor(b, u.scale, i, h, strip);
      const F offset = T.has_offset ? factor(b, u.offset, i, SCALES + h, strip) : F{};
      const int32_t *words = x.q + (8 * g + VECTORS * h) * M, *minus = x.minus + (3 * g + (SCALES == 2 ? h : 2)) * M;
      auto finish = [&](int r, I n) {
        const float x_r = x.scale[g * M + r];
        sum[r] = fma(number(n), scale * x_r, sum[r]);
        const float total = SCALES == 2 ? x_r * (minus[r] / -32.f) : x.sum[g * M + r];
        if (T.has_offset) sum[r] = fma(offset, all(total), sum[r]);
      };
      auto zeros = [&](int r) {  // what a zero of the integers takes away
        return !T.zero ? I{} : SCALES == 2 ? all(minus[r]) >> (T.zero == 4 ? 3 : 0)
            : (I)((Wrapping)all(minus[r]) * T.zero);
      };
#if ADDS_PAIRS
      const __m256i ones = _mm256_set1_epi16(1);
      if constexpr (MOST == 255) {  // signed: pairs of products of 8 bits fill 16 bits
        I n[M]{};
        UNROLL for (int j = 0; j < VECTORS; j++) {
          const __m256i w = (__m256i)integers(q, VECTORS * h + j);
          const __m256i v = _mm256_xor_si256(w, _mm256_set1_epi8((char)128)), size = _mm256_abs_epi8(v);
          UNROLL for (int r = 0; r < M; r++) {
            const __m256i signed_x = _mm256_sign_epi8(_mm256_set1_epi32(words[M * j + r]), v);
            n[r] += (I)_mm256_madd_epi16(_mm256_maddubs_epi16(size, signed_x), ones);
          }
        }
        UNROLL for (int r = 0; r < M; r++) finish(r, n[r]);
      } else {
        // Sums of 16 bits begin with what a zero of 32 takes away: what wraps on the way comes back.
        constexpr bool IS_CENTERED = T.zero == 32;
        constexpr int FIT = IS_CENTERED ? VECTORS : lesser(VECTORS, 32767 / (2 * 127 * MOST));  // vectors in 16 bits
        __m256i sums[M];
        Wrapping n[M];  // rows beyond the last hold anything
        UNROLL for (int r = 0; r < M; r++) {
          if (IS_CENTERED) sums[r] = _mm256_set1_epi32(x.pairs[(2 * g + h) * M + r]);
          n[r] = IS_CENTERED ? Wrapping{} : (Wrapping)zeros(r);
        }
        UNROLL for (int j = 0; j < VECTORS; j += 2) {  // two at a time: products wait for no unpacking
          const __m256i v = (__m256i)integers(q, VECTORS * h + j), w = (__m256i)integers(q, VECTORS * h + j + 1);
          UNROLL for (int r = 0; r < M; r++) {
            const __m256i of_v = _mm256_maddubs_epi16(v, _mm256_set1_epi32(words[M * j + r]));
            const __m256i of_w = _mm256_maddubs_epi16(w, _mm256_set1_epi32(words[M * (j + 1) + r]));
            const __m256i both = _mm256_add_epi16(of_v, of_w);
            sums[r] = IS_CENTERED || j % FIT ? _mm256_add_epi16(sums[r], both) : both;
            if ((j + 2) % FIT == 0) n[r] += (Wrapping)_mm256_madd_epi16(sums[r], ones);
          }
        }
        UNROLL for (int r = 0; r < M; r++) finish(r, (I)n[r]);
      }
#else
      I w[VECTORS];
      UNROLL for (int j = 0; j < VECTORS; j++) w[j] = integers(q, VECTORS * h + j);
      // A product waits for the one before in its sum: rows side by side, where registers allow, else two sums.
      constexpr int BESIDE = LANES < 16 ? 1 : M % 6 == 0 ? 6 : lesser(M, 4), SUMS = BESIDE == 1 ? 2 : 1;
      UNROLL_PRODUCTS for (int first = 0; first < M; first += BESIDE) {
        I n[BESIDE * SUMS]{};
        UNROLL_PRODUCTS for (int r = 0; r < BESIDE; r++) n[r] = zeros(first + r);
        UNROLL_PRODUCTS for (int j = 0; j < VECTORS; j++) UNROLL_PRODUCTS for (int r = 0; r < BESIDE; r++)
          n[j % SUMS + r] = dot4(n[j % SUMS + r], w[j], all(words[M * j + first + r]));
        UNROLL_PRODUCTS for (int r = 0; r < BESIDE; r++)
          finish(first + r, SUMS == 1 ? n[r] : (I)((Wrapping)n[0] + (Wrapping)n[SUMS - 1]));
      }
#endif
    }
  }
  static __attribute__((noinline)) void dense(const char* b, int i, int strip, F* out) {
    const Unit u = unit(b, strip);
    const char* q = start(b, i, strip);
    for (int h = 0; h < SCALES; h++) {
      const F scale = factor(b, u.scale, i, h, strip);
      const F offset = T.has_offset ? factor(b, u.offset, i, SCALES + h, strip) : F{};
      UNROLL for (int j = 0; j < VECTORS; j++) {
        const I v = integers(q, VECTORS * h + j);
        for (int k = 0; k < 4; k++) {
          const F n = number(((v >> (8 * k)) & 255) - T.zero);
          out[4 * (VECTORS * h + j) + k] = T.has_offset ? n * scale + offset : n * scale;
        }
      }
    }
  }
};
template <class T, int M>
APART void rounded_strip(const char* w, long block_bytes, int first, long inputs, Rows x, float* out) {
  constexpr int EACH = T::BYTES / T::GROUPS, SHARE = EACH / STRIPS;  // bytes of a group
  const int strip = first % STRIPS;
  F sum[M];
  UNROLL for (int r = 0; r < M; r++) sum[r] = F{};
  w += first / STRIPS * block_bytes;
  const char* next = w + block_bytes + strip * (block_bytes / STRIPS);
  for (long g = 0; g < inputs / GROUP; w += T::BYTES) {
    const typename T::Unit unit = T::unit(w, strip);
    for (int i = 0; i < T::GROUPS; i++, g++) {
      // One row: each strip asks for its share of the next block. More rows: the first strip asks for the next groups.
      if (M == 1 && STRIPS > 1) prefetch(next + g * SHARE, SHARE);
      else if (strip == 0) prefetch(w + (16 + i) * EACH, EACH);
      T::template add<M>(w, unit, i, strip, x, g, sum);
    }
  }
  UNROLL for (int r = 0; r < M; r++) store(out + r * LANES, sum[r]);
}
// Integers as numbers, times activations that are not rounded.
template <int M>
APART void dense_rows(Dense dense, const char* w, int bytes, int groups, int strip, long inputs, Rows x, float* out) {
  F sum[M];
  UNROLL for (int r = 0; r < M; r++) sum[r] = F{};
  for (long g = 0; g < inputs / GROUP; g++) {
    F weights[GROUP];
    dense(w + g / groups * bytes, g % groups, strip, weights);
    const float* v = x.x + GROUP * g * M;
    for (int i = 0; i < GROUP; i++, v += M)
      UNROLL for (int r = 0; r < M; r++) sum[r] = fma(weights[i], all(v[r]), sum[r]);
  }
  UNROLL for (int r = 0; r < M; r++) store(out + r * LANES, sum[r]);
}
template <class T, int M>
static void dense_strip(const char* w, long block_bytes, int first, long inputs, Rows x, float* out) {
  dense_rows<M>(T::dense, w + first / STRIPS * block_bytes, T::BYTES, T::GROUPS, first % STRIPS, inputs, x, out);
}

// ---- rows and blocks: which kernel runs. No choice here changes a bit. ----
constexpr int TOGETHER = lesser(STRIPS, 2), OF_ONE = 4;  // vectors that float kernels compute at once; for one row
template <class T> struct Floats {
  template <int M> static constexpr Kernel kernel = float_strips<T, M, M == 1 ? OF_ONE : TOGETHER>;
};
template <class T> struct Integers { template <int M> static constexpr Kernel kernel = rounded_strip<T, M>; };
template <class T> struct Numbers { template <int M> static constexpr Kernel kernel = dense_strip<T, M>; };
template <class K, int M = MOST_ROWS> static Kernel by_rows(int m) {
  if constexpr (M == 0) return nullptr;
  else if constexpr (!is_panel(M)) return by_rows<K, M - 1>(m);
  else return m == M ? K::template kernel<M> : by_rows<K, M - 1>(m);
}
struct Way { Kernel kernel, single; int vectors; };  // single: computes one vector of one row
#define EACH_INTEGER_FORMAT(DO) \
  DO(Q4_0) DO(Q4_1) DO(Q4_K) DO(Q8_0) DO(Q5_K) DO(Q6_K) DO(Q5_0) DO(Q5_1) DO(Q2_K) DO(Q3_K) DO(IQ4_NL) DO(IQ4_XS)
static Way way_of(const Matrix& W, int m) {
#define FLOATS(FORMAT) \
  case Format::FORMAT: \
    return {by_rows<Floats<In##FORMAT>>(m), float_strips<In##FORMAT, 1, 1>, m == 1 ? OF_ONE : TOGETHER};
#define INTEGERS(FORMAT) \
  case Format::FORMAT: \
    return {W.is_rounded ? by_rows<Integers<In<Format::FORMAT>>>(m) : by_rows<Numbers<In<Format::FORMAT>>>(m), {}, 1};
  switch (W.format) { FLOATS(F32) FLOATS(BF16) FLOATS(F16) EACH_INTEGER_FORMAT(INTEGERS) }
  return {};
}
static Dense dense_of(int format) {
#define DENSE(FORMAT) case Format::FORMAT: return In<Format::FORMAT>::dense;
  switch (format) {
    case F32: return dense_floats<InF32>; case F16: return dense_floats<InF16>; case BF16: return dense_floats<InBF16>;
    EACH_INTEGER_FORMAT(DENSE)
  }
  return nullptr;
}
INLINE void put(const float* from, int count, const float* bias, float* y) {  // one vector, of which `count` exist
  if (count >= LANES) return store(y, bias ? load(from) + load(bias) : load(from));
  for (int i = 0; i < count; i++) y[i] = bias ? from[i] + bias[i] : from[i];
}
// Vectors from .. to - 1 of all blocks, for the rows of one panel, of which `num` exist.
static void product(const Matrix& W, Way way, long from, long to, const Rows& x, int num, float* y, long width) {
  const long inputs = padded(W.inputs, GROUP), bytes = block_bytes(W.format, W.inputs);
  const char* blocks = (const char*)W.blocks;
  float out[MOST_ROWS * OF_ONE * LANES];
  for (long s = from; s < to && s * LANES < W.outputs; s += way.vectors) {
    const int here = lesser<long>(way.vectors, to - s);
    for (int r = 0; r < num; r++) __builtin_prefetch(y + r * width + s * LANES, 1);
    if (here == way.vectors) way.kernel(blocks, bytes, s, inputs, x, out);
    else for (int i = 0; i < here; i++) way.single(blocks, bytes, s + i, inputs, x, out + i * LANES);
    for (int r = 0; r < num; r++) for (int i = 0; i < here; i++) {
      const long o = (s + i) * LANES;
      const float *from = out + (r * way.vectors + i) * LANES, *bias = W.bias ? W.bias + o : nullptr;
      if (o < W.outputs) put(from, W.outputs - o, bias, y + r * width + o);
    }
  }
}
// y [N, width] = x W^T + bias, for the blocks from .. to - 1
static void multiply(const Matrix& W, long from, long to, const Rows& x, int N, float* y, long width) {
  const Way way = way_of(W, x.rows);
  if (N == 1) return product(W, way, from * STRIPS, to * STRIPS, x, 1, y, width);
  const int num_panels = (N + x.rows - 1) / x.rows;
  const int panel_bytes = padded(W.inputs, GROUP) * x.rows * (W.is_rounded ? 1 : 4);
  const int near = bigger(1, 256 * 1024 / panel_bytes);  // panels that stay in the second cache
  for (int first = 0; first < num_panels; first += near)
    for (long b = from; b < to; b++)
      for (int p = first; p < lesser(num_panels, first + near); p++) {
        const long row = (long)p * x.rows;
        const int num = lesser<long>(x.rows, N - row);
        product(W, way, b * STRIPS, (b + 1) * STRIPS, x.panel(p), num, y + row * width, width);
      }
}
static void unpack_row(const Matrix& W, long row, float* out) {
  const int strip = row % BLOCK / LANES, lane = row % LANES, together = types[W.format].groups;
  const char* block = (const char*)W.blocks + row / BLOCK * block_bytes(W.format, W.inputs);
  const Dense dense = dense_of(W.format);
  F v[GROUP];
  for (long g = 0; g * GROUP < W.inputs; g++) {
    dense(block + g / together * types[W.format].bytes(), g % together, strip, v);
    for (int i = 0; i < GROUP && GROUP * g + i < W.inputs; i++) out[GROUP * g + i] = v[i][lane];
  }
}
}  // namespace STEP
