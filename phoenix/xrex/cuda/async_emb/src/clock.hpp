// L0: time as something injected, so that deadlines can be tested without
// waiting for them.
#pragma once

#include <chrono>

namespace xrex::async_emb {

class Clock {
 public:
  using Duration = std::chrono::nanoseconds;
  using TimePoint =
      std::chrono::time_point<std::chrono::steady_clock, Duration>;

  virtual ~Clock() = default;
  virtual TimePoint Now() const = 0;
};

class SteadyClock final : public Clock {
 public:
  TimePoint Now() const override { return std::chrono::steady_clock::now(); }
};

// A wait that ends by a clock, which may be injected, looks at it again after
// this much real time.
inline constexpr std::chrono::milliseconds kClockPoll{20};

}  // namespace xrex::async_emb
