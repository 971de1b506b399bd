#include "phoenix/xrex/cuda/async_emb/src/host_rendezvous.hpp"

#include <algorithm>
#include <chrono>

#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"
#include "phoenix/xrex/cuda/async_emb/src/str_cat.hpp"

namespace xrex::async_emb {
HostRendezvous::HostRendezvous(std::int32_t world_size)
    : world_size_(world_size),
      joined_(static_cast<std::size_t>(world_size), false),
      arrived_(static_cast<std::size_t>(world_size), false) {
  for (Meeting& meeting : meetings_)
    meeting.offers.resize(static_cast<std::size_t>(world_size));
}

void HostRendezvous::Join(std::int32_t rank, std::int32_t world_size,
                          const Clock& clock, Clock::TimePoint deadline) {
  std::unique_lock lock(mutex_);
  if (world_size != world_size_) {
    throw AsyncEmbError(
        ErrorCode::kInvalidArgument,
        StrCat("async_emb: handshake for ", world_size,
               " ranks with a payload that was made for ", world_size_));
  }
  if (joined_[static_cast<std::size_t>(rank)]) {
    throw AsyncEmbError(
        ErrorCode::kInvalidArgument,
        StrCat("async_emb: rank ", rank,
               " is already connected: give each context a rank of its own"));
  }
  joined_[static_cast<std::size_t>(rank)] = true;
  ++num_joined_;
  changed_.notify_all();
  while (num_joined_ < world_size_ && !abort_reason_) {
    if (clock.Now() >= deadline) {
      const std::string message =
          "handshake timed out: " + MissingLocked(joined_);
      AbortLocked(message);
      throw AsyncEmbError(ErrorCode::kTimeout, "async_emb: " + message);
    }
    changed_.wait_for(lock, kClockPoll);
  }
  if (abort_reason_) {
    throw AsyncEmbError(ErrorCode::kAborted,
                        "async_emb communicator aborted: " + *abort_reason_);
  }
}

std::optional<std::vector<HostRendezvous::Offer>> HostRendezvous::Meet(
    std::int32_t rank, std::string_view operation, std::size_t bytes,
    Offer offer) {
  // Nothing is allocated once the meeting may be complete: a rank that fails
  // then would be the only one.
  std::vector<Offer> offers(static_cast<std::size_t>(world_size_));
  std::unique_lock lock(mutex_);
  if (departed_rank_ >= 0) {
    AbortLocked(StrCat("rank ", departed_rank_, " has closed its context"));
  }
  if (abort_reason_) return std::nullopt;
  const std::uint64_t number = num_completed_;
  Meeting& meeting = meetings_[number % 2];
  if (meeting.num_arrived == 0) {
    meeting.operation = operation;
    meeting.bytes = bytes;
    meeting.first_rank = rank;
  } else if (meeting.operation != operation || meeting.bytes != bytes) {
    AbortLocked(
        StrCat("rank ", rank, " came with ", operation, " of ", bytes,
               " bytes where rank ", meeting.first_rank, " came with ",
               meeting.operation, " of ", meeting.bytes,
               " bytes: every rank must run the same steps in the same order"));
    return std::nullopt;
  }
  meeting.offers[static_cast<std::size_t>(rank)] = std::move(offer);
  arrived_[static_cast<std::size_t>(rank)] = true;
  if (++meeting.num_arrived == world_size_) {
    meeting.num_arrived = 0;
    std::fill(arrived_.begin(), arrived_.end(), false);
    ++num_completed_;
    changed_.notify_all();
  }
  // A completed meeting counts, whatever was aborted since.
  changed_.wait(lock, [&] { return num_completed_ > number || abort_reason_; });
  if (num_completed_ == number) return std::nullopt;
  std::copy(meeting.offers.begin(), meeting.offers.end(), offers.begin());
  return offers;
}

void HostRendezvous::Leave(std::int32_t rank) {
  std::lock_guard lock(mutex_);
  departed_rank_ = rank;
  const bool somebody_waits =
      std::find(arrived_.begin(), arrived_.end(), true) != arrived_.end() ||
      num_joined_ < world_size_;
  if (somebody_waits)
    AbortLocked(StrCat("rank ", rank, " has closed its context"));
}

void HostRendezvous::Abort(std::string_view reason) {
  std::lock_guard lock(mutex_);
  AbortLocked(reason);
}

void HostRendezvous::AbortLocked(std::string_view reason) {
  if (!abort_reason_) abort_reason_ = reason;
  changed_.notify_all();
}

std::optional<std::string> HostRendezvous::abort_reason() const {
  std::lock_guard lock(mutex_);
  return abort_reason_;
}

std::string HostRendezvous::DescribeStall() const {
  std::lock_guard lock(mutex_);
  const bool open =
      std::find(arrived_.begin(), arrived_.end(), true) != arrived_.end();
  return open ? MissingLocked(arrived_) : std::string();
}

std::string HostRendezvous::MissingLocked(
    const std::vector<bool>& there) const {
  std::string ranks;
  int num_missing = 0;
  for (std::size_t i = 0; i < there.size(); ++i) {
    if (there[i]) continue;
    ranks += (num_missing++ > 0 ? ", " : "") + std::to_string(i);
  }
  return StrCat(num_missing == 1 ? "rank " : "ranks ", ranks,
                num_missing == 1 ? " has not arrived" : " have not arrived");
}

}  // namespace xrex::async_emb
