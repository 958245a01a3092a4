// Layout of everything that crosses the border between Python and the native step. drafter/kernels/native.py holds the
// twins.
//
// A weight matrix [outputs, inputs] lies in blocks of 16 outputs. Inputs are padded with zeros to a multiple of 32,
// outputs to a multiple of 16. Within a block, inputs come in groups of 32. One output is summed over its inputs in one
// order that depends on the matrix alone, so that no other row, block or thread can change a bit of the sum.
//
//   float32, float16   input k of output o: number 16 k + o of the block.
//   bfloat16           inputs in pairs, output by output: input 2 j + i of output o is word 32 j + 2 o + i.
//   integers           as `Type` says. Groups lie together: 16 float16 numbers, 16 more where the format has offsets,
//                      integer scales and offsets, then the integers of each group in one section or two: low bits,
//                      high bits. Byte 64 (j % b) + 4 o + i of a section of b bits holds bits of the input 4 j + i of
//                      output o, for j in 0 .. 7, from bit b (j / b) on.
//
// A weight is scale * (integer - zero) + offset, where scale and offset are float16 numbers, or those times integers,
// of which offsets count downwards. Examples: weight (o = 3, k = 37) of 64 inputs is group 1 of block 0, j = 1, i = 1.
// Q8_0: byte 32 + 64 + 12 + 1 of the group. Q5_0: low half of this byte, and bit 1 of byte 32 + 256 + 12 + 1.
//
// Keys [layer][row][key head][slot / 16][head_dim][slot % 16] and values [layer][row][key head][slot][head_dim] are
// float32, or float16 that was rounded once, when a token was written. The head_dim of values is padded to a multiple
// of 16.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

static inline float from_half(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, size = h & 0x7fff; float x;
  const uint32_t word = sign | ((size << 13) + (size < 0x7c00 ? 112u << 23 : 224u << 23));
  memcpy(&x, &word, 4);
  return size < 0x400 ? (h & 0x8000 ? -1.f : 1.f) * size * 5.9604644775390625e-8f : x;
}
static inline uint16_t to_half(float x) {  // to nearest, ties to even
  uint32_t w; memcpy(&w, &x, 4);
  const uint32_t sign = w >> 16 & 0x8000, size = w & 0x7fffffff;
  if (size < 0x38800000) return (uint16_t)(sign | (uint32_t)nearbyintf(fabsf(x) * 16777216.f));
  return (uint16_t)(sign | (size < 0x477ff000 ? (size + 0xfff + (size >> 13 & 1) - (112u << 23)) >> 13 : 0x7c00));
}
enum Format { F32, BF16, F16, Q4_0, Q4_1, Q4_K, Q8_0, Q5_K, Q6_K, Q5_0, Q5_1, Q2_K, Q3_K, IQ4_NL, IQ4_XS, NUM_FORMATS };
// How a format of integers lies in blocks.
struct Type {
  int low, high;    // bits of an integer in the first section, and in the second
  int zero;         // the integer that stands for 0; a power of 2, or 0
  int scales;       // of a group: one, or one for each 16 inputs
  bool has_offset;  // as many as scales
  int scale_bits;   // of integer scales and offsets; 0: float16 numbers alone
  int groups;       // that lie together
  bool is_table;    // integers are places in TABLE
  constexpr int units() const { return 32 * (1 + has_offset); }  // bytes of float16 numbers
  constexpr int smalls() const { return 16 * groups * scales * (1 + has_offset) * scale_bits / 8; }
  constexpr int integers() const { return 64 * (low + high); }
  constexpr int bytes() const { return low >= 16 ? 64 * low : units() + smalls() + groups * integers(); }
};
// Integer scales and offsets of 16 outputs: number n of group g (its scales, then its offsets) is, for output o, with 8
// bits byte 16 (numbers g + n) + o; with 4 bits a half of byte 16 (2 g + n % 2) + o, the high one for n >= 2; with 6
// bits, plus 32, a half of byte 16 g + o, and two bits of byte 16 (8 + g / 2) + o from bit 4 (g % 2) + 2 n on.
constexpr Type types[NUM_FORMATS] = {
  {32, 0, 0, 0, false, 0, 1, false},   // F32: plain numbers, as BF16 and F16
  {16, 0, 0, 0, false, 0, 1, false},
  {16, 0, 0, 0, false, 0, 1, false},
  {4, 0, 8, 1, false, 0, 1, false},    // Q4_0
  {4, 0, 0, 1, true, 0, 1, false},     // Q4_1
  {4, 0, 0, 1, true, 8, 8, false},     // Q4_K
  {8, 0, 128, 1, false, 0, 1, false},  // Q8_0
  {4, 1, 0, 1, true, 8, 8, false},     // Q5_K
  {4, 2, 32, 2, false, 8, 8, false},   // Q6_K
  {4, 1, 16, 1, false, 0, 1, false},   // Q5_0
  {4, 1, 0, 1, true, 0, 1, false},     // Q5_1
  {2, 0, 0, 2, true, 4, 8, false},     // Q2_K
  {2, 1, 4, 2, false, 6, 8, false},    // Q3_K
  {4, 0, 128, 1, false, 0, 1, true},   // IQ4_NL
  {4, 0, 128, 1, false, 8, 8, true},   // IQ4_XS
};
constexpr int64_t block_bytes(int format, int inputs) {  // of 16 outputs
  return (inputs + 31) / 32 / types[format].groups * (int64_t)types[format].bytes();
}
// What IQ4_NL and IQ4_XS store, plus 128.
constexpr uint8_t TABLE[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
enum NormKind { NO_NORM, RMS_NORM, LAYER_NORM };
enum Activation { SILU, GELU_TANH, GELU, RELU, RELU_SQUARED };
struct Matrix {        // format -1: there is no such matrix
  int32_t format, outputs, inputs;  // outputs and inputs as the model has them, without padding
  int32_t is_rounded;  // integer weights: activations are rounded to 8 bits in groups of 32; 0: they stay float32
  const void* blocks;
  const float* bias;  // [outputs], or null
};
struct Norm {
  int32_t kind, size;  // size: numbers that are normed together (hidden size; head_dim for norms of each head)
  float epsilon;
  const float *weight, *bias;  // [size]; null: ones, zeros. Norms that multiply by 1 + weight have 1 added at loading.
};
struct Rotary {
  int32_t dim, num_positions;  // dim: leading numbers of a head that rotate, half with half
  const float *cosine, *sine;  // [num_positions, dim / 2]
};
struct Layer {
  Matrix qkv[3];                     // query, key, value; or the first has the rows of all three
  Matrix up[2];                      // gate, up; or the first has the rows of both, or of up alone
  Matrix output, down;
  Norm before_attention, after_attention, before_mlp, after_mlp, query, key;
  int32_t rotary;                    // index into the rotations of the cache; -1: the layer rotates nothing
  int32_t window;                    // a token sees itself and the window - 1 positions before; 0: all
};
struct Model {
  int32_t num_layers, hidden_size, num_heads, num_key_heads, head_dim, mlp_size, vocab_size;
  int32_t activation, has_gate;
  float input_scale;       // of embeddings, within the forward
  float attention_scale, attention_cap;  // scores are cap * tanh(score / cap); 0: as they are
  float residual_scale;    // of what attention and MLP add
  const Layer* layers;
  Norm final_norm;
  Matrix head;             // output matrix
};
// What a forward returns.
enum Status { IS_DONE, OUTSIDE, NO_MEMORY, NOT_HALF, NOT_FINITE };  // OUTSIDE: a row or a slot is none of the cache

struct Cache {
  int32_t num_rows, num_slots;  // of a row, a multiple of 16; tokens of the spare slot are neither computed nor written
  int64_t spare_slot;
  void *keys, *values;
  const Rotary* rotaries;       // that reach all positions of the cache
  int32_t is_half;
};
struct Tokens {
  int32_t num_rows, num_tokens, first_row;
  const int64_t *slot, *position;  // [B, T]
  const uint8_t* ancestor;                 // [B, T, T]: [i, j] is 1 where j is i or an ancestor of i; null: causal
};
struct Drafter {       // the recurrent draft head (drafter/models/drafter.py)
  int32_t hidden_size, num_blocks, num_tokens;  // num_tokens: of the draft vocabulary
  float embedding_scale, hidden_scale;
  Matrix cell;                                  // [hidden, 2 hidden] on [embedding; state]
  const Matrix *down, *blocks;                  // [num_blocks]; down: of a low rank, or null
  Matrix head, rows;                            // projection (a tied head), output rows of the draft vocabulary
  const int64_t *token, *index;                 // [num_tokens] target ids; [vocabulary] places in `token`, -1 outside
  const float* log_odds;                        // of a copy, by the length of its match 0 .. MOST_MATCH
  int32_t copies;                               // 0: drafts copy nothing from the text
  const float* embedding;                       // [vocabulary, hidden]; null: rows of embedding_matrix
  const Matrix* embedding_matrix;
  float embedding_matrix_scale;
};
constexpr int MOST_MATCH = 32, MOST_BEAMS = 64;
struct Sampling {      // of rows [B]; a row with temperature 0 samples nothing
  const float* temperature; const int64_t* top_k; const float *top_p, *min_p;  // off: 0, 1, 0
  const int64_t* seed;
};
struct Search {        // for rows 0 .. num_rows - 1: W beams for L steps, then one beam of copies down to the depth
  int32_t num_rows, width, length, depth;
  const int64_t *root, *position;               // [B]; position: of the root in the text
  const float* hidden;                          // [B, hidden]: the context, fused
  const int64_t* text; int64_t text_stride;     // token ids by position
  int64_t *token, *parent; float* score;        // [B, width * length + depth - length]; parent -1: the root
  const Sampling* sampling;                     // null: no row samples
  float noise_weight;                           // of the noise of the target's picks, in rows that sample
  float least;                                  // score below which no node is of use; -inf: all nodes are
};
