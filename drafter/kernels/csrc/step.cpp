// The kernels of one instruction set, in the namespace STEP that the compiler is told. Here: the beam search of the
// recurrent drafter, copies from the text included, drafter/proposers/beam.py in one call.
#include "forward.h"
#include "noise.h"

namespace STEP {
struct Best { float value[MOST_BEAMS]; int index[MOST_BEAMS]; };
// The W largest of R numbers, the largest first; what is no number is none of them. Places without one stay -inf.
static void find_best(const float* v, int R, int W, Best& best) {
  for (int w = 0; w < W; w++) { best.value[w] = -INFINITY; best.index[w] = 0; }
  each_above(v, R, best.value[W - 1], [&](int64_t k) {
    if (!(v[k] > best.value[W - 1])) return;
    int p = W - 1;
    for (; p > 0 && best.value[p - 1] < v[k]; p--) {
      best.value[p] = best.value[p - 1]; best.index[p] = best.index[p - 1];
    }
    best.value[p] = v[k]; best.index[p] = (int)k;
  });
}
static float log_sum(const float* v, int R) {  // of exponentials
  F most = all(-INFINITY), total{}; int i = 0;
  for (; i + LANES <= R; i += LANES) most = greater(most, load(v + i));
  float top = largest(most);
  for (int j = i; j < R; j++) top = v[j] > top ? v[j] : top;
  for (i = 0; i + LANES <= R; i += LANES) total += exponential(load(v + i) - top);
  float sum_ = sum(total);
  for (; i < R; i++) sum_ += expf(v[i] - top);
  return top + logf(sum_);
}
static float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }
static float log_add(float a, float b) {
  const float top = bigger(a, b); return top == -INFINITY ? top : top + logf(expf(a - top) + expf(b - top));
}

// Earlier occurrences of a beam's last tokens: the length of the match that ends at each position before the root's.
struct Matches {
  static void begin(const int64_t* text, long root, uint8_t* length, const float* log_odds, float& odds) {
    for (long s = 0; s < root; s++)
      for (length[s] = 0; length[s] < MOST_MATCH && s >= length[s] && text[s - length[s]] == text[root - length[s]];)
        length[s]++;
    named(text, root, length, log_odds, odds);
  }
  static void follow(const int64_t* text, long root, const uint8_t* before, int64_t token, uint8_t* length) {
    for (long s = 0; s < root; s++) length[s] = text[s] == token ? lesser(MOST_MATCH, (s ? before[s - 1] : 0) + 1) : 0;
  }
  // The token behind the longest match, the latest of equals, and its log odds; -inf: nothing is named.
  static int64_t named(const int64_t* text, long root, const uint8_t* length, const float* log_odds, float& odds) {
    int most = 0; long place = -1, matches = 0, agreeing = 0;
    for (long s = 0; s < root; s++) {
      matches += length[s] > 0;
      if (length[s] && length[s] >= most) { most = length[s]; place = s; }
    }
    if (place < 0) { odds = -INFINITY; return 0; }
    const int64_t token = text[place + 1];
    for (long s = 0; s < root; s++) agreeing += length[s] && text[s + 1] == token;
    odds = log_odds[most] + logf((float)agreeing * agreeing / matches);
    return token;
  }
};
struct Beam { int64_t token, named; float total, named_value; Best best; };
// Live beams before and after a step: beam w of row b is number b * each + w, one of each row before the first step.
struct Side { Beam* beams; float* states; uint8_t* lengths; };
struct SearchCall {
  const Drafter& d; const Search& s; Side sides[2];
  float *streams, *logits, *noise; long most_text; const Work *first, *later; mutable bool over[33] = {};
  int num_nodes() const { return s.width * s.length + s.depth - s.length; }
  const int64_t* text(int row) const { return s.text + row * s.text_stride; }

  void embed(const Work& w, const Side& side, const Range& r) const {  // [embedding; state] for the cell
    static thread_local OwnMemory memory; const long D = d.hidden_size, behind = bigger(D, r.from);
    for (int n = r.first; n < r.end; n++) {
      const int64_t token = side.beams[n].token; float *row = w.row(n), *unpacked = memory.need(D);
      const float* e = unpacked; float scale = d.embedding_scale;
      if (d.embedding) e = d.embedding + token * D;
      else if (r.from < D) { unpack_row(*d.embedding_matrix, token, unpacked); scale *= d.embedding_matrix_scale; }
      for (long i = r.from; i < lesser(D, r.to); i++) row[i] = e[i] * scale;
      if (r.to > behind) memcpy(row + behind, side.states + n * D + behind - D, 4 * (r.to - behind));
    }
    close(w, r, 2 * D, &d.cell, 1);
  }
  void close_stream(const Work& w, const Range& r, const Matrix* consumer) const {  // [h; s], as linear layers read it
    const long D = d.hidden_size;
    for (int n = r.first; n < r.end; n++) {
      const float* x = streams + n * 2 * D; float* row = w.row(n);
      for (long i = r.from; i < r.to; i++) row[i] = i < D ? x[i] * d.hidden_scale : x[i];
    }
    close(w, r, 2 * D, consumer, 1);
  }
  const Matrix* reader(int block) const {
    if (block < d.num_blocks) return d.down ? d.down + block : d.blocks + block;
    return is_there(d.head) ? &d.head : &d.rows;
  }

  void network(Step& step, const Work& w, const Side& side, int each) const {  // logits and new states
    const int D = d.hidden_size, E = 2 * D;
    auto product = [&](const Matrix& m, float* to) { const Product p{&m, to}; multiply(step, w, &p, 1, m.outputs); };
    // A product whose outputs are the next inputs.
    auto narrow = [&](const Matrix& m, const Matrix* next) { product(m, w.y); input(step, w, w.y, m.outputs, *next); };
    share_ranges(step, w, E, GROUP, [&](const Range& r) { embed(w, side, r); });
    product(d.cell, w.y);
    share_ranges(step, w, E, GROUP, [&](const Range& r) {
      const long behind = bigger<long>(D, r.from), num = r.to - behind;
      for (int n = r.first; n < r.end; n++) {
        const long own = (long)n * D + behind - D; float *x = streams + (long)n * E, *state = side.states + own;
        const float* h = s.hidden + (long)(n / each) * D;
        for (long i = r.from; i < lesser<long>(D, r.to); i++) x[i] = h[i];
        if (num > 0) { activate(SILU, w.y + own, nullptr, num, state); memcpy(x + behind, state, 4 * num); }
      }
      close_stream(w, r, reader(0));
    });
    for (int b = 0; b < d.num_blocks; b++) {
      if (d.down) narrow(d.down[b], d.blocks + b);
      product(d.blocks[b], w.y);
      share_ranges(step, w, E, GROUP, [&](const Range& r) {
        for (int n = r.first; n < r.end; n++) {
          float *y = w.y + (long)n * E, *x = streams + (long)n * E;
          activate(SILU, y + r.from, nullptr, r.to - r.from, y + r.from);
          for (long k = r.from; k < r.to; k++) x[k] += y[k];
        }
        close_stream(w, r, reader(b + 1));
      });
    }
    if (is_there(d.head)) narrow(d.head, &d.rows);
    product(d.rows, logits);
  }
  bool has_noise(int row) const { return s.noise_weight > 0 && is_sampled(s.sampling, row); }
  uint64_t stream(int row, int at) const { return stream_start(s.sampling->seed[row], s.position[row] + at + 1, 0); }
  float noise_of(int row, int step, int64_t token) const {
    float g[WORDS]; gumbel(stream(row, step), &token, 0, 1, g);
    return s.noise_weight * g[0];
  }
  void make_noise(int row, int step, long piece) const {  // of the draft vocabulary, for all beams of a row
    float* out = noise + (long)row * d.num_tokens;
    for (long i = piece * PIECE, end = lesser<long>(d.num_tokens, i + PIECE); i < end; i += SOME) {
      const int num = (int)lesser<long>(SOME, end - i); float g[SOME];
      gumbel(stream(row, step), d.token + i, 0, num, g);
      for (int k = 0; k < num; k++) out[i + k] = s.noise_weight * g[k];
    }
  }
  void rank(const Side& side, int n, int row, int step) const {  // the W likeliest children, and the copied one
    const int R = d.num_tokens; Beam& b = side.beams[n]; float *v = logits + (long)n * R, odds = -INFINITY;
    if (is_sampled(s.sampling, row)) {
      const float least = warp(*s.sampling, row, v, R);
      if (is_filtered(s.sampling, row)) for (int i = 0; i < R; i++) v[i] = v[i] >= least ? v[i] : -INFINITY;
    }
    if (d.copies) b.named = Matches::named(text(row), s.position[row], side.lengths + n * most_text, d.log_odds, odds);
    float total = log_sum(v, R); b.named_value = -INFINITY;
    if (odds > -INFINITY) {
      const int64_t place = d.index[b.named]; float own = -INFINITY;
      if (place >= 0) { own = v[place]; v[place] = -INFINITY; }
      b.named_value = log_add(own, total + odds);
      total = bigger(total + softplus(odds), b.named_value);  // no child scores above its parent
    }
    if (has_noise(row)) {
      for (int i = 0; i < R; i++) v[i] += noise[(long)row * R + i];
      b.named_value += noise_of(row, step, b.named);
      total = bigger(log_add(log_sum(v, R), b.named_value), b.named_value);
    }
    b.named_value -= total;
    find_best(v, R, s.width, b.best);
    for (int w = 0; w < s.width; w++) b.best.value[w] -= total;
  }
  void put(long n, int64_t token, float score, int64_t parent) const {
    s.token[n] = token; s.score[n] = score; s.parent[n] = parent;
  }
  void choose(int step, int row, int each, const Side& from, const Side& to) const {  // the W best children of a row
    const int W = s.width, out = step * W; int next[MOST_BEAMS] = {0}; bool has_copied[MOST_BEAMS] = {false};
    const long D = d.hidden_size, nodes = (long)row * num_nodes(), root = s.position[row];
    for (int w = 0; w < W; w++) {
      int parent = 0; float most = -INFINITY; bool is_copy = false;
      for (int k = 0; k < each; k++) {
        const Beam& b = from.beams[row * each + k];
        if (next[k] < W && b.total + b.best.value[next[k]] > most) {
          most = b.total + b.best.value[next[k]]; parent = k; is_copy = false;
        }
        if (!has_copied[k] && b.total + b.named_value > most) {
          most = b.total + b.named_value; parent = k; is_copy = true;
        }
      }
      const int n = row * W + w, p = row * each + parent; Beam& b = to.beams[n];
      b.total = most; b.token = 0;
      if (is_copy) { b.token = from.beams[p].named; has_copied[parent] = true; }
      else if (most > -INFINITY) b.token = d.token[from.beams[p].best.index[next[parent]++]];
      memcpy(to.states + n * D, from.states + p * D, 4 * D);
      const uint8_t* before = from.lengths + p * most_text;
      if (d.copies) Matches::follow(text(row), root, before, b.token, to.lengths + n * most_text);
      put(nodes + out + w, b.token, most, step ? out - W + parent : -1);
    }
  }
  void copy_on(int row, int first, const Side& side, uint8_t* spare) const {  // named tokens alone lengthen a beam
    const long nodes = (long)row * num_nodes(), best = (long)row * (first ? s.width : 1);
    uint8_t *now = side.lengths + best * most_text, *next = spare; float total = side.beams[best].total;
    for (int step = first, parent = first * s.width - s.width, at; step < s.depth; step++, parent = at) {
      at = step < s.length ? step * s.width : s.width * s.length + step - s.length;
      float odds = -INFINITY; int64_t token = 0;
      if (d.copies && total > -INFINITY) token = Matches::named(text(row), s.position[row], now, d.log_odds, odds);
      // With noise g, the chance that log(share) + g exceeds the largest of many others: _rank_copies of beam.py.
      const float value = has_noise(row) ? -expf(-odds - noise_of(row, step, token)) : -softplus(-odds);
      total = odds > -INFINITY ? total + value : -INFINITY;
      put(nodes + at, token, total, step ? parent : -1);
      if (total > -INFINITY) { Matches::follow(text(row), s.position[row], now, token, next); std::swap(now, next); }
    }
  }
  // Whether no row goes on after so many drafting steps; kept, because a late thread asks when the beams have changed.
  template <class T> bool is_over(Step& step, int steps, T test) const {
    step.share(1, 1, [&](int) { over[steps] = true; for (int b = 0; b < s.num_rows; b++) over[steps] &= test(b); });
    return over[steps];
  }
  void run(Step& step) const {
    Flush flush;
    step.share(s.num_rows, 1, [&](int b) {
      float odds = -INFINITY; Beam& root = sides[0].beams[b]; root.token = s.root[b]; root.total = 0;
      memset(sides[0].states + (long)b * d.hidden_size, 0, 4l * d.hidden_size);
      if (d.copies) Matches::begin(text(b), s.position[b], sides[0].lengths + b * most_text, d.log_odds, odds);
      root.named_value = has_noise(b) ? 0 : -softplus(odds);  // for now, of all other tokens
    });
    if (is_over(step, 0, [&](int b) { return sides[0].beams[b].named_value < s.least; }))  // copies are sure
      return step.share(s.num_rows, 1, [&](int b) { copy_on(b, 0, sides[0], sides[1].lengths + b * most_text); });
    for (int i = 0; i < s.length; i++) {
      const int each = i ? s.width : 1; const Side &from = sides[i % 2], &to = sides[1 - i % 2];
      const Work& w = i ? *later : *first; network(step, w, from, each);
      if (s.sampling) {
        const long pieces = (d.num_tokens + PIECE - 1) / PIECE;
        auto make = [&](int j) { if (has_noise(j / pieces)) make_noise(j / pieces, i, j % pieces); };
        step.share(s.num_rows * pieces, 1, make);
      }
      step.share(w.N, 1, [&](int n) { rank(from, n, n / each, i); });
      step.share(s.num_rows, 1, [&](int b) { choose(i, b, each, from, to); });
      if (is_over(step, i + 1, [&](int b) { return !(to.beams[b * s.width].total > s.least); })) return;
    }
    const Side &last = sides[s.length % 2], &other = sides[1 - s.length % 2];
    step.share(s.num_rows, 1, [&](int b) { copy_on(b, s.length, last, other.lengths + b * most_text); });
  }
};
static void search(const Drafter& d, const Search& s) {
  Work &first = scratch.first, &later = scratch.later; Memory* memory = scratch.search;
  const long D = d.hidden_size, N = (long)s.num_rows * s.width; long widest = 2 * D, most_text = 1;
  for (int b = 0; b < s.num_rows; b++) most_text = bigger(most_text, (long)s.position[b]);
  for (int b = 0; d.down && b < d.num_blocks; b++) widest = bigger(widest, (long)d.down[b].outputs);
  first.need(s.num_rows, 2 * D, widest, 1, 1, 1); later.need(N, 2 * D, widest, 1, 1, 1);
  float* noise = s.sampling ? memory[8].need((long)s.num_rows * d.num_tokens) : nullptr;
  float *streams = memory[0].need(N * 2 * D), *logits = memory[1].need(N * d.num_tokens);
  SearchCall call{d, s, {}, streams, logits, noise, most_text, &first, &later};
  for (int i = 0; i < 2; i++) {
    Memory* own = memory + 2 + 3 * i; float* beams = own[0].need(N * sizeof(Beam) / 4);
    call.sides[i] = {(Beam*)beams, own[1].need(N * D), (uint8_t*)own[2].need(N * most_text / 4 + 1)};
  }
  pool.run([&](Step& step) { call.run(step); });
}
static void give_back(bool is_lost) {  // the memory of all calls, which a forked child cannot trust
  Scratch& s = scratch;
  if (is_lost) return (void)new (&s) Scratch;
  for (Work* each : {&s.work, &s.product, &s.first, &s.later}) each->give_back();
  for (Memory& each : s.search) each.give_back();
  s.token.give_back(); s.path.give_back();
}
extern const Kernels kernels;
const Kernels kernels{forward, multiply, search, unpack_rows, noise, pick, give_back};
}  // namespace STEP
