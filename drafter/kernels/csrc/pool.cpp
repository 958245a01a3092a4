#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

Pool pool;

static void rest() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}
void Pool::pause(int& spins) {
  if (++spins < 4000) return rest();
  const timespec moment{0, 20000};  // the other thread waits for this core, perhaps
  nanosleep(&moment, nullptr);
}
static void sleep_until_new(std::atomic<uint32_t>& number, uint32_t seen) {
#if defined(__linux__)
  syscall(SYS_futex, &number, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
  const timespec moment{0, 50000}; nanosleep(&moment, nullptr);
#endif
}
static void* loop(void* given) {
  const int thread = (int)(intptr_t)given;
  for (uint32_t seen = 0;;) {
    for (int i = 0; i < 2000 && pool.number.load(std::memory_order_acquire) == seen; i++) rest();
    while (pool.number.load(std::memory_order_acquire) == seen) sleep_until_new(pool.number, seen);
    seen = pool.number.load(std::memory_order_acquire);
    if (thread >= pool.num_threads) continue;
    pool.num_active.fetch_add(1);
    if (pool.is_open.load()) { Step step{false}; pool.work(pool.argument, step); }
    pool.num_active.fetch_sub(1);
  }
  return nullptr;
}
void Pool::set_num_threads(int n) { num_threads = n < 1 ? 1 : n > MOST_THREADS ? MOST_THREADS : n; }
void Pool::run(void (*given)(void*, Step&), void* with) {
  Step count{true}, step{false};
  given(with, count);
  if (count.part > num_parts) {
    Counter* more = new Counter[count.part];
    delete[] parts; parts = more; num_parts = count.part;
  }
  for (; num_started < num_threads; num_started++) {
    pthread_t thread;
    if (pthread_create(&thread, nullptr, loop, (void*)(intptr_t)num_started) != 0) num_threads = num_started;
    else pthread_detach(thread);
  }
  work = given; argument = with;
  if (num_threads > 1) {
    is_open.store(true); number.fetch_add(1);
#if defined(__linux__)
    syscall(SYS_futex, &number, FUTEX_WAKE_PRIVATE, num_threads.load(), nullptr, nullptr, 0);
#endif
  }
  work(argument, step);
  is_open.store(false);
  for (int spins = 0; num_active.load() > 0;) pause(spins);
  for (int i = 0; i < count.part; i++) { parts[i].next.store(0); parts[i].done.store(0); }
  if (has_no_memory.exchange(false)) throw std::bad_alloc();
}
void Pool::begin_again() {  // what other threads worked on is lost, its memory with it
  num_started = 1; num_parts = 0; parts = nullptr; num_active.store(0); is_open.store(false);
  has_no_memory.store(false);
}
