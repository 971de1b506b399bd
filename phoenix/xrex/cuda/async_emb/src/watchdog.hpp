// L3: the deadlines of armed steps. Pure: the owner arms, completes and polls;
// time is injected.
//
// Not thread-safe: the owner guards it (AsyncEmbContext: its state mutex).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/clock.hpp"
#include "phoenix/xrex/cuda/async_emb/src/types.hpp"

namespace xrex::async_emb {

class Watchdog {
 public:
  enum class Kind : std::uint8_t {
    kWarning,   // half of the time is gone; once per step
    kResolved,  // a step that was warned of has completed
    kExpired,   // the deadline has passed; once per step
  };
  struct Finding {
    Kind kind;
    Pipeline pipeline;
    std::int64_t step;
    Clock::Duration in_flight;  // since the step was armed
  };

  // `clock` outlives the watchdog. `timeout` > 0.
  Watchdog(const Clock& clock, Clock::Duration timeout)
      : clock_(clock), timeout_(timeout) {}

  void OnArmed(Pipeline pipeline, std::int64_t step);

  // The step has left the side stream, whether or not anybody has taken it over
  // yet.
  void OnCompleted(Pipeline pipeline);

  // The same for a step that failed there: it is not reported as resolved.
  void OnFailed(Pipeline pipeline);

  // What is new since the last poll, for a `now` that was read before the owner
  // looked which steps are complete: else one that completes in time, in
  // between, would expire. A step expires at its deadline, not before.
  std::vector<Finding> Poll(Clock::TimePoint now);

  // Of the step in flight, if there is one.
  std::optional<Clock::TimePoint> deadline(Pipeline pipeline) const;

 private:
  struct Entry {
    bool in_flight = false;
    bool warned = false;
    bool resolved = false;  // to be reported
    bool expired = false;
    std::int64_t step = 0;
    Clock::TimePoint armed_at;
    Clock::TimePoint completed_at;
  };

  const Clock& clock_;
  const Clock::Duration timeout_;
  std::array<Entry, kNumPipelines> entries_{};
};

}  // namespace xrex::async_emb
