#include "phoenix/xrex/cuda/async_emb/src/cuda_device.hpp"

#include <nccl.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <new>
#include <thread>

#include "phoenix/xrex/cuda/async_emb/src/arena_layout.hpp"
#include "phoenix/xrex/cuda/async_emb/src/cuda_error_utils.hpp"
#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"
#include "phoenix/xrex/cuda/async_emb/src/str_cat.hpp"

namespace xrex::async_emb {
namespace {

// One a pipeline, and the one that stands in for a step that was not armed.
constexpr std::size_t kMaxGuards = kNumPipelines + 1;

constexpr std::size_t Aligned(std::size_t bytes) {
  return (bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
}

// What cudaStreamQuery and cudaEventQuery say of work that has ended. Any other
// error may be another's, and says nothing of this device's work.
bool HasEnded(cudaError_t code) {
  return code == cudaSuccess || IsDeviceLost(code);
}

// Asks `is_done` until it says yes or `timeout` has passed, more and more
// seldom.
template <typename IsDone>
bool PollUntil(const IsDone& is_done, std::chrono::nanoseconds timeout) {
  using std::chrono::microseconds;
  const auto begin = std::chrono::steady_clock::now();
  microseconds pause{20};
  while (!is_done()) {
    const auto left = timeout - (std::chrono::steady_clock::now() - begin);
    if (left <= std::chrono::nanoseconds::zero()) return false;
    std::this_thread::sleep_for(
        std::min<std::chrono::nanoseconds>(pause, left));
    pause = std::min(2 * pause, microseconds(500));
  }
  return true;
}

int CheckedOrdinal(std::int64_t ordinal) {
  int count = 0;
  CheckCuda(cudaGetDeviceCount(&count), "to count the devices");
  if (ordinal >= 0 && ordinal < count) return static_cast<int>(ordinal);
  throw AsyncEmbError(ErrorCode::kInvalidArgument,
                      StrCat("async_emb: device_key is ", ordinal,
                             ", but this process sees ", count,
                             " CUDA devices: give the local_hardware_id of "
                             "one of them"));
}

}  // namespace

CudaStream::CudaStream(CUcontext context) : context_(context) {
  const CudaDeviceScope scope(context_);
  int lowest = 0;
  int highest = 0;
  CheckCuda(cudaDeviceGetStreamPriorityRange(&lowest, &highest),
            "to tell its stream priorities");
  CheckCuda(
      cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest),
      "a stream");
}

CudaStream::~CudaStream() {
  const CudaDeviceScope scope(context_);
  static_cast<void>(cudaStreamDestroy(stream_));
}

bool CudaStream::Stop(std::chrono::nanoseconds timeout) {
  const CudaDeviceScope scope(context_);
  return PollUntil([this] { return HasEnded(cudaStreamQuery(stream_)); },
                   timeout);
}

CudaEvent::CudaEvent(CUcontext context) : context_(context) {
  const CudaDeviceScope scope(context_);
  CheckCuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming),
            "an event");
}

CudaEvent::~CudaEvent() {
  const CudaDeviceScope scope(context_);
  static_cast<void>(cudaEventDestroy(event_));
}

bool CudaEvent::IsComplete() const {
  const CudaDeviceScope scope(context_);
  return HasEnded(cudaEventQuery(event_));
}

bool CudaEvent::WaitFor(std::chrono::nanoseconds timeout) const {
  return PollUntil([this] { return IsComplete(); }, timeout);
}

struct CudaDevice::MappedWords {
  std::array<StepWords, kMaxGuards> guards;
  StepCounters counters;
};

struct CudaDevice::DeviceWords {
  std::array<cuda_kernels::StepDecision, kMaxGuards> decisions;
  cuda_kernels::Counters counters;
};

// The kernels write what the host reads as StepCounters.
static_assert(sizeof(StepCounters) == sizeof(cuda_kernels::Counters));
static_assert(std::atomic<std::int64_t>::is_always_lock_free);
static_assert(std::atomic<float>::is_always_lock_free);

class CudaDevice::Guard final : public StepGuard {
 public:
  Guard(Pipeline pipeline, StepWords* words,
        cuda_kernels::StepDecision* decision)
      : StepGuard(pipeline, words),
        view_{.pipeline = pipeline, .words = words, .decision = decision} {}

  static const cuda_kernels::GuardView& ViewOf(const StepGuard& guard) {
    return static_cast<const Guard&>(guard).view_;
  }

 private:
  const cuda_kernels::GuardView view_;
};

CudaDevice::CudaDevice(std::int64_t ordinal, CudaMappedPool& pool)
    : ordinal_(CheckedOrdinal(ordinal)),
      context_(CudaDeviceScope::ContextOf(ordinal_)),
      mapped_(pool, context_, sizeof(MappedWords)),
      read_back_(context_) {
  new (mapped_.get()) MappedWords{};
  const CudaDeviceScope scope(context_);
  cuda_kernels::LoadKernels();
}

CudaDevice::MappedWords& CudaDevice::mapped() const {
  return *std::launder(reinterpret_cast<MappedWords*>(mapped_.get()));
}

std::unique_ptr<Stream> CudaDevice::NewSideStream() {
  return std::make_unique<CudaStream>(context_);
}

std::unique_ptr<Event> CudaDevice::NewEvent() {
  return std::make_unique<CudaEvent>(context_);
}

std::unique_ptr<StepGuard> CudaDevice::NewGuard(Pipeline pipeline) {
  const std::size_t index = num_guards_++;
  return std::make_unique<Guard>(pipeline, &mapped().guards.at(index),
                                 &words_->decisions.at(index));
}

std::shared_ptr<std::byte> CudaDevice::AllocateArena(std::size_t bytes) {
  const CudaDeviceScope scope(context_);
  // NCCL's allocator maps memory, and taking the mapping away waits for
  // nothing. cudaFree may wait for all that the device does, also for a
  // collective of XLA's whose peer has died. Whoever drops the arena knows that
  // its work has ended.
  void* block = nullptr;
  if (ncclMemAlloc(&block, bytes) != ncclSuccess) {
    static_cast<void>(cudaGetLastError());  // told below, and not to others
    throw AsyncEmbError(
        ErrorCode::kResourceExhausted,
        StrCat("async_emb: the arena of ", bytes,
               " bytes could not be allocated on CUDA device ", ordinal_,
               ": free memory (XLA takes most of it unless "
               "XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise), or make "
               "tokens_per_batch, emb_width or num_unique smaller"));
  }
  std::shared_ptr<std::byte> arena(
      static_cast<std::byte*>(block), [context = context_](std::byte* freed) {
        const CudaDeviceScope scope_of_release(context);
        static_cast<void>(ncclMemFree(freed));
      });
  // Waits for nothing else that the device does.
  const cudaStream_t stream = CudaStreamOf(read_back_.ref());
  CheckCuda(cudaMemsetAsync(block, 0, bytes, stream), "to zero the arena");
  CheckCuda(cudaStreamSynchronize(stream), "to zero the arena");
  return arena;
}

std::size_t CudaDevice::ScratchBytes(const PipelineSpec& spec) const {
  const CudaDeviceScope scope(context_);
  const auto parts = spec.deterministic && spec.world_size > 1
                         ? static_cast<std::size_t>(spec.world_size) *
                               static_cast<std::size_t>(spec.num_unique + 1)
                         : 0;
  return Aligned(sizeof(DeviceWords)) + Aligned(parts * sizeof(float)) +
         cuda_kernels::ScratchBytes(spec);
}

void CudaDevice::BindScratch(std::byte* scratch, const PipelineSpec& spec) {
  const CudaDeviceScope scope(context_);
  words_ = reinterpret_cast<DeviceWords*>(scratch);
  rank_parts_ =
      reinterpret_cast<float*>(scratch + Aligned(sizeof(DeviceWords)));
  // The kernels' own comes last.
  kernel_scratch_ =
      scratch + (ScratchBytes(spec) - cuda_kernels::ScratchBytes(spec));
}

std::optional<std::string> CudaDevice::PollError() const {
  // Any call tells of an error that no later call can get past.
  const CudaDeviceScope scope(context_);
  const cudaError_t of_stream = cudaStreamQuery(CudaStreamOf(read_back_.ref()));
  if (of_stream == cudaSuccess || of_stream == cudaErrorNotReady) {
    return std::nullopt;
  }
  return StrCat("CUDA device ", ordinal_,
                " has failed: ", cudaGetErrorName(of_stream), " (",
                cudaGetErrorString(of_stream), ")");
}

void CudaDevice::FailGuards() {
  for (std::size_t i = 0; i < num_guards_; ++i) {
    StepGuard(Pipeline::kLookup, &mapped().guards[i]).Fail();
  }
}

void CudaDevice::Record(Event& event, StreamRef stream) {
  const CudaDeviceScope scope(context_);
  CheckCuda(cudaEventRecord(static_cast<CudaEvent&>(event).get(),
                            CudaStreamOf(stream)),
            "to record an event");
}

void CudaDevice::Wait(StreamRef stream, const Event& event) {
  const CudaDeviceScope scope(context_);
  CheckCuda(cudaStreamWaitEvent(CudaStreamOf(stream),
                                static_cast<const CudaEvent&>(event).get(), 0),
            "to let a stream wait");
}

void CudaDevice::WaitForStep(StreamRef stream, StepGuard& guard,
                             const Event& completed, const Clock& /*clock*/) {
  const CudaDeviceScope scope(context_);
  cuda_kernels::BeginWait(CudaStreamOf(stream), Guard::ViewOf(guard));
  Wait(stream, completed);
}

void CudaDevice::Copy(StreamRef stream, std::span<const CopyItem> items) {
  const CudaDeviceScope scope(context_);
  cuda_kernels::CopyItems(CudaStreamOf(stream), items);
}

void CudaDevice::Zero(StreamRef stream, void* dst, std::size_t bytes) {
  const CudaDeviceScope scope(context_);
  CheckCuda(cudaMemsetAsync(dst, 0, bytes, CudaStreamOf(stream)), "a memset");
}

void CudaDevice::EndStep(StreamRef stream, StepGuard& guard,
                         std::int64_t step) {
  const CudaDeviceScope scope(context_);
  cuda_kernels::EndStep(
      CudaStreamOf(stream), Guard::ViewOf(guard), step, &words_->counters,
      reinterpret_cast<cuda_kernels::Counters*>(&mapped().counters));
}

void CudaDevice::ReadBack(void* dst, const void* src, std::size_t bytes) {
  const CudaDeviceScope scope(context_);
  const cudaStream_t stream = CudaStreamOf(read_back_.ref());
  CheckCuda(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, stream),
            "to copy the arena to the host");
  CheckCuda(cudaStreamSynchronize(stream), "to copy the arena to the host");
}

void CudaDevice::CheckRank(StreamRef stream, StepGuard& guard,
                           const std::int32_t* came, std::int32_t expected) {
  const CudaDeviceScope scope(context_);
  cuda_kernels::CheckRank(CudaStreamOf(stream), Guard::ViewOf(guard), came,
                          expected);
}

// Kernels that only read the caller's arrays and write the arena run in a
// failed step too: the host enqueues without knowing how it goes.
void CudaDevice::GatherRows(StreamRef stream, const StepGuard& /*guard*/,
                            const GatherArgs& args) {
  const CudaDeviceScope scope(context_);
  cuda_kernels::GatherRows(CudaStreamOf(stream), args, &words_->counters);
}

void CudaDevice::CombineSlices(StreamRef stream, const StepGuard& guard,
                               const SliceShape& shape, const Bf16Bits* slices,
                               Bf16Bits* out) {
  const CudaDeviceScope scope(context_);
  cuda_kernels::CombineSlices(CudaStreamOf(stream), Guard::ViewOf(guard), shape,
                              slices, out);
}

void CudaDevice::RouteGradients(StreamRef stream, const StepGuard& /*guard*/,
                                const SliceShape& shape, const Bf16Bits* grads,
                                Bf16Bits* slices) {
  const CudaDeviceScope scope(context_);
  cuda_kernels::RouteGradients(CudaStreamOf(stream), shape, grads, slices);
}

void CudaDevice::CheckUpdate(StreamRef stream, const StepGuard& guard,
                             const UpdateCheckArgs& args) {
  const CudaDeviceScope scope(context_);
  cuda_kernels::CheckUpdate(CudaStreamOf(stream), Guard::ViewOf(guard), args,
                            kernel_scratch_, &words_->counters);
}

void CudaDevice::SumSegments(StreamRef stream, const StepGuard& /*guard*/,
                             const SegmentSumArgs& args) {
  const CudaDeviceScope scope(context_);
  cuda_kernels::SumSegments(CudaStreamOf(stream), args, kernel_scratch_);
}

void CudaDevice::ApplyAdagrad(StreamRef stream, const StepGuard& guard,
                              const ApplyArgs& args) {
  const CudaDeviceScope scope(context_);
  cuda_kernels::ApplyAdagrad(CudaStreamOf(stream), Guard::ViewOf(guard), args,
                             kernel_scratch_, &words_->counters);
}

void CudaDevice::WriteResult(StreamRef stream, const StepGuard& guard,
                             const UpdateResult* result, float* norm,
                             std::int32_t* valid) {
  const CudaDeviceScope scope(context_);
  cuda_kernels::WriteResult(CudaStreamOf(stream), Guard::ViewOf(guard), result,
                            norm, valid);
}

const StepCounters& CudaDevice::counters() const { return mapped().counters; }

}  // namespace xrex::async_emb
