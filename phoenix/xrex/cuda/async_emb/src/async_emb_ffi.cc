#include "phoenix/xrex/cuda/async_emb/src/async_emb_ffi.hpp"

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>

#include "phoenix/xrex/cuda/async_emb/src/adagrad_params.hpp"
#include "phoenix/xrex/cuda/async_emb/src/async_emb_comm.hpp"
#include "phoenix/xrex/cuda/async_emb/src/async_emb_ffi_call.hpp"
#include "phoenix/xrex/cuda/async_emb/src/comm_utils.hpp"
#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"
#include "phoenix/xrex/cuda/async_emb/src/str_cat.hpp"

namespace xrex::async_emb {
namespace {

namespace ffi = xla::ffi;

constexpr ffi::DataType kBf16 = ffi::DataType::BF16;
constexpr ffi::DataType kF32 = ffi::DataType::F32;
constexpr ffi::DataType kI32 = ffi::DataType::S32;

template <typename T>
T* Data(const ffi::AnyBuffer& buffer) {
  return static_cast<T*>(buffer.untyped_data());
}

// The context that this call belongs to, which must have been made for the same
// sizes.
Registry::ContextPtr FindContext(const FfiCall& call) {
  const auto context_id = call.Attr<std::int64_t>("context_id");
  const std::int32_t device = call.device_ordinal();
  Registry::ContextPtr context =
      Registry::Global().Find(call.platform(), context_id, device);
  if (context == nullptr) {
    throw AsyncEmbError(
        ErrorCode::kFailedPrecondition,
        StrCat("async_emb: ", call.name(), " found no context ", context_id,
               " on device ", device,
               ": call initialize(ctx) before the first step, and destroy(ctx) "
               "after the last"));
  }
  const PipelineSpec& spec = context->spec();
  call.RequireAttr("group_size", call.Attr<std::int32_t>("group_size"),
                   spec.world_size);
  for (const auto& [what, expected] :
       {std::pair{"tokens_per_rank", spec.tokens_per_rank},
        std::pair{"shard_width", spec.shard_width},
        std::pair{"emb_width", spec.emb_width},
        std::pair{"num_unique", spec.num_unique}}) {
    call.RequireAttr(what, call.Attr<std::int64_t>(what), expected);
  }
  return context;
}

void LookupStartCall(const FfiCall& call) {
  const Registry::ContextPtr context = FindContext(call);
  const PipelineSpec& spec = context->spec();
  call.RequireCounts(4, 2);
  const auto ids = call.Operand(0, "token_ids", kI32, {spec.tokens_per_rank});
  const auto table =
      call.Operand(1, "table", kBf16, {kAnySize, spec.shard_width});
  const auto pin = call.Result(1, "pin", kF32, {1});
  const auto rank = call.Operand(2, "rank", kI32, {});
  call.RequireAlias(1, 0);
  context->WritePin(call.stream(), Data<float>(pin));
  context->StartLookup(call.stream(),
                       {.ids = Data<const std::int32_t>(ids),
                        .table = Data<const Bf16Bits>(table),
                        .vocab_rows = table.dimensions()[0],
                        .program_rank = Data<const std::int32_t>(rank)});
}

void LookupDoneCall(const FfiCall& call) {
  const Registry::ContextPtr context = FindContext(call);
  const PipelineSpec& spec = context->spec();
  call.RequireCounts(1, 1);
  const auto embeddings = call.Result(0, "embeddings", kBf16,
                                      {spec.tokens_per_rank, spec.emb_width});
  context->FinishLookup(call.stream(), Data<Bf16Bits>(embeddings));
}

// Both forms of the update share their first five operands; the lazy one has
// two more then.
void UpdateStartCall(const FfiCall& call, const AdagradParams& params) {
  const Registry::ContextPtr context = FindContext(call);
  const PipelineSpec& spec = context->spec();
  ValidateAdagradParams(params);
  const std::size_t num_aliased = params.lazy ? 6 : 5;
  call.RequireCounts(params.lazy ? 11 : 9, num_aliased);
  for (std::size_t i = 0; i < num_aliased; ++i) call.RequireAlias(i, i);

  const auto grads =
      call.Operand(0, "grads", kBf16, {spec.tokens_per_rank, spec.emb_width});
  const auto segment_ids =
      call.Operand(1, "segment_ids", kI32, {spec.tokens_per_rank});
  const auto unique_tokens =
      call.Operand(2, "unique_tokens", kI32, {spec.num_unique});
  const auto table =
      call.Operand(3, "table", kBf16, {kAnySize, spec.shard_width});
  const std::int64_t vocab_rows = table.dimensions()[0];
  const auto row_state = call.Operand(4, "row_state", kF32, {vocab_rows});
  std::size_t next = 5;
  UpdateStart args{.grads = Data<const Bf16Bits>(grads),
                   .segment_ids = Data<const std::int32_t>(segment_ids),
                   .unique_tokens = Data<const std::int32_t>(unique_tokens),
                   .table = Data<Bf16Bits>(table),
                   .row_state = Data<float>(row_state),
                   .vocab_rows = vocab_rows,
                   .params = params};
  if (params.lazy) {
    args.last_step = Data<std::int32_t>(
        call.Operand(next++, "last_step", kI32, {vocab_rows}));
    args.step =
        Data<const std::int32_t>(call.Operand(next++, "step", kI32, {}));
  }
  args.pending =
      Data<const std::int32_t>(call.Operand(next++, "pending", kI32, {}));
  args.learning_rate =
      Data<const float>(call.Operand(next++, "learning_rate", kF32, {}));
  args.program_rank =
      Data<const std::int32_t>(call.Operand(next++, "rank", kI32, {}));
  context->StartUpdate(call.stream(), args);
}

void EagerUpdateStartCall(const FfiCall& call) {
  UpdateStartCall(
      call, {.eps = call.Attr<float>("eps"),
             .decay_factor = call.Attr<float>("decay_factor"),
             .weight_decay_factor = call.Attr<float>("weight_decay_factor")});
}

void LazyUpdateStartCall(const FfiCall& call) {
  UpdateStartCall(call,
                  {.lazy = true,
                   .eps = call.Attr<float>("eps"),
                   .accum_decay_rate = call.Attr<float>("accum_decay_rate"),
                   .weight_decay_rate = call.Attr<float>("weight_decay_rate")});
}

void UpdateDoneCall(const FfiCall& call) {
  const Registry::ContextPtr context = FindContext(call);
  call.RequireCounts(1, 3);
  const auto norm = call.Result(0, "norm", kF32, {});
  const auto valid = call.Result(1, "valid", kI32, {});
  const auto pin = call.Result(2, "done_pin", kF32, {1});
  context->FinishUpdate(call.stream(), Data<float>(norm),
                        Data<std::int32_t>(valid));
  context->WritePin(call.stream(), Data<float>(pin));
}

// The identity on its first `num_values` operands: a data dependency on all the
// others.
void OrderCall(const FfiCall& call) {
  const auto num_values =
      static_cast<std::size_t>(call.Attr<std::int64_t>("num_values"));
  call.RequireCounts(num_values, num_values);
  for (std::size_t i = 0; i < num_values; ++i) call.RequireAlias(i, i);
}

struct LookupStartTarget {
  static constexpr const char* kName = "xrex_async_emb_lookup_start";
  static constexpr auto kCall = &LookupStartCall;
};
struct LookupDoneTarget {
  static constexpr const char* kName = "xrex_async_emb_lookup_done";
  static constexpr auto kCall = &LookupDoneCall;
};
struct EagerUpdateStartTarget {
  static constexpr const char* kName =
      "xrex_async_emb_rowwise_adagrad_update_start";
  static constexpr auto kCall = &EagerUpdateStartCall;
};
struct LazyUpdateStartTarget {
  static constexpr const char* kName =
      "xrex_async_emb_rowwise_adagrad_lazy_update_start";
  static constexpr auto kCall = &LazyUpdateStartCall;
};
struct UpdateDoneTarget {
  static constexpr const char* kName =
      "xrex_async_emb_rowwise_adagrad_update_done";
  static constexpr auto kCall = &UpdateDoneCall;
};
struct OrderTarget {
  static constexpr const char* kName = "xrex_async_emb_order";
  static constexpr auto kCall = &OrderCall;
};

// One of the two places where our errors become somebody else's. They are the
// same on every device: what one device may find alone never gets here (see
// AsyncEmbContext).
template <typename Target>
ffi::Error Run(const FfiCall& call) {
  try {
    Target::kCall(call);
    return ffi::Error::Success();
  } catch (const AsyncEmbError& error) {
    return ffi::Error(
        ffi::ErrorCode::kInvalidArgument,
        StrCat(error.what(), "; arrays donated to this call are lost"));
  } catch (const std::exception& error) {
    // No memory, say. XLA's frames know no exceptions.
    return ffi::Error(
        ffi::ErrorCode::kInternal,
        StrCat("async_emb: ", call.name(), " failed: ", error.what(),
               "; arrays donated to this call are lost"));
  }
}

template <typename Target>
XLA_FFI_Error* CpuHandler(XLA_FFI_CallFrame* call_frame) {
  static auto* const handler =
      ffi::Ffi::Bind()
          .Ctx<ffi::DeviceOrdinal>()
          .RemainingArgs()
          .RemainingRets()
          .Attrs()
          .To([](std::int32_t device_ordinal, ffi::RemainingArgs args,
                 ffi::RemainingRets rets, ffi::Dictionary attrs) {
            return Run<Target>(FfiCall(Target::kName, "cpu", StreamRef{},
                                       device_ordinal, args, rets, attrs));
          })
          .release();
  return handler->Call(call_frame);
}

// Not for command buffers: a replay would not call us, and each call arms a
// step of its own.
template <typename Target>
XLA_FFI_Error* CudaHandler(XLA_FFI_CallFrame* call_frame) {
  static auto* const handler =
      ffi::Ffi::Bind()
          .Ctx<ffi::PlatformStream<void*>>()
          .Ctx<ffi::DeviceOrdinal>()
          .RemainingArgs()
          .RemainingRets()
          .Attrs()
          .To([](void* stream, std::int32_t device_ordinal,
                 ffi::RemainingArgs args, ffi::RemainingRets rets,
                 ffi::Dictionary attrs) {
            return Run<Target>(FfiCall(Target::kName, "CUDA", StreamRef{stream},
                                       device_ordinal, args, rets, attrs));
          })
          .release();
  return handler->Call(call_frame);
}

template <typename... Targets>
struct TargetList {
  static std::vector<FfiTarget> Cpu() {
    return {{Targets::kName, reinterpret_cast<void*>(&CpuHandler<Targets>)}...};
  }
  static std::vector<FfiTarget> Cuda() {
    return {
        {Targets::kName, reinterpret_cast<void*>(&CudaHandler<Targets>)}...};
  }
};

using Targets =
    TargetList<LookupStartTarget, LookupDoneTarget, EagerUpdateStartTarget,
               LazyUpdateStartTarget, UpdateDoneTarget, OrderTarget>;

}  // namespace

std::vector<FfiTarget> FfiTargets(std::string_view platform) {
  if (platform == "cpu") return Targets::Cpu();
  if (platform == "CUDA") return Targets::Cuda();
  return {};
}

}  // namespace xrex::async_emb
