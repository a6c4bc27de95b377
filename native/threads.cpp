#include "threads.h"

#include <map>
#include <stdexcept>
#include <string>

#if defined(__linux__)
#include <sched.h>
#endif

namespace foredraft {

namespace {

constexpr int kMaxTasks = 0xFFFF;
constexpr int kMaxThreads = 256;
// About 60 microseconds: longer than the gap between two operations of a pass, shorter than anyone would notice in a load average.
constexpr int kSpins = 1500;
// What one idle worker fetches ahead: well within a second-level cache.
constexpr int kAheadBytes = 384 * 1024;
constexpr int kAheadStep = 1024;

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

bool has_task(uint64_t state) { return (state & 0xFFFF) < ((state >> 16) & 0xFFFF); }

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
  if (!pool) pools[threads] = pool = std::make_shared<ThreadPool>(threads);
  return pool;
}

ThreadPool::ThreadPool(int threads) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i - 1); });
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard<std::mutex> lock(sleep_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

bool ThreadPool::take_first(uint64_t& state, int& task) {
  while (has_task(state)) {
    if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
      task = static_cast<int>(state & 0xFFFF);
      return true;
    }
  }
  return false;
}

bool ThreadPool::take_last(uint64_t& state, int& task) {
  while (has_task(state)) {
    if (state_.compare_exchange_weak(state, state - (1 << 16), std::memory_order_acq_rel)) {
      task = static_cast<int>((state >> 16) & 0xFFFF) - 1;
      return true;
    }
  }
  return false;
}

void ThreadPool::run(int tasks, Function f, void* context) {
  if (tasks <= 0) return;
  if (workers_.empty() || tasks == 1 || tasks > kMaxTasks || !region_.try_lock()) {
    for (int task = 0; task < tasks; ++task) f(context, task);
    return;
  }
  const std::lock_guard<std::mutex> lock(region_, std::adopt_lock);
  function_ = f;
  context_ = context;
  done_.store(0, std::memory_order_relaxed);
  uint64_t state = (((state_.load(std::memory_order_relaxed) >> 32) + 1) << 32) | (static_cast<uint64_t>(tasks) << 16);
  state_.store(state);
  if (sleepers_.load() > 0) {
    const std::lock_guard<std::mutex> sleeping(sleep_);
    wake_.notify_all();
  }
  int task = 0, mine = 0;
  while (take_last(state, task)) {
    f(context, task);
    ++mine;
    state = state_.load(std::memory_order_acquire);
  }
  done_.fetch_add(mine, std::memory_order_acq_rel);
  for (int spins = 0; done_.load(std::memory_order_acquire) != tasks; ++spins) {
    if (spins < kSpins)
      relax();
    else
      std::this_thread::yield();  // a worker holds a task but not a core
  }
}

void ThreadPool::work(int index) {
  int spins = 0;
  const char* expected = nullptr;
  int ahead = kAheadBytes;  // bytes of `expected` that were sent for
  while (!stop_.load(std::memory_order_relaxed)) {
    uint64_t state = state_.load(std::memory_order_acquire);
    int task = 0;
    if (take_first(state, task)) {
      function_(context_, task);
      done_.fetch_add(1, std::memory_order_acq_rel);
      spins = 0;
    } else if (const char* latest = expected_.load(std::memory_order_relaxed); latest != expected) {
      expected = latest;
      ahead = 0;
    } else if (ahead < kAheadBytes && expected != nullptr) {
      fetch(expected + static_cast<int64_t>(index) * kAheadBytes + ahead);
      ahead += kAheadStep;
    } else if (++spins < kSpins) {
      relax();
    } else {
      std::unique_lock<std::mutex> lock(sleep_);
      sleepers_.fetch_add(1);
      wake_.wait(lock, [this] { return stop_.load() || has_task(state_.load()); });
      sleepers_.fetch_sub(1);
      spins = 0;
    }
  }
}

}  // namespace foredraft
