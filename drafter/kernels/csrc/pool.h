// Threads for steps of milliseconds. A job is one function that all threads run; its parts are shared out in blocks of work.
// A thread that is held up holds nobody up, except for the block that it works on: a part ends when its blocks are done, not
// when all threads have arrived. So the bits of a result depend on neither the number of threads nor their speed.
#pragma once
#include <atomic>
#include <cstdint>

struct Pool {
  static constexpr int MOST_PARTS = 1 << 14, MOST_THREADS = 256;
  struct alignas(64) Counter { std::atomic<int> next{0}, done{0}; };

  int num_threads = 1, num_started = 1;
  alignas(64) std::atomic<uint32_t> number{0};  // of the job; sleeping threads wait for another number
  std::atomic<int> num_active{0};
  std::atomic<bool> is_open{false};
  void (*work)(void*, int) = nullptr;
  void* argument = nullptr;
  Counter parts[MOST_PARTS];

  void set_num_threads(int n);
  void run(void (*work)(void*, int), void* argument, int num_parts);  // returns when every part is done
  template <class W> void share(int n, W work);  // a job of one part: work(i) for i in 0 .. n - 1
  static void pause(int& spins);  // of a loop that waits for another thread
};
extern Pool pool;

struct Step {  // one thread's way through the parts of a job
  int part = 0;
  template <class W> void share(int n, int chunk, W work) {  // work(i) for i in 0 .. n - 1, once each
    Pool::Counter& c = pool.parts[part++];
    for (int a; (a = c.next.fetch_add(chunk, std::memory_order_relaxed)) < n;) {
      const int end = a + chunk < n ? a + chunk : n;
      for (int i = a; i < end; i++) work(i);
      c.done.fetch_add(end - a, std::memory_order_acq_rel);
    }
    for (int spins = 0; c.done.load(std::memory_order_acquire) < n;) Pool::pause(spins);
  }
};
template <class W> void Pool::share(int n, W work) {
  struct Job { int n; W& work; } job{n, work};
  if (n == 1) work(0); else run([](void* j, int) { Step().share(((Job*)j)->n, 1, ((Job*)j)->work); }, &job, 1);
}
