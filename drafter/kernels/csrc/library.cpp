// The library's functions, by C's rules of names: packing, and the kernels of this processor.
#include <sys/mman.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <mutex>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kernels.h"
#include "pool.h"
#include "tree.h"

namespace plain { extern const Kernels kernels; }
namespace avx2 { extern const Kernels kernels; }
namespace avx_vnni { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }

#if defined(__x86_64__)
// A bit of CPUID: leaf, subleaf, register (0 = eax), bit. Compilers' own questions differ.
static bool has(unsigned leaf, unsigned subleaf, int reg, int bit) {
  unsigned r[4];
  return __get_cpuid_count(leaf, subleaf, &r[0], &r[1], &r[2], &r[3]) && r[reg] >> bit & 1;
}
static bool keeps(unsigned registers) {  // the system saves these registers
  unsigned low, high;
  if (!has(1, 0, 2, 27)) return false;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & registers) == registers;
}
static bool has_avx2() { return keeps(6) && has(7, 0, 1, 5) && has(1, 0, 2, 12) && has(1, 0, 2, 29); }  // with FMA, F16C
static bool has_avx_vnni() { return has_avx2() && has(7, 1, 0, 4); }
static bool has_avx512() { return has_avx2() && keeps(0xe6) && has(7, 0, 1, 16) && has(7, 0, 1, 17) && has(7, 0, 1, 30) && has(7, 0, 1, 31) && has(7, 0, 2, 11); }
#endif
struct Choice { const char* name; const Kernels* kernels; bool (*is_here)(); };
static const Choice choices[] = {  // best first
#if defined(__x86_64__)
#ifndef WITHOUT_STEP_AVX512
  {"avx512-vnni", &avx512::kernels, has_avx512},
#endif
#ifndef WITHOUT_STEP_AVX_VNNI
  {"avx-vnni", &avx_vnni::kernels, has_avx_vnni},
#endif
#ifndef WITHOUT_STEP_AVX2
  {"avx2", &avx2::kernels, has_avx2},
#endif
#endif
  {"plain", &plain::kernels, [] { return true; }},
};
static const Choice* best() {
  const Choice* c = choices;
  while (!c->is_here()) c++;
  return c;
}
static const Choice* chosen = best();
static std::mutex mutex;  // the pool runs one job at a time

// ---- blocks: see layout.h ----
struct Shape { int scale_bytes, num_scales, has_offset, bytes; };  // of a group of 32 inputs by 16 outputs
static const Shape shapes[NUM_FORMATS] = {
  {0, 0, 0, 2048}, {0, 0, 0, 1024}, {0, 0, 0, 1024}, {2, 1, 0, 256}, {2, 1, 1, 256}, {4, 1, 1, 256}, {2, 1, 0, 512}, {4, 1, 1, 512}, {4, 2, 0, 512}};
static int64_t group_bytes(int format) {
  const Shape& s = shapes[format];
  return 16 * s.scale_bytes * (s.num_scales + s.has_offset) + s.bytes;
}
static float from_half(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, size = h & 0x7fff; float x;
  const uint32_t word = sign | ((size << 13) + (size < 0x7c00 ? 112u << 23 : 224u << 23));
  memcpy(&x, &word, 4);
  return size < 0x400 ? (h & 0x8000 ? -1.f : 1.f) * size * 5.9604644775390625e-8f : x;
}
static uint16_t half_at(const uint8_t* p) { uint16_t h; memcpy(&h, p, 2); return h; }

struct Group { float scale[2], offset; uint16_t scale_half, offset_half; uint8_t q[32]; };  // q as the block stores it
// The scale and the offset of group j (0 .. 7) in the 12 bytes of 6 bits of Q4_K and Q5_K.
static void six_bits(const uint8_t* s, int j, int& scale, int& offset) {
  if (j < 4) { scale = s[j] & 63; offset = s[j + 4] & 63; return; }
  scale = (s[j + 4] & 15) | (s[j - 4] >> 6 << 4); offset = (s[j + 4] >> 4) | (s[j] >> 6 << 4);
}
static Group read_group(int format, const uint8_t* row, long g) {
  Group r{};
  switch (format) {
    case Q4_0: case Q4_1: {
      const uint8_t* b = row + g * (format == Q4_0 ? 18 : 20);
      r.scale_half = half_at(b); b += 2;
      if (format == Q4_1) { r.offset_half = half_at(b); b += 2; }
      for (int i = 0; i < 16; i++) { r.q[i] = b[i] & 15; r.q[i + 16] = b[i] >> 4; }
      break;
    }
    case Q8_0: {
      const uint8_t* b = row + g * 34;
      r.scale_half = half_at(b);
      for (int i = 0; i < 32; i++) r.q[i] = b[2 + i] + 128;
      break;
    }
    case Q4_K: case Q5_K: {  // groups 2 i and 2 i + 1 are the low and the high halves of 32 bytes; Q5_K has a fifth bit each
      const uint8_t* b = row + g / 8 * (format == Q4_K ? 144 : 176); const int j = g % 8; int scale, offset;
      six_bits(b + 4, j, scale, offset);
      r.scale[0] = from_half(half_at(b)) * scale; r.offset = -(from_half(half_at(b + 2)) * offset);
      const uint8_t *low = b + (format == Q4_K ? 16 : 48) + 32 * (j / 2), *high = b + 16;
      for (int i = 0; i < 32; i++) r.q[i] = (low[i] >> (4 * (j % 2)) & 15) + (format == Q5_K ? (high[i] >> j & 1) * 16 + 128 : 0);
      break;
    }
    case Q6_K: {  // half a block: 64 bytes of low halves, 32 bytes with two high bits of four inputs each
      const uint8_t* b = row + g / 8 * 210; const int h = g % 8 / 4, j = g % 4;
      const float unit = from_half(half_at(b + 208)); const int8_t* scale = (const int8_t*)b + 192 + 8 * h + 2 * j;
      r.scale[0] = unit * scale[0]; r.scale[1] = unit * scale[1];
      for (int i = 0; i < 32; i++) r.q[i] = (b[64 * h + 32 * (j % 2) + i] >> (4 * (j / 2)) & 15) + (b[128 + 32 * h + i] >> (2 * j) & 3) * 16 - 32 + 128;
      break;
    }
  }
  return r;
}
static float read_float(int format, const uint8_t* row, long k) {
  if (format == F32) { float x; memcpy(&x, row + 4 * k, 4); return x; }
  if (format == F16) return from_half(half_at(row + 2 * k));
  const uint32_t word = (uint32_t)half_at(row + 2 * k) << 16; float x; memcpy(&x, &word, 4); return x;
}
static uint16_t to_bfloat16(float x) {  // to nearest, ties to even
  uint32_t w; memcpy(&w, &x, 4);
  if ((w & 0x7fffffff) > 0x7f800000) return (uint16_t)(w >> 16 | 64);
  return (uint16_t)((w + 0x7fff + (w >> 16 & 1)) >> 16);
}

static uint16_t to_half(float x) {  // 0 .. 65504, to nearest, ties to even
  if (x < 6.103515625e-5f) return (uint16_t)nearbyintf(x * 16777216.f);
  uint32_t w; memcpy(&w, &x, 4);
  return (uint16_t)((w + 0xfff + (w >> 13 & 1) - (112u << 23)) >> 13);
}
static Group round_group(int source, const uint8_t* row, long g, long inputs) {  // to 8 bits, as Q8_0; what is no number becomes 0
  Group r{}; float v[32], most = 0;
  for (int i = 0; i < 32; i++) {
    v[i] = 32 * g + i < inputs ? read_float(source, row, 32 * g + i) : 0;
    if (!(fabsf(v[i]) < INFINITY)) v[i] = 0;
    most = fabsf(v[i]) > most ? fabsf(v[i]) : most;
  }
  r.scale_half = to_half(fminf(fmaxf(most / 127, 1e-7f), 65504));
  const float scale = from_half(r.scale_half), whole = 12582912;  // 1.5 * 2^23: a float of this size has no digits behind the point
  for (int i = 0; i < 32; i++) { const float n = v[i] / scale + whole - whole; r.q[i] = (uint8_t)(128 + (int)(n < -127 ? -127 : n > 127 ? 127 : n)); }
  return r;
}

struct Packing {
  int format, source, outputs, inputs; const uint8_t* const* rows; uint8_t* blocks;
  void block(int number) const {
    const long groups = (inputs + 31) / 32, bytes = group_bytes(format); uint8_t* to = blocks + number * groups * bytes;
    memset(to, 0, groups * bytes);
    if (shapes[format].bytes == 512) for (long g = 0; g < groups; g++) memset(to + (g + 1) * bytes - 512, 128, 512);  // zeros
    for (int o = 0; o < 16 && 16 * number + o < outputs; o++) {
      const uint8_t* row = rows[16 * number + o];
      if (format <= F16) {
        for (long k = 0; k < inputs; k++) {
          if (format == F32) { const float x = read_float(source, row, k); memcpy(to + 64 * k + 4 * o, &x, 4); }
          else { const uint16_t h = source == format ? half_at(row + 2 * k) : to_bfloat16(read_float(source, row, k)); memcpy(to + (format == F16 ? 32 * k + 2 * o : k / 2 * 64 + 4 * o + k % 2 * 2), &h, 2); }
        }
        continue;
      }
      const Shape& s = shapes[format];
      for (long g = 0; g < groups; g++) {
        const Group r = source <= F16 ? round_group(source, row, g, inputs) : read_group(format, row, g); uint8_t* b = to + g * bytes;
        if (s.scale_bytes == 2) { memcpy(b + 2 * o, &r.scale_half, 2); if (s.has_offset) memcpy(b + 32 + 2 * o, &r.offset_half, 2); }
        else { for (int i = 0; i < s.num_scales; i++) memcpy(b + 64 * i + 4 * o, &r.scale[i], 4); if (s.has_offset) memcpy(b + 64 * s.num_scales + 4 * o, &r.offset, 4); }
        b += bytes - s.bytes;
        for (int k = 0; k < 32; k++) {
          if (s.bytes == 512) b[k / 4 * 64 + 4 * o + k % 4] = r.q[k];
          else b[k % 16 / 4 * 64 + 4 * o + k % 4] |= k < 16 ? r.q[k] : r.q[k] << 4;
        }
      }
    }
  }
};

// Memory that nobody has written yet comes in pages of 2 MiB where it can: a step reads all weights, and small pages would
// cost a look-up for every 4 KiB.
static void ask_for_huge_pages(void* start, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t page = 4096, first = ((uintptr_t)start + page - 1) / page * page, end = ((uintptr_t)start + bytes) / page * page;
  if (end > first) madvise((void*)first, end - first, MADV_HUGEPAGE);
#endif
}

// Whether rows and slots are those of the cache: the step reads and writes where it is told.
static bool are_slots(const Cache& c, int64_t first_row, int num_rows, const int64_t* slot, long num) {
  bool are = first_row >= 0 && first_row + num_rows <= c.num_rows;
  for (long i = 0; i < num; i++) are = are && slot[i] >= 0 && slot[i] <= c.spare_slot;
  return are;
}

extern "C" {
const char* instructions() { return chosen->name; }
int use_instructions(const char* name) {
  for (const Choice& c : choices) if (!strcmp(c.name, name) && c.is_here()) { chosen = &c; return 1; }
  return 0;
}
void set_num_threads(int n) { std::lock_guard<std::mutex> lock(mutex); pool.set_num_threads(n); }
int64_t block_bytes(int format, int outputs, int inputs) { return (outputs + 15) / 16 * (int64_t)((inputs + 31) / 32) * group_bytes(format); }
void pack(int format, int source, int outputs, int inputs, const void* const* rows, void* blocks) {
  std::lock_guard<std::mutex> lock(mutex);
  ask_for_huge_pages(blocks, block_bytes(format, outputs, inputs));
  Packing packing{format, source, outputs, inputs, (const uint8_t* const*)rows, (uint8_t*)blocks};
  pool.share((outputs + 15) / 16, [&](int i) { packing.block(i); });
}
void unpack_rows(const Matrix* m, int num, const int64_t* row, float* out) { chosen->kernels->unpack_rows(*m, num, row, out); }
void multiply(const Matrix* m, int num_rows, const float* x, float* y) { std::lock_guard<std::mutex> lock(mutex); chosen->kernels->multiply(*m, num_rows, x, y); }
int forward(const Model* m, const Cache* c, const Tokens* t, const float* embedding, float* hidden, int num_states, const int32_t* layers, float* states) {
  const long num = (long)t->num_rows * t->num_tokens;
  if (!are_slots(*c, t->first_row, t->num_rows, t->slot, num)) return 0;
  for (long i = 0; i < num; i++) if (t->position[i] > t->slot[i] && t->slot[i] != c->spare_slot) return 0;
  std::lock_guard<std::mutex> lock(mutex);
  chosen->kernels->forward(*m, *c, *t, embedding, hidden, num_states, layers, states);
  return 1;
}
void search(const Drafter* d, const Search* s) { std::lock_guard<std::mutex> lock(mutex); chosen->kernels->search(*d, *s); }
void noise(int B, int T, int64_t M, uint64_t stream, const int64_t* seed, const int64_t* position, const int64_t* token, int64_t stride, float* out) {
  std::lock_guard<std::mutex> lock(mutex);
  chosen->kernels->noise(B, T, M, stream, seed, position, token, stride, out);
}
void pick(int B, int N, int64_t V, const float* logits, const Sampling* sampling, const int64_t* position, int64_t* out) {
  std::lock_guard<std::mutex> lock(mutex);
  chosen->kernels->pick(B, N, V, logits, sampling, position, out);
}
void pack_nodes(int B, int M, int N, const int64_t* root, const int64_t* token, const int64_t* parent, const int64_t* depth, const float* score,
                int64_t* to_token, int64_t* to_parent, int64_t* to_depth, uint8_t* to_is_node) {
  for (long b = 0; b < B; b++)
    pack_row(M, N, root[b], token + b * M, parent + b * M, depth + b * M, score + b * M, {to_token + b * N, to_parent + b * N, to_depth + b * N, to_is_node + b * N});
}
void accept_picks(int B, int N, int L, int64_t* token, int64_t* parent, uint8_t* is_node, const int64_t* pick, int64_t* path, int64_t* num_accepted, int64_t* bonus) {
  for (long b = 0; b < B; b++)
    accept_row(N, L, {token + b * N, parent + b * N, nullptr, is_node + b * N}, pick + b * N, path + b * (L + 1), num_accepted + b, bonus + b);
}
int move_slots(const Model* m, const Cache* c, int num_rows, int num, const int64_t* source, const int64_t* destination) {
  const long all = (long)num_rows * num;
  if (!are_slots(*c, 0, num_rows, source, all) || !are_slots(*c, 0, num_rows, destination, all)) return 0;
  const long dim = m->head_dim, wide = (dim + 15) / 16 * 16;
  float* held = (float*)malloc(4 * num * (dim + wide));
  for (int b = 0; b < num_rows; b++) {
    const int64_t *from = source + (long)b * num, *to = destination + (long)b * num;
    for (long i = 0; i < (long)m->num_layers * m->num_key_heads; i++) {
      const long first = ((i / m->num_key_heads * c->num_rows + b) * m->num_key_heads + i % m->num_key_heads) * c->num_slots;
      float *keys = c->keys + first * dim, *values = c->values + first * wide;
      for (int l = 0; l < num; l++) {
        for (long d = 0; d < dim; d++) held[l * dim + d] = keys[from[l] / 16 * 16 * dim + 16 * d + from[l] % 16];
        memcpy(held + num * dim + l * wide, values + from[l] * wide, 4 * wide);
      }
      for (int l = 0; l < num; l++) {
        for (long d = 0; d < dim; d++) keys[to[l] / 16 * 16 * dim + 16 * d + to[l] % 16] = held[l * dim + d];
        memcpy(values + to[l] * wide, held + num * dim + l * wide, 4 * wide);
      }
    }
  }
  free(held);
  return 1;
}
}
