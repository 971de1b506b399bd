#include "phoenix/xrex/cuda/async_emb/src/watchdog.hpp"

namespace xrex::async_emb {

void Watchdog::OnArmed(Pipeline pipeline, std::int64_t step) {
  Entry& entry = entries_[static_cast<std::size_t>(pipeline)];
  entry = Entry{};
  entry.in_flight = true;
  entry.step = step;
  entry.armed_at = clock_.Now();
}

void Watchdog::OnCompleted(Pipeline pipeline) {
  Entry& entry = entries_[static_cast<std::size_t>(pipeline)];
  if (!entry.in_flight) return;
  entry.in_flight = false;
  entry.resolved = entry.warned && !entry.expired;
  entry.completed_at = clock_.Now();
}

void Watchdog::OnFailed(Pipeline pipeline) {
  entries_[static_cast<std::size_t>(pipeline)].in_flight = false;
}

std::vector<Watchdog::Finding> Watchdog::Poll(Clock::TimePoint now) {
  std::vector<Finding> findings;
  for (int i = 0; i < kNumPipelines; ++i) {
    Entry& entry = entries_[static_cast<std::size_t>(i)];
    const auto report = [&](Kind kind, Clock::TimePoint until) {
      findings.push_back(
          {kind, static_cast<Pipeline>(i), entry.step, until - entry.armed_at});
    };
    if (entry.resolved) {
      entry.resolved = false;
      report(Kind::kResolved, entry.completed_at);
    }
    if (!entry.in_flight || entry.expired) continue;
    if (now >= entry.armed_at + timeout_) {
      entry.expired = true;
      report(Kind::kExpired, now);
    } else if (!entry.warned && now >= entry.armed_at + timeout_ / 2) {
      entry.warned = true;
      report(Kind::kWarning, now);
    }
  }
  return findings;
}

std::optional<Clock::TimePoint> Watchdog::deadline(Pipeline pipeline) const {
  const Entry& entry = entries_[static_cast<std::size_t>(pipeline)];
  if (!entry.in_flight) return std::nullopt;
  return entry.armed_at + timeout_;
}

}  // namespace xrex::async_emb
