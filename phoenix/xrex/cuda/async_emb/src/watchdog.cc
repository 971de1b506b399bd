#include "phoenix/xrex/cuda/async_emb/src/watchdog.hpp"

#include <utility>

namespace xrex::async_emb {

void Watchdog::OnArmed(Pipeline pipeline, std::int64_t step) {
  in_flight_[static_cast<std::size_t>(pipeline)].push_back(
      {.step = step, .armed_at = clock_.Now()});
}

void Watchdog::OnEnded(Pipeline pipeline, std::int64_t reached,
                       std::int64_t good) {
  auto& steps = in_flight_[static_cast<std::size_t>(pipeline)];
  while (!steps.empty() && steps.front().step <= reached) {
    const Entry& ended = steps.front();
    if (ended.warned && !ended.expired && ended.step <= good) {
      resolved_.push_back({Kind::kResolved, pipeline, ended.step,
                           clock_.Now() - ended.armed_at});
    }
    steps.pop_front();
  }
}

std::vector<Watchdog::Finding> Watchdog::Poll(Clock::TimePoint now) {
  std::vector<Finding> findings = std::exchange(resolved_, {});
  for (int i = 0; i < kNumPipelines; ++i) {
    auto& steps = in_flight_[static_cast<std::size_t>(i)];
    if (steps.empty() || steps.front().expired) continue;
    Entry& oldest = steps.front();
    const Clock::Duration age = now - oldest.armed_at;
    const auto report = [&](Kind kind) {
      findings.push_back({kind, static_cast<Pipeline>(i), oldest.step, age});
    };
    if (age >= timeout_) {
      oldest.expired = true;
      report(Kind::kExpired);
    } else if (!oldest.warned && age >= timeout_ / 2) {
      oldest.warned = true;
      report(Kind::kWarning);
    }
  }
  return findings;
}

std::optional<Clock::TimePoint> Watchdog::deadline(Pipeline pipeline,
                                                   std::int64_t step) const {
  for (const Entry& entry : in_flight_[static_cast<std::size_t>(pipeline)]) {
    if (entry.step == step) return entry.armed_at + timeout_;
  }
  return std::nullopt;
}

}  // namespace xrex::async_emb
