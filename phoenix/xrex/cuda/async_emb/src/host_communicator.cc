#include "phoenix/xrex/cuda/async_emb/src/host_communicator.hpp"

#include <cstring>
#include <exception>
#include <utility>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel_host.hpp"
#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"
#include "phoenix/xrex/cuda/async_emb/src/host_device.hpp"
#include "phoenix/xrex/cuda/async_emb/src/str_cat.hpp"

namespace xrex::async_emb {

HostCommunicator::HostCommunicator(std::int32_t rank, std::int32_t world_size,
                                   FindRendezvous find_rendezvous)
    : rank_(rank),
      world_size_(world_size),
      find_rendezvous_(std::move(find_rendezvous)) {}

HostCommunicator::~HostCommunicator() {
  if (rendezvous_ != nullptr) rendezvous_->Leave(rank_);
}

void HostCommunicator::Connect(const std::vector<std::string>& payloads,
                               std::shared_ptr<std::byte> arena,
                               const Clock& clock, Clock::TimePoint deadline) {
  const std::shared_ptr<HostRendezvous> found =
      find_rendezvous_(payloads.at(0));
  {
    std::lock_guard lock(mutex_);
    rendezvous_ = found;
    // An abort that came too early for the rendezvous: the peers must hear of
    // it.
    if (abort_reason_) found->Abort(*abort_reason_);
  }
  arena_ = std::move(arena);
  found->Join(rank_, world_size_, clock, deadline);
}

void HostCommunicator::AllGather(StreamRef stream, StepGuard& guard,
                                 const void* send, void* recv,
                                 std::size_t bytes) {
  Exchange(stream, guard, "all-gather", bytes, send,
           [recv, bytes](const Offers& offers) {
             auto* to = static_cast<std::byte*>(recv);
             for (const HostRendezvous::Offer& offer : offers) {
               std::memcpy(to, offer.data, bytes);
               to += bytes;
             }
           });
}

void HostCommunicator::AllToAll(StreamRef stream, StepGuard& guard,
                                const void* send, void* recv,
                                std::size_t bytes) {
  const std::size_t own_block = static_cast<std::size_t>(rank_) * bytes;
  Exchange(stream, guard, "all-to-all", bytes, send, [=](const Offers& offers) {
    if (send == recv) return;  // one rank keeps its block where it is
    auto* to = static_cast<std::byte*>(recv);
    for (const HostRendezvous::Offer& offer : offers) {
      std::memcpy(to, static_cast<const std::byte*>(offer.data) + own_block,
                  bytes);
      to += bytes;
    }
  });
}

// The order is fixed here in any case.
void HostCommunicator::AllReduceSum(StreamRef stream, StepGuard& guard,
                                    const float* send, float* recv,
                                    std::size_t count, bool /*fixed_order*/) {
  const auto bytes = count * sizeof(float);
  std::vector<const float*> parts(static_cast<std::size_t>(world_size_));
  Exchange(stream, guard, "all-reduce", bytes, send,
           [=, parts = std::move(parts)](const Offers& offers) mutable {
             for (std::size_t i = 0; i < parts.size(); ++i) {
               parts[i] = static_cast<const float*>(offers[i].data);
             }
             host_kernels::ReduceRanks(
                 parts.data(), static_cast<int>(parts.size()), count, recv);
           });
}

void HostCommunicator::Exchange(StreamRef stream, StepGuard& guard,
                                std::string_view operation, std::size_t bytes,
                                const void* send,
                                std::function<void(const Offers&)> receive) {
  HostStream::RunOn(
      stream,
      [rendezvous = rendezvous(), rank = rank_, arena = arena_, &guard,
       operation = StrCat(PipelineName(guard.pipeline()), " ", operation),
       bytes, send, receive = std::move(receive)] {
        if (guard.failed()) return;
        try {
          const auto offers =
              rendezvous->Meet(rank, operation, bytes, {send, arena});
          if (offers) return receive(*offers);
        } catch (const std::exception& error) {  // no memory, say
          rendezvous->Abort(StrCat(operation, ": ", error.what()));
        }
        guard.Fail();
      });
}

std::optional<std::string> HostCommunicator::PollError() const {
  {
    std::lock_guard lock(mutex_);
    if (rendezvous_ == nullptr) return abort_reason_;
  }
  return rendezvous()->abort_reason();
}

std::string HostCommunicator::DescribeStall() const {
  const std::shared_ptr<HostRendezvous> meeting_place = rendezvous();
  return meeting_place == nullptr ? std::string()
                                  : meeting_place->DescribeStall();
}

void HostCommunicator::Abort(std::string_view reason) {
  std::shared_ptr<HostRendezvous> meeting_place;
  {
    std::lock_guard lock(mutex_);
    meeting_place = rendezvous_;
    if (meeting_place == nullptr && !abort_reason_) abort_reason_ = reason;
  }
  if (meeting_place != nullptr) meeting_place->Abort(reason);
}

std::shared_ptr<HostRendezvous> HostCommunicator::rendezvous() const {
  std::lock_guard lock(mutex_);
  return rendezvous_;
}

}  // namespace xrex::async_emb
