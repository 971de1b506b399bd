#include "phoenix/xrex/cuda/async_emb/src/nccl_communicator.hpp"

#include <cstdlib>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_kernel.hpp"
#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"
#include "phoenix/xrex/cuda/async_emb/src/log.hpp"
#include "phoenix/xrex/cuda/async_emb/src/nccl_environment.hpp"
#include "phoenix/xrex/cuda/async_emb/src/nccl_library.hpp"
#include "phoenix/xrex/cuda/async_emb/src/str_cat.hpp"

namespace xrex::async_emb {
namespace {

using SteadyTime = std::chrono::steady_clock;

constexpr std::chrono::seconds kCloseLimit{5};

ncclUniqueId UniqueIdOf(const std::vector<std::string>& payloads) {
  const std::string& payload = payloads.at(0);
  ncclUniqueId id;
  if (payload.size() != sizeof(id)) {
    throw AsyncEmbError(
        ErrorCode::kInvalidArgument,
        StrCat("async_emb: payload 0 has ", payload.size(),
               " bytes, but NCCL's unique id has ", sizeof(id),
               ": give handshake what the last reset of rank 0 returned"));
  }
  std::memcpy(&id, payload.data(), sizeof(id));
  return id;
}

std::string Refusal(ncclResult_t result, const char* what) {
  const char* const detail = ncclGetLastError(nullptr);
  return StrCat("async_emb: NCCL was to ", what, " and gave ",
                ncclGetErrorString(result),
                detail == nullptr || *detail == '\0' ? "" : " (",
                detail == nullptr ? "" : detail,
                detail == nullptr || *detail == '\0' ? "" : ")",
                ": it must succeed on every rank; NCCL_DEBUG=INFO makes NCCL "
                "tell why, and destroy(ctx) and initialize(ctx) on all ranks "
                "begin anew");
}

// NCCL mostly ends in some microseconds what it has in progress.
class Backoff {
 public:
  void Pause() {
    if (++num_pauses_ < kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

 private:
  static constexpr int kYields = 1000;
  int num_pauses_ = 0;
};

}  // namespace

void CheckNccl(ncclResult_t result, const char* what) {
  if (result == ncclSuccess) return;
  throw AsyncEmbError(ErrorCode::kInternal, Refusal(result, what));
}

NcclCommunicator::NcclCommunicator(const CommunicatorConfig& config,
                                   CudaDevice& device, FindGroup find_group)
    : config_(config),
      device_(device),
      find_group_(std::move(find_group)),
      handle_(std::make_shared<Handle>()) {}

NcclCommunicator::~NcclCommunicator() {
  try {
    CloseInOrder();
  } catch (const std::exception& error) {
    LogWarning(error.what());
  }
  if (group_ != nullptr) group_->Leave(this);
}

void NcclCommunicator::JoinGroup(const std::string& payload) {
  const std::shared_ptr<NcclLocalGroup> group = find_group_(payload);
  std::optional<std::string> early;
  {
    std::lock_guard lock(group_mutex_);
    group_ = group;
    early = abort_reason_;
  }
  group->Join(this, {.fail = [this] { device_.FailGuards(); },
                     .end = [this] { End(); }});
  if (early) group->Abort(*early);  // the peers must hear of it
}

void NcclCommunicator::Connect(const std::vector<std::string>& payloads,
                               std::shared_ptr<std::byte> arena,
                               const Clock& clock, Clock::TimePoint deadline) {
  RequireNcclEnvironment([](const char* name) { return std::getenv(name); });
  RequireUsableNccl();
  const ncclUniqueId id = UniqueIdOf(payloads);
  JoinGroup(payloads[0]);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.minCTAs = config_.min_ctas;
  config.maxCTAs = config_.max_ctas;

  const CudaDeviceScope scope(device_.context());
  const auto is_late = [&] { return clock.Now() >= deadline; };
  std::lock_guard lock(handle_->mutex);
  if (aborted()) Throw(ncclSuccess, "connect");
  handle_->arena = std::move(arena);
  const ncclResult_t connected =
      Await(ncclCommInitRankConfig(&handle_->comm, config_.world_size, id,
                                   config_.rank, &config),
            is_late);
  if (connected == ncclInProgress && !aborted()) {
    throw AsyncEmbError(
        ErrorCode::kTimeout,
        StrCat("async_emb: handshake timed out: rank ", config_.rank,
               " waits for ", config_.world_size - 1, " peers"));
  }
  if (connected != ncclSuccess || aborted()) Throw(connected, "connect");
}

template <typename IsLate>
ncclResult_t NcclCommunicator::Await(ncclResult_t result,
                                     const IsLate& is_late) const {
  Backoff backoff;
  while (result == ncclInProgress && !aborted() && !is_late()) {
    backoff.Pause();
    const ncclResult_t asked = ncclCommGetAsyncError(handle_->comm, &result);
    if (asked != ncclSuccess) return asked;
  }
  return result;
}

void NcclCommunicator::Throw(ncclResult_t result, const char* what) const {
  if (const std::optional<std::string> reason = abort_reason()) {
    throw AsyncEmbError(ErrorCode::kAborted,
                        StrCat("async_emb communicator aborted: ", *reason));
  }
  throw AsyncEmbError(ErrorCode::kInternal, Refusal(result, what));
}

bool NcclCommunicator::KeepAlone(StreamRef stream, StepGuard& guard,
                                 const void* send, void* recv,
                                 std::size_t bytes) {
  if (config_.world_size > 1) return false;
  if (aborted()) {
    guard.Fail();
  } else if (send != recv) {
    const CopyItem item{.dst = recv, .src = send, .bytes = bytes};
    device_.Copy(stream, {&item, 1});
  }
  return true;
}

void NcclCommunicator::Enqueue(StepGuard& guard, const char* what,
                               const Call& call) {
  const CudaDeviceScope scope(device_.context());
  std::lock_guard lock(handle_->mutex);
  if (aborted() || handle_->comm == nullptr) return guard.Fail();
  const auto limit = SteadyTime::now() + config_.step_timeout;
  const ncclResult_t result = Await(
      call(handle_->comm), [limit] { return SteadyTime::now() >= limit; });
  if (aborted()) return guard.Fail();
  if (result == ncclInProgress) {
    throw AsyncEmbError(
        ErrorCode::kTimeout,
        StrCat("async_emb: NCCL was to ", what, ", but after ",
               std::chrono::duration<double>(config_.step_timeout).count(),
               " s, the time-out of a step, it is not on its stream: the GPU "
               "takes no launch; let programs end before more are started, or "
               "raise timeout_secs"));
  }
  if (result != ncclSuccess) Throw(result, what);
}

void NcclCommunicator::AllGather(StreamRef stream, StepGuard& guard,
                                 const void* send, void* recv,
                                 std::size_t bytes) {
  if (KeepAlone(stream, guard, send, recv, bytes)) return;
  Enqueue(guard, "enqueue an all-gather", [=](ncclComm_t comm) {
    return ncclAllGather(send, recv, bytes, ncclChar, comm,
                         CudaStreamOf(stream));
  });
}

void NcclCommunicator::AllToAll(StreamRef stream, StepGuard& guard,
                                const void* send, void* recv,
                                std::size_t bytes) {
  if (KeepAlone(stream, guard, send, recv, bytes)) return;
  Enqueue(guard, "enqueue an all-to-all", [=](ncclComm_t comm) {
    return ncclAlltoAll(send, recv, bytes, ncclChar, comm,
                        CudaStreamOf(stream));
  });
}

void NcclCommunicator::AllReduceSum(StreamRef stream, StepGuard& guard,
                                    const float* send, float* recv,
                                    std::size_t count, bool fixed_order) {
  if (KeepAlone(stream, guard, send, recv, count * sizeof(float))) return;
  if (!fixed_order) {
    return Enqueue(guard, "enqueue an all-reduce", [=](ncclComm_t comm) {
      return ncclAllReduce(send, recv, count, ncclFloat, ncclSum, comm,
                           CudaStreamOf(stream));
    });
  }
  // NCCL's order of sums is its own: every rank sums what all have.
  float* const parts = device_.rank_parts();
  Enqueue(guard, "enqueue an all-gather", [=](ncclComm_t comm) {
    return ncclAllGather(send, parts, count, ncclFloat, comm,
                         CudaStreamOf(stream));
  });
  const CudaDeviceScope scope(device_.context());
  cuda_kernels::ReduceRanks(CudaStreamOf(stream), parts, config_.world_size,
                            count, recv);
}

std::optional<std::string> NcclCommunicator::PollError() const {
  if (auto reason = abort_reason()) return reason;
  // Whoever has the mutex finds an error itself.
  const std::unique_lock lock(handle_->mutex, std::try_to_lock);
  if (!lock.owns_lock() || handle_->comm == nullptr) return std::nullopt;
  ncclResult_t found = ncclSuccess;
  const ncclResult_t asked = ncclCommGetAsyncError(handle_->comm, &found);
  if (asked != ncclSuccess) found = asked;
  if (found == ncclSuccess || found == ncclInProgress) return std::nullopt;
  return StrCat("NCCL has failed: ", ncclGetErrorString(found));
}

std::optional<std::string> NcclCommunicator::abort_reason() const {
  std::shared_ptr<NcclLocalGroup> group;
  {
    std::lock_guard lock(group_mutex_);
    if (group_ == nullptr) return abort_reason_;
    group = group_;
  }
  return group->abort_reason();
}

void NcclCommunicator::Abort(std::string_view reason) {
  std::shared_ptr<NcclLocalGroup> group;
  {
    std::lock_guard lock(group_mutex_);
    group = group_;
    if (group == nullptr && !abort_reason_) abort_reason_ = reason;
  }
  if (group != nullptr) return group->Abort(reason);
  device_.FailGuards();
  End();
}

void NcclCommunicator::End() {
  // From here on nobody waits for NCCL with the handle's mutex.
  if (!aborted_.exchange(true)) EndHandle(&ncclCommAbort);
}

void NcclCommunicator::EndHandle(ncclResult_t (*end)(ncclComm_t)) {
  const auto run = [end, handle = handle_, context = device_.context()] {
    std::lock_guard lock(handle->mutex);
    if (handle->comm != nullptr) {
      const CudaDeviceScope scope(context);
      static_cast<void>(end(handle->comm));
      handle->comm = nullptr;
    }
    handle->arena.reset();
  };
  try {
    // Either way of ending waits for all that the device does, also for others:
    // not on the caller's time.
    std::thread(run).detach();
  } catch (const std::system_error&) {
    run();  // there is no thread to be had
  }
}

void NcclCommunicator::CloseInOrder() {
  const auto limit = SteadyTime::now() + kCloseLimit;
  const auto is_late = [limit] { return SteadyTime::now() >= limit; };
  ncclResult_t at_rest = ncclInProgress;
  if (!aborted()) {
    const CudaDeviceScope scope(device_.context());
    std::lock_guard lock(handle_->mutex);
    if (handle_->comm == nullptr) return;
    at_rest = Await(ncclCommFinalize(handle_->comm), is_late);
  }
  if (at_rest == ncclSuccess) {
    EndHandle(&ncclCommDestroy);
  } else {
    Abort(StrCat("rank ", config_.rank,
                 " was closed before all of its exchanges had ended"));
  }
  Backoff backoff;
  while (!is_late()) {
    const std::unique_lock lock(handle_->mutex, std::try_to_lock);
    if (lock.owns_lock() && handle_->comm == nullptr) return;
    backoff.Pause();
  }
}

}  // namespace xrex::async_emb
