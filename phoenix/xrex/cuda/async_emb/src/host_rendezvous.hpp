// L2, host backend: where the ranks of one process meet. A meeting either takes
// place for all of them or for none, and no wait outlives an abort.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/clock.hpp"

namespace xrex::async_emb {

class HostRendezvous {
 public:
  // What a rank brings to a meeting. `owner` keeps `data` alive while peers
  // read it.
  struct Offer {
    const void* data = nullptr;
    std::shared_ptr<const void> owner;
  };

  explicit HostRendezvous(std::int32_t world_size);

  // Blocks until every rank has joined. Throws kInvalidArgument for a rank that
  // is already there or another world size, kTimeout at the deadline (the
  // rendezvous is aborted), kAborted.
  void Join(std::int32_t rank, std::int32_t world_size, const Clock& clock,
            Clock::TimePoint deadline);

  // Blocks until every rank has come, and gives all offers in rank order;
  // nothing after an abort. `operation` and `bytes` must be the same on all
  // ranks, or the rendezvous is aborted.
  std::optional<std::vector<Offer>> Meet(std::int32_t rank,
                                         std::string_view operation,
                                         std::size_t bytes, Offer offer);

  // A rank goes for good. Meetings that would need it abort the rendezvous.
  void Leave(std::int32_t rank);

  // Meetings that are not complete fail, now and later. The first reason
  // stands.
  void Abort(std::string_view reason);

  std::optional<std::string> abort_reason() const;

  // "rank 1 has not arrived" for the meeting that is open; empty if none is.
  std::string DescribeStall() const;

 private:
  struct Meeting {
    std::vector<Offer> offers;
    std::int32_t num_arrived = 0;
    std::string operation;
    std::size_t bytes = 0;
    std::int32_t first_rank = -1;
  };

  void AbortLocked(std::string_view reason);
  std::string MissingLocked(const std::vector<bool>& there) const;

  const std::int32_t world_size_;
  mutable std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  std::vector<bool> joined_;
  std::int32_t num_joined_ = 0;
  std::int32_t departed_rank_ = -1;
  // A rank that is at meeting n + 1 overwrites nothing of meeting n, whose
  // offers a slower rank may still have to fetch; meeting n + 2 cannot start
  // before everybody has left meeting n.
  std::array<Meeting, 2> meetings_;
  std::uint64_t num_completed_ = 0;
  std::vector<bool> arrived_;  // at the open meeting
  std::optional<std::string> abort_reason_;
};

}  // namespace xrex::async_emb
