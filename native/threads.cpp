#include "threads.h"

#include <map>
#include <stdexcept>
#include <string>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace foredraft {

namespace {

constexpr int kMaxThreads = 256;
// About 60 microseconds: longer than the gap between two operations of a pass, shorter than anyone would notice in a load average.
constexpr int kSpins = 1500;
// What one idle worker fetches ahead: well within a second-level cache.
constexpr int kAheadBytes = 384 * 1024;
constexpr int kAheadStep = 1024;

// How many forks lie between the first process and this one.
std::atomic<int> forks{0};
#if defined(__unix__) || defined(__APPLE__)
[[maybe_unused]] const int counting = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
#endif

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void fetch(const char* p) {
  for (int byte = 0; byte < kAheadStep; byte += 64) __builtin_prefetch(p + byte, 0, 2);
}

int next_of(uint64_t state) { return static_cast<int>(state & 0xFFFF); }
int end_of(uint64_t state) { return static_cast<int>((state >> 16) & 0xFFFF); }
// Half of the free tasks, rounded up: few atomic operations (each waits for all reads before it), and small pieces towards the end.
int half_of(uint64_t state) { return (end_of(state) - next_of(state) + 1) / 2; }

}  // namespace

int ThreadPool::available_cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
#endif
  const unsigned cores = std::thread::hardware_concurrency();
  return cores == 0 ? 1 : static_cast<int>(cores);
}

std::shared_ptr<ThreadPool> ThreadPool::shared(int threads) {
  if (threads < 0 || threads > kMaxThreads)
    throw std::invalid_argument("num_threads must be 1 to " + std::to_string(kMaxThreads) + ", got " + std::to_string(threads));
  if (threads == 0) threads = available_cores() < kMaxThreads ? available_cores() : kMaxThreads;
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<ThreadPool>> pools;
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<ThreadPool> pool = pools[threads].lock();
  // What was left behind by a fork is left alone: nobody would come to be joined.
  const auto end = [](ThreadPool* one) {
    if (!one->left_behind()) delete one;
  };
  if (!pool) pools[threads] = pool = std::shared_ptr<ThreadPool>(new ThreadPool(threads), end);
  return pool;
}

ThreadPool::ThreadPool(int threads) : shares_(static_cast<size_t>(threads)), born_(forks.load(std::memory_order_relaxed)) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i - 1); });
}

bool ThreadPool::left_behind() const { return born_ != forks.load(std::memory_order_relaxed); }

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard<std::mutex> lock(sleep_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

int ThreadPool::Share::run_first() {
  int ran = 0;
  uint64_t now = state.load(std::memory_order_acquire);
  while (const int count = half_of(now)) {
    if (!state.compare_exchange_weak(now, now + static_cast<uint64_t>(count), std::memory_order_acq_rel)) continue;
    function(context, next_of(now), next_of(now) + count);
    ran += count;
    now = state.load(std::memory_order_acquire);
  }
  return ran;
}

int ThreadPool::Share::run_last() {
  int ran = 0;
  uint64_t now = state.load(std::memory_order_acquire);
  while (const int count = half_of(now)) {
    if (!state.compare_exchange_weak(now, now - (static_cast<uint64_t>(count) << 16), std::memory_order_acq_rel)) continue;
    function(context, end_of(now) - count, end_of(now));
    ran += count;
    now = state.load(std::memory_order_acquire);
  }
  return ran;
}

bool ThreadPool::take_part(int index) {
  const size_t count = shares_.size(), own = static_cast<size_t>(index);
  bool took = false;
  for (size_t i = 0; i < count; ++i) {
    const int ran = i == 0 ? shares_[own].run_first() : shares_[(own + i) % count].run_last();
    if (ran == 0) continue;
    done_.fetch_add(ran, std::memory_order_acq_rel);
    took = true;
  }
  return took;
}

void ThreadPool::run(int tasks, Function f, void* context) {
  if (tasks <= 0) return;
  if (workers_.empty() || tasks == 1 || tasks > kMaxTasks || left_behind() || !region_.try_lock()) {
    f(context, 0, tasks);
    return;
  }
  const std::lock_guard<std::mutex> lock(region_, std::adopt_lock);
  done_.store(0, std::memory_order_relaxed);
  const uint64_t count = shares_.size(), all = static_cast<uint64_t>(tasks);
  const uint64_t generation = shares_[0].generation() + uint64_t{1};
  for (uint64_t i = 0; i < count; ++i) {
    shares_[i].function = f;
    shares_[i].context = context;
    shares_[i].state.store(generation << 32 | all * (i + 1) / count << 16 | all * i / count, std::memory_order_release);
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);  // no worker goes to sleep unseen after it has missed the stores above
  if (sleepers_.load() > 0) {
    const std::lock_guard<std::mutex> sleeping(sleep_);
    wake_.notify_all();
  }
  take_part(static_cast<int>(count) - 1);
  for (int spins = 0; done_.load(std::memory_order_acquire) != tasks; ++spins) {
    if (spins < kSpins)
      relax();
    else
      std::this_thread::yield();  // a worker holds a task but not a core
  }
}

void ThreadPool::work(int index) {
  const Share& own = shares_[static_cast<size_t>(index)];
  int spins = 0;
  const char* expected = nullptr;
  int64_t ahead = 0, limit = 0;  // bytes of `expected`: those not yet sent for start here, and nothing is from there
  for (uint32_t seen = 0; !stop_.load(std::memory_order_relaxed);) {
    if (const uint32_t latest = own.generation(); latest != seen) {
      seen = latest;
      if (take_part(index)) spins = 0;
    } else if (const char* memory = expected_.load(std::memory_order_relaxed); memory != expected) {
      expected = memory;
      const int64_t share = static_cast<int64_t>(expected_bytes_.load(std::memory_order_relaxed)) / threads();
      ahead = index * share;
      limit = ahead + (share < kAheadBytes ? share : kAheadBytes);
    } else if (ahead < limit && expected != nullptr) {
      fetch(expected + ahead);
      ahead += kAheadStep;
    } else if (++spins < kSpins) {
      relax();
    } else {
      std::unique_lock<std::mutex> lock(sleep_);
      sleepers_.fetch_add(1);
      std::atomic_thread_fence(std::memory_order_seq_cst);
      // Only for tasks: who wakes up after a region is over would take a core from those who work.
      wake_.wait(lock, [this, &own] { return stop_.load() || half_of(own.state.load()) != 0; });
      sleepers_.fetch_sub(1);
      spins = 0;
    }
  }
}

}  // namespace foredraft
