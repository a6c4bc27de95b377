// A small pool of threads for parallel regions of a few microseconds.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace foredraft {

// Tasks 0 .. n - 1 of a region are taken one by one, from the front by whoever of the workers is awake and from the back by the calling
// thread. The caller finishes alone where no worker turns up (asleep, descheduled, lost in a fork), so a region can never wait for a
// thread that has no task.
class ThreadPool {
 public:
  using Function = void (*)(void* context, int task);

  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // The pool of `threads` threads of this process; 0 means one for each core that the process may use.
  static std::shared_ptr<ThreadPool> shared(int threads);
  static int available_cores();

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Runs f(context, task) for every task; a region that finds the pool busy runs in its caller alone.
  void run(int tasks, Function f, void* context);

  // What a coming region will probably read first: idle workers bring its beginning into their caches. Only a hint: the memory need not
  // even be mapped when they do.
  void expect(const void* memory) { expected_.store(static_cast<const char*>(memory), std::memory_order_relaxed); }

  template <class Body>
  void parallel(int tasks, const Body& body) {
    const auto call = [](void* context, int task) { (*static_cast<const Body*>(context))(task); };
    run(tasks, call, const_cast<Body*>(&body));
  }

 private:
  void work(int index);
  bool take_first(uint64_t& state, int& task);
  bool take_last(uint64_t& state, int& task);

  // generation << 32 | end << 16 | next: the tasks next .. end - 1 are free. One word, so that a late worker can never take a task of
  // another region.
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int> done_{0};
  Function function_ = nullptr;
  void* context_ = nullptr;
  std::mutex region_;
  std::mutex sleep_;
  std::condition_variable wake_;
  std::atomic<int> sleepers_{0};
  std::atomic<const char*> expected_{nullptr};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace foredraft
