// A decoder over some tokens: the parts of a layer, shared out to the threads of the pool.
#pragma once
#include "attention.h"
#include "kernels.h"
#include "pool.h"

namespace STEP {
INLINE F apply(int activation, F x) {
  switch (activation) {
    case SILU: return x / (exponential(-x) + 1.f);
    case GELU_TANH: return 0.5f * x * (hyperbolic_tangent(0.7978845608f * (x + 0.044715f * x * x * x)) + 1.f);
    case GELU: { F y; for (int i = 0; i < LANES; i++) y[i] = .5f * x[i] * (1 + erff(x[i] * .70710678f)); return y; }
    case RELU: return greater(x, F{});
    default: { const F y = greater(x, F{}); return y * y; }
  }
}
static void activate(int activation, const float* x, const float* factor, long size, float* y) {  // y may be x
  for (long i = 0; i < size; i += LANES) {
    F v = apply(activation, load_some<F>(x + i, size - i));
    if (factor) v *= load_some<F>(factor + i, size - i);
    if (size - i >= LANES) store(y + i, v); else memcpy(y + i, &v, 4 * (size - i));
  }
}
static float sum_of(const float* x, int size, float minus, bool is_squared) {
  F s{}; int i = 0;
  for (; i + LANES <= size; i += LANES) { const F v = load(x + i) - minus; s = is_squared ? fma(v, v, s) : s + v; }
  float total = sum(s);
  for (; i < size; i++) { const float v = x[i] - minus; total += is_squared ? v * v : v; }
  return total;
}
static void norm(const Norm& n, const float* x, float* y, long from, long to) {  // y may be x
  const float mean = n.kind == LAYER_NORM ? sum_of(x, n.size, 0, false) / n.size : 0.f;
  const float r = 1.f / sqrtf(sum_of(x, n.size, mean, true) / n.size + n.epsilon);
  for (long i = from; i < to; i++) {
    float v = (x[i] - mean) * r;
    if (n.weight) v *= n.weight[i];
    if (n.bias) v += n.bias[i];
    y[i] = v;
  }
}
static void rotate(const Rotary& r, long position, float* x) {
  const int half = r.dim / 2; const float *c = r.cosine + position * half, *s = r.sine + position * half;
  for (int i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half];
    x[i] = a * c[i] - b * s[i]; x[i + half] = b * c[i] + a * s[i];
  }
}
INLINE bool is_there(const Matrix& m) { return m.format >= 0; }
INLINE bool rounds(const Matrix& m) { return is_there(m) && m.format >= Format::Q4_0 && m.is_rounded; }
static bool are_finite(const float* x, long size) {
  F none{};
  for (long i = 0; i < size; i += LANES) none += load_some<F>(x + i, size - i) * 0.f;
  return sum(none) == 0;
}
struct Work {  // of one call: activations of N tokens
  // Values for all: a constructor that runs at loading would be code of an instruction set that may be missing.
  Memory memory[13]{}; int N = 0;
  float *x = nullptr, *spare = nullptr, *y = nullptr, *qkv = nullptr, *heads = nullptr, *up = nullptr, *rows = nullptr;
  long stride = 0;  // of rows
  Rows input{};  // of the next product, in panels
  mutable std::atomic<int> status{IS_DONE};
  void fail(int how) const { int done = IS_DONE; status.compare_exchange_strong(done, how); }  // the first counts
  void give_back() { for (Memory& each : memory) each.give_back(); }
  void need(int n, long hidden, long widest, long qkv_width, long heads_width, long up_width) {
    N = n; stride = padded(widest, GROUP); status = IS_DONE;
    x = memory[0].need(n * hidden); y = memory[1].need(n * hidden); spare = memory[11].need(n * hidden);
    qkv = memory[2].need(n * qkv_width); heads = memory[3].need(n * heads_width); up = memory[4].need(n * up_width);
    rows = memory[5].need(n * stride);
    const int R = panel_rows(n); const long all = padded(n, R) * stride, groups = all / GROUP;
    auto integers = [&](int i, long num) { return (int32_t*)memory[i].need(num); };
    input = {memory[6].need(all), integers(7, all / 4), memory[8].need(groups), memory[9].need(groups),
        integers(10, 3 * groups), integers(12, 2 * groups), stride, R};
  }
  float* row(long n) const { return rows + n * stride; }
};
struct Range { int first, end; long from, to; };  // rows of one panel, and inputs
// The work between two products: work(range) for ranges of whole groups of `size` that cover all rows and inputs. Where
// panels are few, threads share a panel's inputs, not its rows: two threads in the same lines of memory cost a fifth.
template <class W> static void share_ranges(Step& step, const Work& w, long inputs, int size, W work) {
  const int R = w.input.rows, panels = (w.N + R - 1) / R, groups = padded(inputs, size) / size;
  const int parts = lesser(groups, (pool.num_threads + panels - 1) / panels);
  step.share(panels * parts, 1, [&](int i) {
    const int first = i / parts * R, part = i % parts;
    const long from = (long)groups * part / parts * size, to = (long)groups * (part + 1) / parts * size;
    work(Range{first, lesser(w.N, first + R), from, lesser(inputs, to)});
  });
}
// The range of the rows was written: place it as the next products read it.
static void close(const Work& w, const Range& range, long inputs, const Matrix* consumers, int num) {
  bool as_numbers = false, as_integers = false;
  for (int i = 0; i < num; i++) if (is_there(consumers[i])) (rounds(consumers[i]) ? as_integers : as_numbers) = true;
  const long to = range.to == inputs ? padded(inputs, GROUP) : range.to;
  for (int n = range.first; n < range.end; n++) {
    for (long i = range.to; i < to; i++) w.row(n)[i] = 0;
    if (!are_finite(w.row(n) + range.from, to - range.from)) w.fail(NOT_FINITE);  // integers would hide them
    if (as_numbers) place(w.input, n, w.row(n), range.from, to, false);
    if (as_integers) place(w.input, n, w.row(n), range.from, to, true);
  }
}
static void input(Step& step, const Work& w, const float* x, long inputs, const Matrix& consumer) {
  share_ranges(step, w, inputs, GROUP, [&](const Range& r) {
    for (int n = r.first; n < r.end; n++) memcpy(w.row(n) + r.from, x + n * inputs + r.from, 4 * (r.to - r.from));
    close(w, r, inputs, &consumer, 1);
  });
}
struct Product { const Matrix* matrix; float* to; };
static void multiply(Step& step, const Work& w, const Product* products, int num, long width) {
  int blocks = 0;
  for (int i = 0; i < num; i++) blocks += padded(products[i].matrix->outputs, BLOCK) / BLOCK;
  const int chunk = lesser(16, bigger(1, blocks / (pool.num_threads * 8))), chunks = (blocks + chunk - 1) / chunk;
  step.share(chunks, 1, [&](int c) {
    int from = c * chunk, to = lesser(blocks, from + chunk), before = 0;
    for (int i = 0; i < num; i++) {
      const int mine = padded(products[i].matrix->outputs, BLOCK) / BLOCK;
      const int a = bigger(from - before, 0), b = lesser(to - before, mine);
      if (a < b) multiply(*products[i].matrix, a, b, w.input, w.N, products[i].to, width);
      before += mine;
    }
  });
}

struct Call {
  const Model& m; const Cache& cache; const Tokens& tokens; const float* embedding; float* hidden;
  int num_states; const int32_t* state_layers; float* states; const Token* token; int N; Work& work;

  void keep_state(int layer, int n, const float* x, const Range& r) const {
    const long all = (long)tokens.num_rows * tokens.num_tokens, bytes = 4 * (r.to - r.from);
    for (int i = 0; i < num_states; i++) if (state_layers[i] == layer)
      memcpy(states + (i * all + token[n].index) * m.hidden_size + r.from, x + r.from, bytes);
  }
  // Embeddings, or x plus what a part of a layer has made; from these the rows of the next part, or the hidden states.
  // Threads that share a row all compute what needs the whole row, so the sums go to other memory than x.
  void settle(Step& step, float*& x, float*& spare, const Norm* after, int layer, const Norm* before,
      const Matrix* consumers, int num) const {
    const long D = m.hidden_size; float *const old = x, *const sum = spare;
    share_ranges(step, work, D, GROUP, [&](const Range& r) {
      static thread_local OwnMemory memory; float *v = memory.need(2 * D), *normed = v + D;
      for (int n = r.first; n < r.end; n++) {
        const float *from = after ? old + n * D : embedding + token[n].index * D, *added = work.y + n * D;
        if (after && after->kind != NO_NORM) { norm(*after, added, normed, 0, D); added = normed; }
        if (after) for (long i = 0; i < D; i++) v[i] = from[i] + added[i] * m.residual_scale;
        else for (long i = 0; i < D; i++) v[i] = from[i] * m.input_scale;
        memcpy(sum + n * D + r.from, v + r.from, 4 * (r.to - r.from));
        if (before) keep_state(layer, n, v, r);
        auto& next = before ? *before : m.final_norm; float* to = before ? work.row(n) : hidden + token[n].index * D;
        if (next.kind != NO_NORM) norm(next, v, to, r.from, r.to);
        else memcpy(to + r.from, v + r.from, 4 * (r.to - r.from));
        if (before) continue;
        keep_state(m.num_layers, n, to, r);
        if (!are_finite(to + r.from, r.to - r.from)) work.fail(NOT_FINITE);
      }
      if (before) close(work, r, D, consumers, num);
    });
    x = sum; spare = old;
  }
  long key_block(int layer, int row, int head) const {
    return (((long)layer * cache.num_rows + row) * m.num_key_heads + head) * cache.num_slots;
  }

  template <class C> void prepare_heads(Step& step, const Layer& l, int layer) const {  // and keys and values
    const int dim = m.head_dim, wide = padded(dim, 16), H = m.num_heads, K = m.num_key_heads;
    const bool is_whole = (l.query.kind && l.query.size > dim) || (l.key.kind && l.key.size > dim);
    share_ranges(step, work, H + K, is_whole ? H + K : 1, [&](const Range& r) {
      for (int n = r.first; n < r.end; n++) {
        auto& t = token[n]; float *q = work.qkv + (long)n * (H + 2 * K) * dim, *k = q + H * dim, *v = k + K * dim;
        auto norm_heads = [&](const Norm& each, float* x, long first, long num) {
          if (each.kind == NO_NORM) return;
          for (long i = bigger(0l, r.from - first) * dim; i < lesser(num, r.to - first) * dim; i += each.size)
            norm(each, x + i, x + i, 0, each.size);
        };
        norm_heads(l.query, q, 0, H); norm_heads(l.key, k, H, K);
        if (l.rotary >= 0)
          for (long h = r.from; h < r.to; h++) rotate(cache.rotaries[l.rotary], t.position, q + h * dim);
        for (long h = bigger(0l, r.from - H); h < r.to - H; h++) {
          const long block = key_block(layer, t.row, h); bool fits = true, is_finite = true;
          C* key = (C*)cache.keys + block * dim + t.slot / SLOTS * SLOTS * dim + t.slot % SLOTS;
          C* value = (C*)cache.values + (block + t.slot) * wide;
          for (int d = 0; d < dim; d++) {
            const float a = k[h * dim + d], b = v[h * dim + d];
            write(key + SLOTS * d, a); write(value + d, b);
            fits &= fabsf(a) < too_large<C>() && fabsf(b) < too_large<C>();
            is_finite &= fabsf(a) < INFINITY && fabsf(b) < INFINITY;
          }
          if (!fits) work.fail(is_finite ? NOT_HALF : NOT_FINITE);
        }
      }
    });
  }
  template <class C> void attention(Step& step, const Layer& l, int layer) const {
    const int per_key = m.num_heads / m.num_key_heads;
    const long dim = m.head_dim, all = m.num_heads * dim, width = all + 2 * m.num_key_heads * dim;
    // Tokens and heads that read keys and values together: reading costs as much as four of them.
    const int tokens_of_row = (N + tokens.num_rows - 1) / tokens.num_rows;
    int most = 1, heads = 1;
    for (long t = 1, least = 1l << 60; t <= lesser(MOST_QUERIES, tokens_of_row); t++)
      for (long h = 1; h <= per_key && t * h <= MOST_QUERIES; h++) {
        const long parts = (tokens_of_row + t - 1) / t * tokens.num_rows * m.num_key_heads * ((per_key + h - 1) / h);
        const long time = (parts + pool.num_threads - 1) / pool.num_threads * (t * h + 4);
        if (time < least) { least = time; most = t; heads = h; }
      }
    const int head_groups = (per_key + heads - 1) / heads;
    // Groups of neighbouring tokens of one row.
    const int groups = (N + most - 1) / most + tokens.num_rows;
    step.share(groups * m.num_key_heads * head_groups, 1, [&](int i) {
      const int h = i / head_groups % m.num_key_heads, part = i % head_groups;
      int first = 0, end = 0, g = i / (m.num_key_heads * head_groups);
      for (; g >= 0 && end < N; g--)
        for (first = end; end < N && end - first < most && token[end].row == token[first].row;) end++;
      if (g >= 0) return;
      const int from = h * per_key + part * heads, num = lesser(heads, per_key - part * heads);
      const long block = key_block(layer, token[first].row, h);
      const C *keys = (const C*)cache.keys + block * dim, *values = (const C*)cache.values + block * padded(dim, 16);
      attend(m, l, keys, values, token + first, end - first, num, work.qkv + first * width + from * dim, width,
          work.heads + first * all + from * dim, all);
    });
  }
  template <class C> void run(Step& step) const {
    Flush flush;
    const long D = m.hidden_size, F_ = m.mlp_size;
    const long H = (long)m.num_heads * m.head_dim, KV = (long)m.num_key_heads * m.head_dim;
    float *x = work.x, *spare = work.spare;
    settle(step, x, spare, nullptr, 0, &m.layers[0].before_attention, m.layers[0].qkv, 3);
    for (int i = 0; i < m.num_layers; i++) {
      const Layer &l = m.layers[i], *next = i + 1 < m.num_layers ? &l + 1 : nullptr;
      const Product qkv[3] = {{&l.qkv[0], work.qkv}, {&l.qkv[1], work.qkv + H}, {&l.qkv[2], work.qkv + H + KV}};
      const Product output{&l.output, work.y}, down{&l.down, work.y};
      const Product up[2] = {{&l.up[0], work.up}, {&l.up[1], work.up + F_}};
      multiply(step, work, qkv, is_there(l.qkv[1]) ? 3 : 1, H + 2 * KV);
      prepare_heads<C>(step, l, i);
      attention<C>(step, l, i);
      input(step, work, work.heads, H, l.output);
      multiply(step, work, &output, 1, D);
      settle(step, x, spare, &l.after_attention, -1, &l.before_mlp, l.up, 2);
      multiply(step, work, up, is_there(l.up[1]) ? 2 : 1, F_ * (1 + m.has_gate));
      share_ranges(step, work, F_, GROUP, [&](const Range& r) {
        for (int n = r.first; n < r.end; n++) {
          const float* u = work.up + n * F_ * (1 + m.has_gate) + r.from;
          activate(m.activation, u, m.has_gate ? u + F_ : nullptr, r.to - r.from, work.row(n) + r.from);
        }
        close(work, r, F_, &l.down, 1);
      });
      multiply(step, work, &down, 1, D);
      const Norm* before = next ? &next->before_attention : nullptr;
      settle(step, x, spare, &l.after_mlp, i + 1, before, next ? next->qkv : nullptr, 3);
    }
  }
};
static struct Scratch { Work work, product, first, later; Memory search[9], token, path; } scratch;  // of all calls
// The tokens that are no padding, with what each sees.
static int list_tokens(const Cache& cache, const Tokens& t, Token*& list) {
  const long all = (long)t.num_rows * t.num_tokens;
  list = (Token*)scratch.token.need((all + 1) * sizeof(Token) / 4 + 1);
  int* path = (int*)scratch.path.need(all * (t.ancestor ? t.num_tokens : 1)); int N = 0;
  for (int b = 0; b < t.num_rows; b++) for (int i = 0; i < t.num_tokens; i++) {
    const long index = (long)b * t.num_tokens + i;
    if (t.slot[index] == cache.spare_slot) continue;
    Token& token = list[N++];
    token = {index, t.first_row + b, (int)t.slot[index] + 1, 0, t.slot[index], t.position[index], path};
    if (!t.ancestor) continue;
    token.prefix = (int)t.slot[(long)b * t.num_tokens];
    for (int j = 0; j < t.num_tokens; j++)  // parents stand before their children
      if (t.ancestor[index * t.num_tokens + j]) path[token.num_path++] = (int)t.slot[(long)b * t.num_tokens + j];
    path += token.num_path;
  }
  return N;
}
static int forward(const Model& m, const Cache& cache, const Tokens& tokens, const float* embedding, float* hidden,
    int num_states, const int32_t* state_layers, float* states) {
  Work& work = scratch.work; Token* list; const int N = list_tokens(cache, tokens, list);
  if (N == 0) return IS_DONE;
  const long D = m.hidden_size, up = m.mlp_size, H = (long)m.num_heads * m.head_dim;
  work.need(N, D, bigger(bigger(D, H), up), H + 2l * m.num_key_heads * m.head_dim, H, up * (1 + m.has_gate));
  Call call{m, cache, tokens, embedding, hidden, num_states, state_layers, states, list, N, work};
  pool.run([&](Step& step) { if (cache.is_half) call.run<uint16_t>(step); else call.run<float>(step); });
  return work.status;
}
static int multiply(const Matrix& w, int N, const float* x, float* y) {
  if (N == 0) return IS_DONE;
  Work& work = scratch.product; work.need(N, 1, w.inputs, 1, 1, 1);
  const Product product{&w, y}; const long outputs = w.outputs;
  pool.run([&](Step& step) {
    Flush flush;
    input(step, work, x, w.inputs, w);
    multiply(step, work, &product, 1, w.outputs);
    step.share(N, 1, [&](int n) { if (!are_finite(y + n * outputs, outputs)) work.fail(NOT_FINITE); });
  });
  return work.status;
}
static int unpack_rows(const Matrix& w, int num, const int64_t* row, float* out) {
  for (int i = 0; i < num; i++) if (row[i] < 0 || row[i] >= w.outputs) return OUTSIDE;
  for (int i = 0; i < num; i++) unpack_row(w, row[i], out + (long)i * w.inputs);
  return IS_DONE;
}
}  // namespace STEP
