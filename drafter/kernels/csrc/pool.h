// Threads for steps of milliseconds. A job is one function that all threads run; its parts are shared out in blocks of
// work. A thread that is held up holds nobody up, except for the block that it works on: a part ends when its blocks
// are done, not when all threads have arrived. So the bits of a result depend on neither the number of threads nor
// their speed. A forked child has threads of its own, which start with its first job.
#pragma once
#include <atomic>
#include <cstdint>
#include <new>

struct Step;
struct Pool {
  static constexpr int MOST_THREADS = 256;
  struct alignas(64) Counter { std::atomic<int> next{0}, done{0}; };

  std::atomic<int> num_threads{1};
  int num_started = 1, num_parts = 0;
  alignas(64) std::atomic<uint32_t> number{0};  // of the job; sleeping threads wait for another number
  std::atomic<int> num_active{0};
  std::atomic<bool> is_open{false}, has_no_memory{false};
  void (*work)(void*, Step&) = nullptr;
  void* argument = nullptr;
  Counter* parts = nullptr;  // [num_parts], of a job

  void set_num_threads(int n);
  void run(void (*work)(void*, Step&), void* argument);  // returns when all is done; std::bad_alloc from any thread
  template <class W> void run(const W& work) { run([](void* w, Step& step) { (*(const W*)w)(step); }, (void*)&work); }
  void begin_again();  // in a forked child
  template <class W> void share(int n, W work);  // a job of one part: work(i) for i in 0 .. n - 1
  static void pause(int& spins);  // of a loop that waits for another thread
};
extern Pool pool;

struct Step {  // one thread's way through the parts of a job; first they are counted, and nothing is done
  bool is_counting; int part = 0;
  template <class W> void share(int n, int chunk, W work) {  // work(i) for i in 0 .. n - 1, once each
    if (is_counting) { part++; return; }
    Pool::Counter& c = pool.parts[part++];
    for (int a; (a = c.next.fetch_add(chunk, std::memory_order_relaxed)) < n;) {
      const int end = a + chunk < n ? a + chunk : n;
      try { for (int i = a; i < end; i++) work(i); } catch (const std::bad_alloc&) { pool.has_no_memory.store(true); }
      c.done.fetch_add(end - a, std::memory_order_acq_rel);
    }
    for (int spins = 0; c.done.load(std::memory_order_acquire) < n;) Pool::pause(spins);
  }
};
template <class W> void Pool::share(int n, W work) {
  if (n == 1) work(0); else run([&](Step& step) { step.share(n, 1, work); });
}
