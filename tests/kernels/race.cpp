// One thread changes the number of threads and frees scratch memory, while two others pack and multiply.
#include "layout.h"
#include <cstdlib>
#include <thread>
#include <vector>
extern "C" {
int pack(int, int, int, int, const void* const*, void*);
int multiply(const Matrix*, int, const float*, float*);
void set_num_threads(int); void give_back(); int use_instructions(const char*);
}
int main() {
  use_instructions("plain");
  std::vector<float> rows(64 * 64, 1.f); std::vector<const void*> at; std::vector<std::thread> threads;
  for (int o = 0; o < 64; o++) at.push_back(&rows[64 * o]);
  for (int n = 0; n < 3; n++) threads.emplace_back([&, n] {
    std::vector<float> blocks(64 * 64), x(8 * 64, 1.f), y(8 * 64);
    for (int i = 0; i < 50; i++) {
      if (n == 0) { set_num_threads(1 + i % 4); give_back(); continue; }
      const Matrix m{F32, 64, 64, 0, blocks.data(), nullptr};
      const int failed = pack(F32, F32, 64, 64, at.data(), blocks.data()) || multiply(&m, 8, x.data(), y.data());
      if (failed || y[511] != 64) _Exit(1);
    }
  });
  for (std::thread& each : threads) each.join();
}
