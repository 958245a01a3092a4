// Vectors of the instruction set that a file is compiled for: LANES numbers of 32 bits, and what C++ cannot say of
// them. Each file that includes these headers defines STEP, the namespace of its instruction set.
#pragma once
#include <cmath>
#include <initializer_list>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "layout.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace STEP {
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int BLOCK = 16, STRIPS = BLOCK / LANES;  // outputs of a block of weights; vectors of one block
typedef float F __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t Wrapping __attribute__((vector_size(4 * LANES)));
typedef F AnyF __attribute__((aligned(4), may_alias));
typedef I AnyI __attribute__((aligned(4), may_alias));
#define UNROLL _Pragma("GCC unroll 16")
#if defined(__AVX2__)
#define UNROLL_PRODUCTS UNROLL
#else
#define UNROLL_PRODUCTS _Pragma("GCC unroll 1")  // a product of bytes is a loop itself
#endif
#define APART static __attribute__((noinline))  // a loop whose registers are chosen for itself
#define INLINE static inline __attribute__((always_inline))

// Templates of std:: carry this namespace in their names by their allocator, so that no linker takes another file's
// copy of one.
template <class T> struct Own {
  typedef T value_type;
  Own() = default; template <class U> Own(const Own<U>&) {}
  T* allocate(size_t n) { return (T*)::operator new(n * sizeof(T)); }
  void deallocate(T* p, size_t) { ::operator delete(p); }
  friend bool operator==(Own, Own) { return true; } friend bool operator!=(Own, Own) { return false; }
};
template <class T> using Vector = std::vector<T, Own<T>>;
template <class T> INLINE constexpr T lesser(T a, T b) { return a < b ? a : b; }
template <class T> INLINE constexpr T bigger(T a, T b) { return a < b ? b : a; }
INLINE F load(const float* p) { return *(const AnyF*)p; }
INLINE I load(const void* p) { return *(const AnyI*)p; }
INLINE void store(float* p, F x) { *(AnyF*)p = x; }
template <class V, class T> INLINE V load_some(const T* p, int64_t num, V v = V{}) {  // v: of the lanes behind the end
  if (num * sizeof(T) >= sizeof(V)) memcpy(&v, p, sizeof(V)); else memcpy(&v, p, num * sizeof(T));
  return v;
}
INLINE I all(int32_t x) { return I{} + x; }
INLINE F bits(I x) { return (F)x; }
INLINE F number(I x) { return __builtin_convertvector(x, F); }
template <class V> INLINE V pinned(V x) {  // numbers that are loaded first leave no registers for sums
#if defined(__x86_64__)
  __asm__ volatile("" : "+v"(x));
#endif
  return x;
}
INLINE void prefetch(const char* p, int bytes) { for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + i); }

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
INLINE F all(float x) { return (F)_mm512_set1_ps(x); }  // `F{} + x` would add for each: -0 becomes 0 by that
INLINE F fma(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE F greater(F a, F b) { return (F)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE I round(F x) { return (I)_mm512_cvtps_epi32((__m512)x); }
INLINE F half(const uint16_t* p) { return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE I bytes(const char* p) { return (I)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }  // signed
INLINE I look_up(const uint8_t* table, I v) {  // 16 bytes, by each byte of v
  return (I)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), (__m512i)v);
}
// Four products of unsigned by signed bytes are added to each lane.
INLINE I dot4(I sum, I u, I s) { return (I)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)u, (__m512i)s); }
INLINE void store_bytes(int8_t* p, I x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8((__m512i)x)); }
#elif defined(__AVX2__)
INLINE F all(float x) { return (F)_mm256_set1_ps(x); }
INLINE F fma(F a, F b, F c) { return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE F greater(F a, F b) { return (F)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE I round(F x) { return (I)_mm256_cvtps_epi32((__m256)x); }
INLINE F half(const uint16_t* p) { return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE I bytes(const char* p) { return (I)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
INLINE I look_up(const uint8_t* table, I v) {
  return (I)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table)), (__m256i)v);
}
#if defined(__AVXVNNI__)
INLINE I dot4(I sum, I u, I s) { return (I)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)u, (__m256i)s); }
#endif
INLINE void store_bytes(int8_t* p, I x) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
}
#else
INLINE F all(float x) { F y; for (int i = 0; i < LANES; i++) y[i] = x; return y; }
INLINE F fma(F a, F b, F c) { return a * b + c; }
INLINE F greater(F a, F b) { return a > b ? a : b; }
INLINE I round(F x) { I y; for (int i = 0; i < LANES; i++) y[i] = (int32_t)nearbyintf(x[i]); return y; }
INLINE void store_bytes(int8_t* p, I x) { for (int i = 0; i < LANES; i++) p[i] = (int8_t)x[i]; }
INLINE I dot4(I sum, I u, I s) {
  const uint8_t* a = (const uint8_t*)&u; const int8_t* b = (const int8_t*)&s; Wrapping n = (Wrapping)sum;
  for (int i = 0; i < 4 * LANES; i++) n[i / 4] += a[i] * b[i];
  return (I)n;
}
INLINE I bytes(const char* p) { I x; for (int i = 0; i < LANES; i++) x[i] = (int8_t)p[i]; return x; }
INLINE I look_up(const uint8_t* table, I v) {
  uint8_t* b = (uint8_t*)&v;
  for (int i = 0; i < 4 * LANES; i++) b[i] = table[b[i]];
  return v;
}
INLINE F half(const uint16_t* p) { F x; for (int i = 0; i < LANES; i++) x[i] = from_half(p[i]); return x; }
#endif

INLINE F numbers(const float* p) { return load(p); }
INLINE F numbers(const uint16_t* p) { return half(p); }
INLINE float sum(F x) {  // of all lanes, in one order
  float v[LANES]; store(v, x);
  for (int n = LANES / 2; n; n /= 2) for (int i = 0; i < n; i++) v[i] += v[i + n];
  return v[0];
}
INLINE int32_t sum(I x) {
  uint32_t n = 0;
  UNROLL for (int i = 0; i < LANES; i++) n += x[i];
  return (int32_t)n;
}
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
INLINE float largest(F x) { return _mm512_reduce_max_ps((__m512)x); }
#else
INLINE float largest(F x) {
  float v[LANES]; store(v, x);
  for (int i = 1; i < LANES; i++) v[0] = v[i] > v[0] ? v[i] : v[0];
  return v[0];
}
#endif
INLINE F exponential(F x) {  // relative error below 2e-7; 0 below -87; what is no number stays so
  const I is_tiny = x < -87.f;
  x = greater(all(-87.f), x); x = x > 88.f ? all(88.f) : x;
  const I n = round(x * 1.44269504f); const F k = number(n);
  F r = fma(k, all(-0.693145752f), x); r = fma(k, all(-1.42860677e-6f), r);
  F p = all(1.f / 720);
  for (float c : {1.f / 120, 1.f / 24, 1.f / 6, .5f, 1.f, 1.f}) p = fma(p, r, all(c));
  p = bits((I)p + (n << 23));
  return is_tiny ? F{} : p;
}
INLINE F hyperbolic_tangent(F x) {  // near 0 by its series, which keeps the digits that 1 - 2 / (e^2x + 1) loses
  const F t = 1.f - 2.f / (exponential(x + x) + 1.f), s = x * x;
  const F near_0 = x * (1.f + s * (-1.f / 3 + s * (2.f / 15 - s * (17.f / 315))));
  return (s < 0.01f) ? near_0 : t;
}
struct Flush {  // Numbers below 1e-38 count as zero in this scope: attention makes many, each costs 150 cycles.
#if defined(__x86_64__)
  unsigned before = _mm_getcsr();
  Flush() { _mm_setcsr(before | 0x8040); }
  ~Flush() { _mm_setcsr(before); }
#endif
};
}  // namespace STEP
