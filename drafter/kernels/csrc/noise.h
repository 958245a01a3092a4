// Gumbel noise of (seed, position, token) and picks with that noise: drafter/decoding/sampling.py has both for devices. A number is
// -log(-log u) in float64, rounded to float32, with u = (k + 1/2) / 2^52 for the 52 high bits k of a hash. One lane makes one
// number from its own hash, without fused products: its bits depend on nothing that stands beside, nor on the instruction set.
#pragma once
#include <vector>

#include "lanes.h"
#include "pool.h"

namespace STEP {
constexpr int WORDS = LANES / 2;  // of 64 bits in a vector
typedef uint64_t U __attribute__((vector_size(8 * WORDS)));
typedef double D __attribute__((vector_size(8 * WORDS)));
typedef float HalfF __attribute__((vector_size(4 * WORDS)));  // as many float32
constexpr int64_t PIECE = 8192, SOME = 256;  // tokens that one thread takes at a time; whose numbers stay in the first cache
constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15, STREAM_STEP = 0xD1B54A32D192ED03, ONE = 0x3FF0000000000000;  // ONE: the bits of 1.0

template <class T> INLINE T mix64(T x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 27) * 0x94D049BB133111EB;
  return x ^ x >> 31;
}
static uint64_t stream_start(uint64_t seed, uint64_t position, uint64_t stream) {
  return mix64(mix64(mix64(seed) + (stream + 1) * STREAM_STEP) + (position + 1) * GAMMA);
}
// Of positive normal numbers x = 2^e (1 + f), with 1 + f from the root of 1/2 to the root of 2. For s = f / (2 + f),
// log(1 + f) = 2 artanh s = 2 s + s r with r = 2 (s^2 / 3 + s^4 / 5 + ...), and 2 s = f - s f. Ten terms leave 2^-55 of the
// result. log 2 is the sum of HIGH, whose products with e are exact, and LOW.
INLINE D logarithm(D x) {
  constexpr uint64_t ROOT = 0x3FE6A09E667F3BCD, EXPONENT = 0xFFF0000000000000;
  constexpr double HIGH = 0x1.62e42fefa38p-1, LOW = 0x1.ef35793c7673p-45;
  const U shifted = (U)x + (ONE - ROOT);
  const D e = (D)(shifted >> 52 | 0x4330000000000000) - (0x1p52 + 1023);  // the bits of 2^52 + n are those of 2^52 and n
  const D f = (D)((U)x - (shifted & EXPONENT) + ONE) - 1.0, s = f / (f + 2.0), z = s * s;
  const D zz = z * z; D even = D{} + 2. / 19, odd = D{} + 2. / 17;
  UNROLL for (int n = 15; n > 0; n -= 4) { even = even * zz + 2. / n; if (n > 3) odd = odd * zz + 2. / (n - 2); }
  return e * HIGH + (f - (s * (f - (even + odd * z) * z) - e * LOW));
}
template <class V, class T> INLINE V load_some(const T* p, int64_t num, V v = V{}) {  // v: of the lanes behind the end
  if (num * sizeof(T) >= sizeof(V)) memcpy(&v, p, sizeof(V)); else memcpy(&v, p, num * sizeof(T));
  return v;
}
// Noise of listed tokens, or of tokens from `first` on. Three short loops: in one, too few numbers would be under way at a time.
static void gumbel(uint64_t start, const int64_t* token, int64_t first, int num, float* out) {
  D u[SOME / WORDS]; U lane; for (int i = 0; i < WORDS; i++) lane[i] = first + i;
  const int n = (num + WORDS - 1) / WORDS;
  for (int i = 0; i < n; i++) {
    const U word = mix64(start + ((token ? load_some<U>(token + i * WORDS, num - i * WORDS) : lane + i * WORDS) + 1) * GAMMA);
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
static Largest find_largest(const float* x, int64_t from, int64_t to, Largest best) {  // of x[from .. to - 1] and what was found before
  F most = all(best.value); I place{}, is_nan{};
  for (int64_t i = from; i < to; i += LANES) {
    const F v = load_some<F>(x + i, to - i, all(-INFINITY)); const I is_larger = v > most;
    most = is_larger ? v : most; place = is_larger ? all((int32_t)i) : place; is_nan |= v != v;
  }
  const float before = best.value;
  for (int k = 0; k < LANES; k++) {
    if (is_nan[k] && before == before) for (int64_t i = from;; i++) if (x[i] != x[i]) return {x[i], i};
    if (most[k] > best.value || (most[k] == best.value && most[k] > before && place[k] + k < best.place)) best = {most[k], place[k] + k};
  }
  return best;
}
// [B, T, M] for positions [B, T] and tokens [M] of all rows, or of each row, whose lists are `stride` apart.
static void noise(int B, int T, int64_t M, uint64_t stream, const int64_t* seed, const int64_t* position, const int64_t* token, int64_t stride, float* out) {
  const int64_t pieces = (M + PIECE - 1) / PIECE;
  pool.share((int)(B * T * pieces), [&](int i) {
    const int64_t n = i / pieces, b = n / T, from = i % pieces * PIECE, to = lesser(M, from + PIECE); const uint64_t start = stream_start(seed[b], position[n], stream);
    for (int64_t j = from; j < to; j += SOME) {
      const int num = (int)lesser(SOME, to - j); float g[SOME];
      gumbel(start, token + b * stride + j, 0, num, g); memcpy(out + n * M + j, g, 4 * num);
    }
  });
}
// Picks [B, N] by logits [B, N, V]: of logits / temperature + noise in rows with a temperature; without seeds, no row has one.
static void pick(int B, int N, int64_t V, const float* logits, const float* temperature, const int64_t* seed, const int64_t* position, int64_t* out) {
  const int64_t piece = seed ? PIECE : V, pieces = (V + piece - 1) / piece; std::vector<Largest> found(B * N * pieces);
  pool.share((int)found.size(), [&](int i) {
    const int64_t n = i / pieces, b = n / N, from = i % pieces * piece, to = lesser(V, from + piece); const float *x = logits + n * V, t = seed ? temperature[b] : 0;
    if (!(t > 0)) { found[i] = find_largest(x, from, to, found[i]); return; }
    for (int64_t j = from; j < to; j += SOME) {
      const int num = (int)lesser(SOME, to - j); float y[SOME];
      gumbel(stream_start(seed[b], position[n], 0), nullptr, j, num, y);
      for (int k = 0; k < num; k++) y[k] = x[j + k] / t + y[k];
      found[i] = find_largest(y, 0, num, {found[i].value, found[i].place - j}); found[i].place += j;
    }
  });
  for (int64_t n = 0; n < B * N; n++) {
    Largest best = found[n * pieces];
    for (int64_t p = 1; p < pieces; p++) if (is_more(found[n * pieces + p].value, best.value)) best = found[n * pieces + p];
    out[n] = best.place;
  }
}
}  // namespace STEP
