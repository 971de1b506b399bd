// L2, host backend: collectives between the contexts of one process. A rank
// pulls what it receives straight out of its peers' arenas.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/communicator.hpp"
#include "phoenix/xrex/cuda/async_emb/src/host_rendezvous.hpp"

namespace xrex::async_emb {

class HostCommunicator final : public Communicator {
 public:
  // Gives the rendezvous that a payload names. Throws kInvalidArgument for one
  // it does not know.
  using FindRendezvous = std::function<std::shared_ptr<HostRendezvous>(
      const std::string& payload)>;

  HostCommunicator(std::int32_t rank, std::int32_t world_size,
                   FindRendezvous find_rendezvous);
  ~HostCommunicator() override;

  void Connect(const std::vector<std::string>& payloads,
               std::shared_ptr<std::byte> arena, const Clock& clock,
               Clock::TimePoint deadline) override;
  void AllGather(StreamRef stream, StepGuard& guard, const void* send,
                 void* recv, std::size_t bytes) override;
  void AllToAll(StreamRef stream, StepGuard& guard, const void* send,
                void* recv, std::size_t bytes) override;
  void AllReduceSum(StreamRef stream, StepGuard& guard, const float* send,
                    float* recv, std::size_t count, bool fixed_order) override;
  std::optional<std::string> PollError() const override;
  std::string DescribeStall() const override;
  void Abort(std::string_view reason) override;

 private:
  using Offers = std::vector<HostRendezvous::Offer>;

  // Meets the peers on `stream`, then gives their offers to `receive`; fails
  // the guard otherwise.
  void Exchange(StreamRef stream, StepGuard& guard, std::string_view operation,
                std::size_t bytes, const void* send,
                std::function<void(const Offers&)> receive);

  std::shared_ptr<HostRendezvous> rendezvous() const;

  const std::int32_t rank_;
  const std::int32_t world_size_;
  const FindRendezvous find_rendezvous_;
  std::shared_ptr<std::byte>
      arena_;  // set by Connect, before the first collective

  mutable std::mutex mutex_;
  std::shared_ptr<HostRendezvous>
      rendezvous_;  // guarded by mutex_; null before Connect
  std::optional<std::string>
      abort_reason_;  // guarded by mutex_; of an abort before Connect
};

}  // namespace xrex::async_emb
