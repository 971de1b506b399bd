// L2, CUDA backend: a communicator of our own that never blocks its caller for
// longer than it takes to enqueue.
//
// Steps are enqueued by one thread at a time; any thread polls and aborts.
#pragma once

#include <nccl.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/backend.hpp"
#include "phoenix/xrex/cuda/async_emb/src/communicator.hpp"
#include "phoenix/xrex/cuda/async_emb/src/cuda_device.hpp"
#include "phoenix/xrex/cuda/async_emb/src/nccl_local_group.hpp"

namespace xrex::async_emb {

// Throws kInternal unless `result` is success. `what` NCCL was to do.
void CheckNccl(ncclResult_t result, const char* what);

class NcclCommunicator final : public Communicator {
 public:
  // Gives the group of the communicators in this process that connect with a
  // payload.
  using FindGroup = std::function<std::shared_ptr<NcclLocalGroup>(
      const std::string& payload)>;

  // `device` outlives the communicator. The arena is not registered with it:
  // NCCL 2.28 then exchanges large pieces through addresses that are not there.
  NcclCommunicator(const CommunicatorConfig& config, CudaDevice& device,
                   FindGroup find_group);
  // Finalizes and destroys what NCCL has, or aborts it, which fails the
  // device's guards, if it does not come to rest in 5 s; an abort that takes
  // longer goes on by itself.
  ~NcclCommunicator() override;

  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

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
  // NCCL does not say which peer is missing.
  std::string DescribeStall() const override { return {}; }
  void Abort(std::string_view reason) override;

 private:
  // What an abort that goes on by itself still needs.
  struct Handle {
    std::mutex mutex;  // one call of NCCL at a time
    // Both guarded by mutex. The arena goes after the communicator that may
    // still read it.
    std::shared_ptr<std::byte> arena;
    ncclComm_t comm = nullptr;
  };
  using Call = std::function<ncclResult_t(ncclComm_t)>;

  void JoinGroup(const std::string& payload);
  // Does the work of every collective of a single rank: NCCL would do it too,
  // but takes tens of microseconds of the host's time. False if there are
  // peers.
  bool KeepAlone(StreamRef stream, StepGuard& guard, const void* send,
                 void* recv, std::size_t bytes);
  // Runs `call` and returns when its work is on the stream. Fails the guard if
  // the communicator was aborted; throws kTimeout after the time-out of a step.
  void Enqueue(StepGuard& guard, const char* what, const Call& call);
  // Polls NCCL until a call that is in progress has ended, the communicator was
  // aborted, or `is_late` says so. To be called with the handle's mutex.
  template <typename IsLate>
  ncclResult_t Await(ncclResult_t result, const IsLate& is_late) const;
  [[noreturn]] void Throw(ncclResult_t result, const char* what) const;
  void CloseInOrder();
  // This communicator's own part of an abort, once its device's guards have
  // failed: what NCCL leaves behind must not be taken for good.
  void End();
  // Ends NCCL's communicator on a thread of its own.
  void EndHandle(ncclResult_t (*end)(ncclComm_t));
  std::optional<std::string> abort_reason() const;
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }

  const CommunicatorConfig config_;
  CudaDevice& device_;
  const FindGroup find_group_;
  const std::shared_ptr<Handle> handle_;

  mutable std::mutex group_mutex_;         // never held during calls of a group
  std::shared_ptr<NcclLocalGroup> group_;  // guarded by group_mutex_; null
                                           // before Connect
  std::optional<std::string>
      abort_reason_;  // guarded by group_mutex_; of an abort before Connect
  std::atomic<bool> aborted_{false};
};

}  // namespace xrex::async_emb
