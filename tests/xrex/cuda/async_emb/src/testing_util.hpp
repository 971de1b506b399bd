// What the tests of threads share: a clock that stands still, gates in place of
// sleeps, and errors that are compared whole.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <future>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

#include "phoenix/xrex/cuda/async_emb/src/clock.hpp"
#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"

namespace xrex::async_emb {

// A clock that moves only when it is told to. Any thread.
class FakeClock final : public Clock {
 public:
  TimePoint Now() const override {
    std::unique_lock lock(mutex_);
    ++num_reads_;
    read_.notify_all();
    if (const auto action = std::exchange(on_next_read_, nullptr)) {
      lock.unlock();
      action();
      lock.lock();
    }
    return now_;
  }

  void Advance(Duration by) {
    std::lock_guard lock(mutex_);
    now_ += by;
  }

  // Runs `action` once, inside the next Now() and before it looks at the time:
  // what happens to a thread between its last look at the world and its look at
  // the clock.
  void OnNextRead(std::function<void()> action) {
    std::lock_guard lock(mutex_);
    on_next_read_ = std::move(action);
  }

  std::int64_t num_reads() const {
    std::lock_guard lock(mutex_);
    return num_reads_;
  }

  // Returns when the clock has been read `count` times since it was made.
  void AwaitRead(std::int64_t count) const {
    std::unique_lock lock(mutex_);
    read_.wait(lock, [&] { return num_reads_ >= count; });
  }

  // For a blocked wait, which reads the clock again and again: returns when it
  // has been read `more` times from now on.
  void AwaitReads(std::int64_t more) const { AwaitRead(num_reads() + more); }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable read_;
  mutable std::int64_t num_reads_ = 0;          // guarded by mutex_
  mutable std::function<void()> on_next_read_;  // guarded by mutex_
  TimePoint now_{std::chrono::hours(1)};        // guarded by mutex_
};

// Holds one thread up until another opens it.
class Gate {
 public:
  // Says that somebody has come, and returns when the gate is open.
  void Pass() {
    std::unique_lock lock(mutex_);
    arrived_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
  }

  void AwaitArrival() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return arrived_; });
  }

  void Open() {
    std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool arrived_ = false;  // guarded by mutex_
  bool open_ = false;     // guarded by mutex_
};

// For what has no gate: that another thread has begun to wait.
template <typename Predicate>
void WaitUntil(const Predicate& predicate) {
  while (!predicate()) std::this_thread::yield();
}

// Whether a thread gets to what it must not get to. A right one never does; a
// wrong one has ample time for it.
template <typename Predicate>
bool HappensAnyway(const Predicate& predicate) {
  for (int i = 0; i < 20000; ++i) {
    if (predicate()) return true;
    std::this_thread::yield();
  }
  return false;
}

// What a call gave: a value, or an error. Carried out of threads as plain data.
struct Outcome {
  std::int64_t value = 0;
  std::optional<ErrorCode> error_code;
  std::string message;
};

inline void PrintTo(const Outcome& outcome, std::ostream* out) {
  if (outcome.error_code) {
    *out << "error " << static_cast<int>(*outcome.error_code) << ": "
         << outcome.message;
  } else {
    *out << "value " << outcome.value;
  }
}

// Calls `call`, whose value, if it has one, is an integer.
template <typename Call>
Outcome Attempt(const Call& call) {
  Outcome outcome;
  try {
    if constexpr (std::is_void_v<std::invoke_result_t<Call>>) {
      call();
    } else {
      outcome.value = static_cast<std::int64_t>(call());
    }
  } catch (const AsyncEmbError& error) {
    outcome.error_code = error.code();
    outcome.message = error.what();
  }
  return outcome;
}

// The same on a thread of its own.
template <typename Call>
std::future<Outcome> AttemptAsync(Call call) {
  return std::async(std::launch::async,
                    [call = std::move(call)] { return Attempt(call); });
}

MATCHER_P2(Failed, code, text,
           "is an error of that code that says: " +
               testing::PrintToString(text)) {
  return arg.error_code == code &&
         testing::ExplainMatchResult(testing::Eq(std::string(text)),
                                     arg.message, result_listener);
}

MATCHER_P2(FailedWith, code, matcher, "is an error of that code and message") {
  return arg.error_code == code &&
         testing::ExplainMatchResult(matcher, arg.message, result_listener);
}

// What every call on an aborted context says.
inline auto Aborted(const std::string& reason) {
  return Failed(ErrorCode::kAborted,
                "async_emb communicator aborted: " + reason);
}

MATCHER(Succeeded, "has no error") { return !arg.error_code.has_value(); }

MATCHER_P(Gave, value, "gave " + testing::PrintToString(value)) {
  return !arg.error_code.has_value() && arg.value == value;
}

}  // namespace xrex::async_emb
