// A small pool of threads for parallel regions of a few microseconds.
#pragma once
#include <atomic>
#include <cstddef>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace foredraft {

// The tasks 0 .. n - 1 of a region lie in shares, one for each thread, the caller's last. A thread takes the tasks of its own share in
// order, so that it reads memory forward and finds what it fetched for itself, and then those at the end of others' shares. The caller
// finishes alone where no worker turns up (asleep, descheduled, lost in a fork), so a region can never wait for a thread that has no task.
class ThreadPool {
 public:
  // Runs the tasks first .. last - 1.
  using Function = void (*)(void* context, int first, int last);

  static constexpr int kMaxTasks = 0xFFFF;  // of a region that is shared out

  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // The pool of `threads` threads of this process; 0 means one for each core that the process may use.
  static std::shared_ptr<ThreadPool> shared(int threads);
  static int available_cores();

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Runs every task once; a region that finds the pool busy runs in its caller alone.
  void run(int tasks, Function f, void* context);

  // What a coming region will probably read, in shares: idle workers bring the beginnings of theirs into their caches. Only a hint: the
  // memory need not even be mapped when they do.
  void expect(const void* memory, size_t bytes) {
    expected_bytes_.store(bytes, std::memory_order_relaxed);
    expected_.store(static_cast<const char*>(memory), std::memory_order_relaxed);
  }

  // body(first, last) for runs of tasks.
  template <class Body>
  void parallel_runs(int tasks, const Body& body) {
    const auto call = [](void* context, int first, int last) { (*static_cast<const Body*>(context))(first, last); };
    run(tasks, call, const_cast<Body*>(&body));
  }

  template <class Body>
  void parallel(int tasks, const Body& body) {
    parallel_runs(tasks, [&](int first, int last) {
      for (int task = first; task < last; ++task) body(task);
    });
  }

 private:
  // One thread's share of a region, in a cache line of its own: all that the thread must read to start.
  struct alignas(64) Share {
    // generation << 32 | end << 16 | next: the tasks next .. end - 1 are free. One word, so that a late thread can never take a task of
    // another region.
    std::atomic<uint64_t> state{0};
    Function function = nullptr;
    void* context = nullptr;

    uint32_t generation() const { return static_cast<uint32_t>(state.load(std::memory_order_acquire) >> 32); }
    // Run tasks from the front or from the end until there is none; how many those were.
    int run_first();
    int run_last();
  };

  // Whether this is the child of a fork: the workers stayed with the parent, and what they held or waited for then is nobody's here.
  bool left_behind() const;
  void work(int index);
  // The tasks of share `index`, then those left in others; whether there was one.
  bool take_part(int index);

  std::vector<Share> shares_;
  const int born_;  // after so many forks
  alignas(64) std::atomic<int> done_{0};
  std::mutex region_;
  std::mutex sleep_;
  std::condition_variable wake_;
  std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<const char*> expected_{nullptr};
  std::atomic<size_t> expected_bytes_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace foredraft
