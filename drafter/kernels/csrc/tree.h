// Draft trees of one row: packing drafted nodes, and the walk that accepts them. drafter/decoding has both for devices.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

struct Nodes { int64_t *token, *parent, *depth; uint8_t* is_node; };  // [N], the root first

// The N - 1 best of M drafted nodes behind the root; equals keep the first. Worked example: decoding/tree.py.
static void pack_row(int M, int N, int64_t root, const int64_t* token, const int64_t* parent, const int64_t* depth,
    const float* score, Nodes to) {
  static thread_local std::vector<int> best, place;
  best.resize(M); place.assign(M, 0);
  for (int i = 0; i < M; i++) best[i] = i;
  std::stable_sort(best.begin(), best.end(), [&](int a, int b) { return score[a] > score[b]; });
  std::sort(best.begin(), best.begin() + N - 1);  // back into order of depth
  to.token[0] = root; to.parent[0] = to.depth[0] = 0; to.is_node[0] = 1;
  for (int n = 1; n < N; n++) place[best[n - 1]] = n;
  for (int n = 1; n < N; n++) {
    const int i = best[n - 1]; const bool is_node = score[i] > -INFINITY;
    to.is_node[n] = is_node; to.token[n] = is_node ? token[i] : 0; to.depth[n] = is_node ? depth[i] : 0;
    to.parent[n] = !is_node ? n : parent[i] < 0 ? 0 : place[parent[i]];
  }
}
// Walks from the root while the pick at a node is one of its children. path [L + 1] repeats its last node.
static void accept_row(int N, int L, Nodes tree, const int64_t* pick, int64_t* path, int64_t* num_accepted,
    int64_t* bonus) {
  int64_t node = 0;
  path[0] = *num_accepted = 0;
  for (int n = 1; n < N; n++)  // children stand behind their parents
    if (tree.is_node[n] && tree.parent[n] == node && tree.token[n] == pick[node]) path[++*num_accepted] = node = n;
  for (int d = (int)*num_accepted + 1; d <= L; d++) path[d] = node;
  *bonus = pick[node];
}
