#include "process.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "observer.h"
#include "ops.h"
#include "shim.h"
#include "stacks.h"

namespace tensorplay::track {
namespace {

std::atomic<bool> watching{false};

// A thread that reads the rings, so that writers seldom have to. Without it, as in a forked child, they do.
class Reader {
 public:
  void start() {
    const std::lock_guard guard(mutex_);
    if (is_running_) return;
    wanted_ = true;
    is_running_ = true;
    // Signals are for the threads of the program.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      std::thread([this] { run(); }).detach();
    } catch (const std::system_error&) {
      is_running_ = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  // Returns when it has ended.
  void stop() {
    std::unique_lock guard(mutex_);
    wanted_ = false;
    changed_.notify_all();
    changed_.wait(guard, [&] { return !is_running_; });
  }

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }
  // In a child there is no such thread; who waited on the condition is gone as well.
  void forget() {
    is_running_ = false;
    new (&changed_) std::condition_variable;
  }

 private:
  void run() {
    std::unique_lock guard(mutex_);
    while (wanted_) {
      changed_.wait_for(guard, std::chrono::milliseconds(5));
      guard.unlock();
      if (process_recorder().has_much()) process_recorder().try_drain();
      guard.lock();
    }
    is_running_ = false;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool wanted_ = false;
  bool is_running_ = false;
};

Reader& reader() {
  static auto* const one = new Reader;
  return *one;
}

// In the order in which they are taken elsewhere.
void before_fork() {
  reader().lock();
  known_sites().mutex().lock();
  ops_mutex().lock();
  process_recorder().before_fork();
}

void unlock_after_fork() {
  ops_mutex().unlock();
  known_sites().mutex().unlock();
  reader().unlock();
}

void after_fork_in_parent() {
  process_recorder().after_fork_in_parent();
  unlock_after_fork();
}

void after_fork_in_child() {
  process_recorder().after_fork_in_child();
  reader().forget();
  unlock_after_fork();
}

}  // namespace

Recorder& process_recorder() {
  static auto* const recorder = new Recorder;
  return *recorder;
}

bool start_watching(const Watching& how) {
  if (!install_shim()) return false;
  static std::once_flag once;
  std::call_once(once, [] {
    process_recorder();
    pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child);
  });
  if (watching.exchange(true)) return true;
  process_recorder().reset();  // what went meanwhile was not told
  set_stack_depth(how.depth);
  watch_operators(&process_recorder(), how.stacks ? &capture_site : nullptr);
  watch_allocations(&process_recorder());
  reader().start();
  return true;
}

void stop_watching() {
  if (!watching.exchange(false)) return;
  watch_allocations(nullptr);
  watch_operators(nullptr, nullptr);
  reader().stop();
}

bool is_watching() {
  return watching.load();
}

}  // namespace tensorplay::track
