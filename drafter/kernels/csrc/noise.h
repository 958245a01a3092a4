// Gumbel noise of (seed, position, token) and picks with that noise: drafter/decoding/sampling.py has both for devices.
// A number is -log(-log u) in float64, rounded to float32, with u = (k + 1/2) / 2^52 for the 52 high bits k of a hash.
// One lane makes one number from its own hash, without fused products: its bits depend on nothing that stands beside,
// nor on the instruction set.
#pragma once
#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "lanes.h"
#include "layout.h"
#include "pool.h"

namespace STEP {
constexpr int WORDS = LANES / 2;  // of 64 bits in a vector
typedef uint64_t U __attribute__((vector_size(8 * WORDS)));
typedef double D __attribute__((vector_size(8 * WORDS)));
typedef float HalfF __attribute__((vector_size(4 * WORDS)));  // as many float32
constexpr int64_t PIECE = 8192, SOME = 256;  // tokens: of a thread at a time; of the first cache
constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15, STREAM_STEP = 0xD1B54A32D192ED03, ONE = 0x3FF0000000000000;

template <class T> INLINE T mix64(T x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 27) * 0x94D049BB133111EB;
  return x ^ x >> 31;
}
static uint64_t stream_start(uint64_t seed, uint64_t position, uint64_t stream) {
  return mix64(mix64(mix64(seed) + (stream + 1) * STREAM_STEP) + (position + 1) * GAMMA);
}
// Of positive normal numbers x = 2^e (1 + f), with 1 + f from the root of 1/2 to the root of 2. For s = f / (2 + f),
// log(1 + f) = 2 artanh s = 2 s + s r with r = 2 (s^2 / 3 + s^4 / 5 + ...), and 2 s = f - s f. Ten terms leave 2^-55 of
// the result. log 2 is the sum of HIGH, whose products with e are exact, and LOW.
INLINE D logarithm(D x) {
  constexpr uint64_t ROOT = 0x3FE6A09E667F3BCD, EXPONENT = 0xFFF0000000000000;
  constexpr double HIGH = 0x1.62e42fefa38p-1, LOW = 0x1.ef35793c7673p-45;
  const U shifted = (U)x + (ONE - ROOT);
  const D e = (D)(shifted >> 52 | 0x4330000000000000) - (0x1p52 + 1023);  // bits of 2^52 + n: of 2^52, and n
  const D f = (D)((U)x - (shifted & EXPONENT) + ONE) - 1.0, s = f / (f + 2.0), z = s * s;
  const D zz = z * z; D even = D{} + 2. / 19, odd = D{} + 2. / 17;
  UNROLL for (int n = 15; n > 0; n -= 4) { even = even * zz + 2. / n; if (n > 3) odd = odd * zz + 2. / (n - 2); }
  return e * HIGH + (f - (s * (f - (even + odd * z) * z) - e * LOW));
}
// Noise of listed tokens, or of tokens from `first` on. Three short loops: in one, too few numbers would be under way
// at a time.
static void gumbel(uint64_t start, const int64_t* token, int64_t first, int num, float* out) {
  D u[SOME / WORDS]; U lane; for (int i = 0; i < WORDS; i++) lane[i] = first + i;
  const int n = (num + WORDS - 1) / WORDS;
  for (int i = 0; i < n; i++) {
    const U word = mix64(start + ((token ? load_some<U>(token + i * WORDS, num - i * WORDS) : lane + i * WORDS) + 1)
        * GAMMA);
    u[i] = (D)(word >> 12 | ONE) - (1 - 0x1p-53);
  }
  for (int i = 0; i < n; i++) u[i] = -logarithm(u[i]);
  for (int i = 0; i < n; i++) {
    const HalfF g = __builtin_convertvector(-logarithm(u[i]), HalfF);
    memcpy(out + i * WORDS, &g, sizeof(g));
  }
}
// The largest of some numbers and its place, the first of equals; one that is no number is larger than all.
struct Largest { float value = -INFINITY; int64_t place = 0; };
INLINE bool is_more(float a, float b) { return a > b || (a != a && b == b); }
static Largest find_largest(const float* x, int64_t from, int64_t to, Largest best) {  // and `best`
  F most = all(best.value); I place{}, is_nan{};
  for (int64_t i = from; i < to; i += LANES) {
    const F v = load_some<F>(x + i, to - i, all(-INFINITY)); const I is_larger = v > most;
    most = is_larger ? v : most; place = is_larger ? all((int32_t)i) : place; is_nan |= v != v;
  }
  const float before = best.value;
  for (int k = 0; k < LANES; k++) {
    if (is_nan[k] && before == before) for (int64_t i = from;; i++) if (x[i] != x[i]) return {x[i], i};
    if (most[k] > best.value || (most[k] == best.value && most[k] > before && place[k] + k < best.place)) best =
        {most[k], place[k] + k};
  }
  return best;
}
// [B, T, M] for positions [B, T] and tokens [M] of all rows, or of each row, whose lists are `stride` apart.
static void noise(int B, int T, int64_t M, uint64_t stream, const int64_t* seed, const int64_t* position,
    const int64_t* token, int64_t stride, float* out) {
  const int64_t pieces = (M + PIECE - 1) / PIECE;
  pool.share((int)(B * T * pieces), [&](int i) {
    const int64_t n = i / pieces, b = n / T, from = i % pieces * PIECE, to = lesser(M, from + PIECE);
    const uint64_t start = stream_start(seed[b], position[n], stream);
    for (int64_t j = from; j < to; j += SOME) {
      const int num = (int)lesser(SOME, to - j); float g[SOME];
      gumbel(start, token + b * stride + j, 0, num, g); memcpy(out + n * M + j, g, 4 * num);
    }
  });
}
template <class W> INLINE void each_above(const float* y, int64_t num, const float& least, W take) {
  constexpr int STRIDE = 8 * LANES;
  for (int64_t i = 0; i < num; i += STRIDE) {
    const int64_t end = lesser(num, i + STRIDE);
    if (end - i == STRIDE) {
      F most = load(y + i);
      UNROLL for (int j = LANES; j < STRIDE; j += LANES) most = greater(most, load(y + i + j));
      if (!(largest(most) >= least)) continue;
    }
    for (int64_t k = i; k < end; k++) if (y[k] >= least) take(k);
  }
}
// What numbers of at least `least` weigh together, and how many they are.
struct Held { double mass = 0; int64_t count = 0; };
static Held weigh(const float* y, const float* weight, int64_t num, float least) {
  D mass{}; I count{}; Held held;
  for (int64_t i = 0; i < num; i += LANES) {
    const int64_t n = lesser<int64_t>(LANES, num - i);
    const I is_kept = load_some<F>(y + i, n, all(-INFINITY)) >= least; float w[LANES];
    store(w, is_kept ? load_some<F>(weight + i, n) : F{}); count -= is_kept;
    UNROLL for (int h = 0; h < 2; h++) mass += __builtin_convertvector(load_some<HalfF>(w + h * WORDS, WORDS), D);
  }
  for (int k = 0; k < WORDS; k++) held.mass += mass[k];
  for (int k = 0; k < LANES; k++) held.count += count[k];
  return held;
}
// The least number that is kept, where a number is kept while larger ones weigh less than `mass`: the cut is searched
// by halves, and the few numbers around the cut are sorted.
static float find_edge(const float* y, const float* weight, int64_t num, float top, double mass) {
  static thread_local Vector<std::pair<float, float>> near;
  float upper = nextafterf(top, INFINITY), lower = top; Held above, held;
  for (float depth = 1; lower > -INFINITY; depth *= 2, upper = lower, above = held) {
    const float next = depth > 1e3f ? -INFINITY : top - depth; held = weigh(y, weight, num, next);
    if (held.mass >= mass || next == -INFINITY) { lower = next; break; }
    lower = next;
  }
  while (held.count - above.count > 64 && lower > -INFINITY) {
    const float middle = lower + (upper - lower) / 2; if (!(middle > lower && middle < upper)) break;
    const Held part = weigh(y, weight, num, middle);
    if (part.mass >= mass) { lower = middle; held = part; } else { upper = middle; above = part; }
  }
  near.clear(); each_above(y, num, lower, [&](int64_t k) { if (y[k] < upper) near.push_back({y[k], weight[k]}); });
  std::sort(near.begin(), near.end(), std::greater<std::pair<float, float>>());
  float edge = -INFINITY;
  for (const auto& [value, own] : near) {
    if (above.mass >= mass && above.mass > 0) break;
    edge = value; above.mass += own;
  }
  return edge;
}
// Divides a row of logits by its temperature. The least number that top-k, top-p and min-p keep, each of what the one
// before kept: top-k while fewer than k are larger, top-p while the larger hold less than p of the mass.
static float warp(const Sampling& s, long row, float* y, int64_t num) {
  static thread_local Vector<float> weight;
  const int64_t top_k = s.top_k[row]; const float t = s.temperature[row], top_p = s.top_p[row], min_p = s.min_p[row];
  int64_t i = 0;
  for (; i + LANES <= num; i += LANES) store(y + i, load(y + i) / t);
  for (; i < num; i++) y[i] /= t;
  const float top = top_k > 0 || top_p < 1 || min_p > 0 ? find_largest(y, 0, num, {}).value : INFINITY;
  float edge = -INFINITY;
  if (!(fabsf(top) < INFINITY)) return edge;
  if (top_k > 0) { weight.assign(num, 1.f); edge = find_edge(y, weight.data(), num, top, (double)top_k); }
  if (top_p < 1) {
    weight.resize(num + LANES);
    for (i = 0; i < num; i += LANES) {
      const F v = load_some<F>(y + i, num - i, all(-INFINITY));
      store(&weight[i], v >= edge ? exponential(v - top) : F{});
    }
    edge = bigger(edge, find_edge(y, weight.data(), num, top, top_p * weigh(y, weight.data(), num, edge).mass));
  }
  return min_p > 0 ? bigger(edge, top + logf(min_p)) : edge;
}
static bool is_sampled(const Sampling* s, long row) { return s && s->temperature[row] > 0; }
static bool is_filtered(const Sampling* s, long row) {
  return is_sampled(s, row) && (s->top_k[row] > 0 || s->top_p[row] < 1 || s->min_p[row] > 0);
}
static int64_t pick_filtered(const Sampling& s, long row, int64_t position, const float* x, int64_t V) {
  static thread_local Vector<float> y; static thread_local Vector<int64_t> kept;
  y.assign(x, x + V); kept.clear();
  const float least = warp(s, row, y.data(), V); Largest best;
  each_above(y.data(), V, least, [&](int64_t k) { kept.push_back(k); });
  for (size_t j = 0; j < kept.size(); j += SOME) {
    const int num = (int)lesser<int64_t>(SOME, kept.size() - j); float g[SOME];
    gumbel(stream_start(s.seed[row], position, 0), &kept[j], 0, num, g);
    for (int k = 0; k < num; k++) if (y[kept[j + k]] + g[k] > best.value) best = {y[kept[j + k]] + g[k], kept[j + k]};
  }
  return best.place;
}
// Picks [B, N] by logits [B, N, V]: of logits / temperature + noise in rows that sample.
static void pick(int B, int N, int64_t V, const float* logits, const Sampling* s, const int64_t* position,
    int64_t* out) {
  const int64_t piece = s ? PIECE : V, pieces = (V + piece - 1) / piece; Vector<Largest> found(B * N * pieces);
  pool.share((int)found.size(), [&](int i) {
    const int64_t n = i / pieces, b = n / N, from = i % pieces * piece, to = lesser(V, from + piece);
    const float* x = logits + n * V;
    if (!is_sampled(s, b)) { found[i] = find_largest(x, from, to, found[i]); return; }
    if (is_filtered(s, b)) { if (from == 0) found[i].place = pick_filtered(*s, b, position[n], x, V); return; }
    const float t = s->temperature[b];
    for (int64_t j = from; j < to; j += SOME) {
      const int num = (int)lesser(SOME, to - j); float y[SOME];
      gumbel(stream_start(s->seed[b], position[n], 0), nullptr, j, num, y);
      for (int k = 0; k < num; k++) y[k] = x[j + k] / t + y[k];
      found[i] = find_largest(y, 0, num, {found[i].value, found[i].place - j}); found[i].place += j;
    }
  });
  for (int64_t n = 0; n < B * N; n++) {
    Largest best = found[n * pieces];
    for (int64_t p = n * pieces; p < (n + 1) * pieces; p++) if (is_more(found[p].value, best.value)) best = found[p];
    out[n] = best.place;
  }
}
}  // namespace STEP
