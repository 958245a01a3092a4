// The library's functions, by C's rules of names: packing, and the kernels of this processor.
#include <pthread.h>
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <mutex>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kernels.h"
#include "pool.h"
#include "tree.h"

// Kernels that the compiler did not know have no address.
namespace plain { extern const Kernels kernels; }
namespace avx2 { extern const Kernels kernels __attribute__((weak)); }
namespace avx_vnni { extern const Kernels kernels __attribute__((weak)); }
namespace avx512 { extern const Kernels kernels __attribute__((weak)); }

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
static bool has_avx2() { return keeps(6) && has(7, 0, 1, 5) && has(1, 0, 2, 12) && has(1, 0, 2, 29); }
static bool has_avx_vnni() { return has_avx2() && has(7, 1, 0, 4); }
static bool has_avx512() {
  const bool rest = has(7, 0, 1, 16) && has(7, 0, 1, 17) && has(7, 0, 1, 30) && has(7, 0, 1, 31) && has(7, 0, 2, 11);
  return has_avx2() && keeps(0xe6) && rest;
}
#endif
struct Choice {
  const char* name; const Kernels* kernels; bool (*runs)();
  bool is_here() const { return kernels && runs(); }
};
static const Choice choices[] = {  // best first
#if defined(__x86_64__)
  {"avx512-vnni", &avx512::kernels, has_avx512}, {"avx-vnni", &avx_vnni::kernels, has_avx_vnni},
  {"avx2", &avx2::kernels, has_avx2},
#endif
  {"plain", &plain::kernels, [] { return true; }},
};
static const Choice* best() {
  const Choice* c = choices; while (!c->is_here()) c++;
  return c;
}
static const Choice* chosen = best();
static std::mutex mutex;  // the pool runs one job at a time

static uint16_t half_at(const uint8_t* p) { uint16_t h; memcpy(&h, p, 2); return h; }

// 32 inputs of an output, as a block stores them: float16 numbers, integer scales and then offsets, integers.
struct Group { uint16_t scale, offset; int small[4]; uint8_t q[32]; };
// Bits `from` .. from + width - 1 of 32 bytes, as the bits from `to` on of the integers.
static void add_bits(Group& r, const uint8_t* bytes, int from, int width, int to) {
  const uint64_t mask = ((1u << width) - 1) * 0x0101010101010101ull;
  for (int i = 0; i < 32; i += 8) {
    uint64_t w, q; memcpy(&w, bytes + i, 8); memcpy(&q, r.q + i, 8);
    q |= (w >> from & mask) << to; memcpy(r.q + i, &q, 8);
  }
}
// The scale and the offset of group j (0 .. 7) in the 12 bytes of 6 bits of Q4_K and Q5_K.
static void six_bits(const uint8_t* s, int j, int* small) {
  if (j < 4) { small[0] = s[j] & 63; small[1] = s[j + 4] & 63; return; }
  small[0] = (s[j + 4] & 15) | (s[j - 4] >> 6 << 4); small[1] = (s[j + 4] >> 4) | (s[j] >> 6 << 4);
}
template <int format> static Group read_group(const uint8_t* row, long g) {
  Group r{};
  const int j = g % 8;  // of 256 inputs
  switch (format) {
    case Q4_0: case Q4_1: case Q5_0: case Q5_1: case IQ4_NL: {  // 16 bytes with two integers each
      const bool has_offset = types[format].has_offset, has_fifth = types[format].high > 0;
      const uint8_t* b = row + g * (18 + 2 * has_offset + 4 * has_fifth);
      const uint8_t *fifth = b + 2 + 2 * has_offset, *q = fifth + 4 * has_fifth;
      r.scale = half_at(b);
      if (has_offset) r.offset = half_at(b + 2);
      for (int i = 0; i < 32; i++)
        r.q[i] = (q[i % 16] >> (i / 16 * 4) & 15) | (has_fifth ? (fifth[i / 8] >> (i % 8) & 1) << 4 : 0);
      break;
    }
    case Q8_0: {
      const uint8_t* b = row + g * 34;
      r.scale = half_at(b);
      for (int i = 0; i < 32; i++) r.q[i] = b[2 + i] + 128;
      break;
    }
    case Q4_K: case Q5_K: {  // groups 2 i and 2 i + 1 are the low and the high halves of 32 bytes
      const uint8_t* b = row + g / 8 * (format == Q4_K ? 144 : 176);
      r.scale = half_at(b); r.offset = half_at(b + 2);
      six_bits(b + 4, j, r.small);
      const uint8_t *low = b + (format == Q4_K ? 16 : 48) + 32 * (j / 2), *high = b + 16;
      add_bits(r, low, 4 * (j % 2), 4, 0);
      if (format == Q5_K) add_bits(r, high, j, 1, 4);
      break;
    }
    case Q6_K: {  // half a block: 64 bytes of low halves, 32 bytes with two high bits of four inputs each
      const uint8_t *b = row + g / 8 * 210, *low = b + 64 * (j / 4) + 32 * (j % 2), *high = b + 128 + 32 * (j / 4);
      r.scale = half_at(b + 208);
      for (int h = 0; h < 2; h++) r.small[h] = b[192 + 2 * j + h];
      add_bits(r, low, 4 * (j % 4 / 2), 4, 0); add_bits(r, high, 2 * (j % 4), 2, 4);
      break;
    }
    case Q2_K: {  // 16 bytes with a scale and an offset for 16 inputs each; a byte has two bits of four groups
      const uint8_t *b = row + g / 8 * 84, *q = b + 16 + 32 * (j / 4);
      r.scale = half_at(b + 80); r.offset = half_at(b + 82);
      for (int h = 0; h < 2; h++) { r.small[h] = b[2 * j + h] & 15; r.small[2 + h] = b[2 * j + h] >> 4; }
      add_bits(r, q, 2 * (j % 4), 2, 0);
      break;
    }
    case Q3_K: {  // 32 bytes of third bits, 64 of two bits, 12 of scales
      const uint8_t *b = row + g / 8 * 110, *q = b + 32 + 32 * (j / 4), *s = b + 96;
      r.scale = half_at(b + 108);
      for (int h = 0; h < 2; h++) {
        const int n = 2 * j + h;
        r.small[h] = (s[n % 8] >> (n / 8 * 4) & 15) | (s[8 + n % 4] >> (n / 4 * 2) & 3) << 4;
      }
      add_bits(r, q, 2 * (j % 4), 2, 0); add_bits(r, b, j, 1, 2);
      break;
    }
    case IQ4_XS: {  // two bytes of high bits of scales, four of low bits
      const uint8_t *b = row + g / 8 * 136, *q = b + 8 + 16 * j;
      r.scale = half_at(b);
      r.small[0] = ((b[4 + j / 2] >> (4 * (j % 2)) & 15) | (half_at(b + 2) >> (2 * j) & 3) << 4) - 32;
      for (int i = 0; i < 32; i++) r.q[i] = q[i % 16] >> (i / 16 * 4) & 15;
      break;
    }
  }
  return r;
}
// Group g of output o to its place in the block that begins at `to`.
template <int format> static void write_group(const Group& r, long g, int o, uint8_t* to) {
  constexpr Type t = types[format];
  uint8_t* b = to + (t.groups == 8 ? g / 8 : g) * t.bytes();
  const int i = t.groups == 8 ? g % 8 : 0, num = t.scales * (1 + t.has_offset);
  memcpy(b + 2 * o, &r.scale, 2);
  if (t.has_offset) memcpy(b + 32 + 2 * o, &r.offset, 2);
  uint8_t* s = b + t.units() + o;
  for (int n = 0; n < num; n++) {
    if (t.scale_bits == 8) s[16 * (num * i + n)] = r.small[n];
    if (t.scale_bits == 4) s[16 * (2 * i + n % 2)] |= r.small[n] << (n / 2 * 4);
    if (t.scale_bits == 6) {
      s[16 * i] |= (r.small[n] & 15) << (4 * n);
      s[16 * (8 + i / 2)] |= r.small[n] >> 4 << (i % 2 * 4 + 2 * n);
    }
  }
  uint8_t* q = b + t.units() + t.smalls() + i * t.integers() + 4 * o;
  uint32_t words[8]; memcpy(words, r.q, 32);
  auto put = [&](int width, int from, uint8_t* section) {  // four inputs a word
    const uint32_t mask = ((1u << width) - 1) * 0x01010101u;
    for (int n = 0; n < width; n++) {
      uint32_t all = 0;
      for (int j = n, to = 0; j < 8; j += width, to += width) all |= (words[j] >> from & mask) << to;  // no division
      memcpy(section + 64 * n, &all, 4);
    }
  };
  put(t.low, 0, q);
  if (t.high) put(t.high, t.low, q + 64 * t.low);
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
// As Q4_0. There is a -8 and no 8, so a scale is negative where the largest number is positive. No number: 0.
static Group round_group(int source, const uint8_t* row, long g, long inputs) {
  Group r{}; float v[32], most = 0;
  for (int i = 0; i < 32; i++) {
    v[i] = 32 * g + i < inputs ? read_float(source, row, 32 * g + i) : 0;
    if (!(fabsf(v[i]) < INFINITY)) v[i] = 0;
    most = fabsf(v[i]) > fabsf(most) ? v[i] : most;
  }
  const float size = fminf(fmaxf(fabsf(most) / 8, 1e-7f), 65504);
  r.scale = to_half(most > 0 ? -size : size);
  const float scale = from_half(r.scale), whole = 12582912;  // 1.5 * 2^23: no digits behind the point
  for (int i = 0; i < 32; i++)
    r.q[i] = (uint8_t)(8 + (int)fminf(fmaxf(v[i] / scale + whole - whole, -8), 7));
  return r;
}
template <int F> void groups(int format, int source, int num, int inputs, const uint8_t* const* row, uint8_t* to) {
  if constexpr (F + 1 < NUM_FORMATS) { if (format > F) return groups<F + 1>(format, source, num, inputs, row, to); }
  for (long g = 0; g < (inputs + 31) / 32; g++)
    for (int o = 0; o < num; o++)
      write_group<F>(source <= F16 ? round_group(source, row[o], g, inputs) : read_group<F>(row[o], g), g, o, to);
}
// A block of `num` rows that lie anywhere.
static void pack_block(int format, int source, int num, int inputs, const uint8_t* const* row, uint8_t* to) {
  memset(to, 0, block_bytes(format, inputs));
  for (long k = 0; format <= F16 && k < inputs; k++)
    for (int o = 0; o < num; o++) {
      if (format == F32) { float x = read_float(source, row[o], k); memcpy(to + 64 * k + 4 * o, &x, 4); continue; }
      const uint16_t h = source == format ? half_at(row[o] + 2 * k) : to_bfloat16(read_float(source, row[o], k));
      memcpy(to + (format == F16 ? 32 * k + 2 * o : k / 2 * 64 + 4 * o + k % 2 * 2), &h, 2);
    }
  if (format > F16) groups<F16 + 1>(format, source, num, inputs, row, to);
}
// Memory that nobody has written yet comes in pages of 2 MiB where it can: small pages cost a look-up for every 4 KiB.
static void ask_for_huge_pages(void* start, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t page = 4096, at = (uintptr_t)start;
  const uintptr_t first = (at + page - 1) / page * page, end = (at + bytes) / page * page;
  if (end > first) madvise((void*)first, end - first, MADV_HUGEPAGE);
#endif
}
// Whether rows and slots are those of the cache: the step reads and writes where it is told.
static bool are_slots(const Cache& c, int64_t first_row, int num_rows, const int64_t* slot, long num) {
  bool are = first_row >= 0 && first_row + num_rows <= c.num_rows;
  for (long i = 0; i < num; i++) are = are && slot[i] >= 0 && slot[i] <= c.spare_slot;
  return are;
}
template <class T>
static int move(const Model& m, const Cache& c, int num_rows, int num, const int64_t* from, const int64_t* to) {
  const long dim = m.head_dim, wide = (dim + 15) / 16 * 16, layer = (long)m.num_key_heads * c.num_rows;
  std::vector<T> held(num * (dim + wide));
  for (long i = 0; i < m.num_layers * layer; i++) {  // the key heads of a row of a layer
    const long row = i % layer / m.num_key_heads;
    T *keys = (T*)c.keys + i * c.num_slots * dim, *values = (T*)c.values + i * c.num_slots * wide;
    auto copy = [&](const int64_t* slot, bool reads) {
      for (int l = 0; l < num; l++) {
        T *key = keys + slot[l] / 16 * 16 * dim + slot[l] % 16, *value = values + slot[l] * wide;
        T* own = &held[l * (dim + wide)];
        for (long d = 0; d < dim; d++) (reads ? own[d] : key[16 * d]) = reads ? key[16 * d] : own[d];
        memcpy(reads ? own + dim : value, reads ? value : own + dim, sizeof(T) * wide);
      }
    };
    if (row < num_rows) { copy(from + row * num, true); copy(to + row * num, false); }
  }
  return IS_DONE;
}
// One call at a time; memory that ran out is a status, in whichever thread.
template <class W> static int alone(W work) {
  std::lock_guard<std::mutex> lock(mutex);
  try { return work(); } catch (const std::bad_alloc&) { return NO_MEMORY; }
}
static void give_back_all(bool is_lost) { for (auto& c : choices) if (c.is_here()) c.kernels->give_back(is_lost); }
static void begin_again() { new (&mutex) std::mutex; pool.begin_again(); give_back_all(true); }
static const int registered = pthread_atfork(nullptr, nullptr, begin_again);

extern "C" {
const char* sources = SOURCES;  // their digest (setup.py)
const char* instructions() { return chosen->name; }
int use_instructions(const char* name) {
  for (const Choice& c : choices) if (!strcmp(c.name, name) && c.is_here()) { chosen = &c; return 1; }
  return 0;
}
void give_back() { alone([] { give_back_all(false); return IS_DONE; }); }
void set_num_threads(int n) { std::lock_guard<std::mutex> lock(mutex); pool.set_num_threads(n); }
int64_t matrix_bytes(int format, int outputs, int inputs) { return (outputs + 15) / 16 * block_bytes(format, inputs); }
int pack(int format, int source, int outputs, int inputs, const void* const* rows, void* blocks) {
  ask_for_huge_pages(blocks, matrix_bytes(format, outputs, inputs));
  std::atomic<int> status{IS_DONE};
  auto work = [&](int i) {
    uint8_t *to = (uint8_t*)blocks + i * block_bytes(format, inputs), *end = to + block_bytes(format, inputs);
    pack_block(format, source, std::min(16, outputs - 16 * i), inputs, (const uint8_t* const*)rows + 16 * i, to);
    for (; format > F16 && to < end; to += types[format].bytes())
      for (int n = 0; n < types[format].units(); n += 2) if ((half_at(to + n) & 0x7c00) == 0x7c00) status = NOT_FINITE;
  };
  return alone([&] { pool.share((outputs + 15) / 16, work); return status.load(); });
}
int unpack_rows(const Matrix* m, int num, const int64_t* row, float* out) {
  return chosen->kernels->unpack_rows(*m, num, row, out);
}
int multiply(const Matrix* m, int num_rows, const float* x, float* y) {
  return alone([&] { return chosen->kernels->multiply(*m, num_rows, x, y); });
}
int forward(const Model* m, const Cache* c, const Tokens* t, const float* embedding, float* hidden, int num_states,
    const int32_t* layers, float* states) {
  const long num = (long)t->num_rows * t->num_tokens;
  if (!are_slots(*c, t->first_row, t->num_rows, t->slot, num)) return OUTSIDE;
  for (long i = 0; i < num; i++)
    if ((t->position[i] < 0 || t->position[i] > t->slot[i]) && t->slot[i] != c->spare_slot) return OUTSIDE;
  return alone([&] { return chosen->kernels->forward(*m, *c, *t, embedding, hidden, num_states, layers, states); });
}
int search(const Drafter* d, const Search* s) {
  return alone([&] { chosen->kernels->search(*d, *s); return IS_DONE; });
}
int noise(int B, int T, int64_t M, uint64_t stream, const int64_t* seed, const int64_t* position,
    const int64_t* token, int64_t stride, float* out) {
  return alone([&] { chosen->kernels->noise(B, T, M, stream, seed, position, token, stride, out); return IS_DONE; });
}
int pick(int B, int N, int64_t V, const float* logits, const Sampling* s, const int64_t* position, int64_t* out) {
  return alone([&] { chosen->kernels->pick(B, N, V, logits, s, position, out); return IS_DONE; });
}
int pack_nodes(int B, int M, int N, const int64_t* root, const int64_t* token, const int64_t* parent,
    const int64_t* depth, const float* score, int64_t* to_token, int64_t* to_parent, int64_t* to_depth,
    uint8_t* to_is_node) {
  return alone([&] {
    for (long b = 0; b < B; b++)
      pack_row(M, N, root[b], token + b * M, parent + b * M, depth + b * M, score + b * M,
          {to_token + b * N, to_parent + b * N, to_depth + b * N, to_is_node + b * N});
    return IS_DONE;
  });
}
void accept_picks(int B, int N, int L, int64_t* token, int64_t* parent, uint8_t* is_node, const int64_t* pick,
    int64_t* path, int64_t* num_accepted, int64_t* bonus) {
  for (long b = 0; b < B; b++)
    accept_row(N, L, {token + b * N, parent + b * N, nullptr, is_node + b * N}, pick + b * N, path + b * (L + 1),
        num_accepted + b, bonus + b);
}
int move_slots(const Model* m, const Cache* c, int num_rows, int num, const int64_t* from, const int64_t* to) {
  const long all = (long)num_rows * num;
  if (!are_slots(*c, 0, num_rows, from, all) || !are_slots(*c, 0, num_rows, to, all)) return OUTSIDE;
  return alone([&] { return (c->is_half ? move<uint16_t> : move<float>)(*m, *c, num_rows, num, from, to); });
}
}
