// L3: the deadlines of armed steps. Pure: the owner arms, completes and polls;
// time is injected.
//
// Not thread-safe: the owner guards it (AsyncEmbContext: its state mutex).
#pragma once

#include <array>
#include <cstdint>
#include <deque>
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

  // Steps of a pipeline are armed in ascending order; several may be in flight.
  void OnArmed(Pipeline pipeline, std::int64_t step);

  // All steps up to `reached` have left the side stream, whether or not anybody
  // has taken them over yet; those after `good` have failed there and are not
  // reported as resolved.
  void OnEnded(Pipeline pipeline, std::int64_t reached, std::int64_t good);

  // What is new since the last poll, for a `now` that was read before the owner
  // looked which steps are complete: else one that completes in time, in
  // between, would expire. A step expires at its deadline, not before. Of
  // several steps in flight the oldest counts: the others wait for it.
  std::vector<Finding> Poll(Clock::TimePoint now);

  // Of that step, if it is in flight.
  std::optional<Clock::TimePoint> deadline(Pipeline pipeline,
                                           std::int64_t step) const;

 private:
  struct Entry {
    std::int64_t step = 0;
    Clock::TimePoint armed_at;
    bool warned = false;
    bool expired = false;
  };

  const Clock& clock_;
  const Clock::Duration timeout_;
  std::array<std::deque<Entry>, kNumPipelines> in_flight_;  // oldest first
  std::vector<Finding> resolved_;                           // to be reported
};

}  // namespace xrex::async_emb
