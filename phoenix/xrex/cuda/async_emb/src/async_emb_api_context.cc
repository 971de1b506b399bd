#include "phoenix/xrex/cuda/async_emb/src/async_emb_api_context.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/clock.hpp"
#include "phoenix/xrex/cuda/async_emb/src/comm_utils.hpp"
#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"
#include "phoenix/xrex/cuda/async_emb/src/log.hpp"
#include "phoenix/xrex/cuda/async_emb/src/str_cat.hpp"

namespace xrex::async_emb {
namespace {

namespace nb = nanobind;
using nb::literals::operator""_a;

const SteadyClock& ProcessClock() {
  // Never destroyed: watchdogs may look at it until the process ends.
  static const SteadyClock* const clock = new SteadyClock;
  return *clock;
}

OutOfRange ParseOutOfRange(const std::string& text) {
  if (text == "clip") return OutOfRange::kClip;
  if (text == "zero") return OutOfRange::kZero;
  throw AsyncEmbError(ErrorCode::kInvalidArgument,
                      StrCat("async_emb: out_of_range is '", text,
                             "': it must be 'clip' or 'zero'"));
}

Transport ParseTransport(const std::string& text) {
  if (text == "auto") return Transport::kAuto;
  if (text == "nccl") return Transport::kNccl;
  if (text == "lsa") return Transport::kLsa;
  throw AsyncEmbError(ErrorCode::kInvalidArgument,
                      StrCat("async_emb: transport is '", text,
                             "': it must be 'auto', 'nccl' or 'lsa'"));
}

// The table's bits: nanobind has no bfloat16 of NumPy's.
Bf16Array Bits(const nb::object& table) {
  std::string dtype = "no NumPy array";
  if (nb::hasattr(table, "dtype"))
    dtype = nb::cast<std::string>(table.attr("dtype").attr("name"));
  Bf16Array bits;
  if ((dtype == "bfloat16" || dtype == "uint16") &&
      nb::try_cast(nb::object(table.attr("view")("uint16")), bits) &&
      bits.shape(0) > 0) {
    return bits;
  }
  throw AsyncEmbError(
      ErrorCode::kInvalidArgument,
      StrCat(
          "async_emb: arm_lookup needs a table bf16[V, w] of at least one "
          "row, got ",
          dtype,
          " or another shape: give a NumPy array of bfloat16, or of its bits "
          "as uint16"));
}

// Calls `call` on the context without the GIL.
template <typename Call>
auto WithoutGil(const PyContext& self, const Call& call) {
  std::shared_ptr<AsyncEmbContext> found = self.get();
  nb::gil_scoped_release release;
  // Let go before the GIL is taken back: it may be the last reference.
  const std::shared_ptr<AsyncEmbContext> context = std::move(found);
  return call(*context);
}

// A NumPy bfloat16 array [rows, columns] that owns a copy of the bits.
nb::object ToBfloat16(const std::vector<Bf16Bits>& bits, std::size_t rows,
                      std::size_t columns) {
  const nb::bytes bytes(reinterpret_cast<const char*>(bits.data()),
                        bits.size() * sizeof(Bf16Bits));
  const nb::object bfloat16 =
      nb::module_::import_("ml_dtypes").attr("bfloat16");
  return nb::module_::import_("numpy")
      .attr("frombuffer")(bytes, "dtype"_a = bfloat16)
      .attr("reshape")(rows, columns)
      .attr("copy")();
}

std::shared_ptr<PyContext> MakeContext(
    std::int64_t context_id, std::int32_t world_size,
    std::int64_t tokens_per_rank, std::int64_t shard_width,
    std::int64_t emb_width, std::int64_t num_unique,
    const std::string& out_of_range, bool deterministic, bool check_inputs,
    bool any_world_size, std::int32_t min_ctas, std::int32_t max_ctas,
    const std::string& transport, std::optional<std::int64_t> timeout_secs,
    const std::string& platform, std::int64_t device_key,
    const std::string& name) {
  const PipelineSpec spec{.world_size = world_size,
                          .tokens_per_rank = tokens_per_rank,
                          .shard_width = shard_width,
                          .emb_width = emb_width,
                          .num_unique = num_unique,
                          .out_of_range = ParseOutOfRange(out_of_range),
                          .deterministic = deterministic,
                          .check_inputs = check_inputs,
                          .any_world_size = any_world_size,
                          .transport = ParseTransport(transport),
                          .min_ctas = min_ctas,
                          .max_ctas = max_ctas};
  Backend& backend = Registry::Global().backend(platform);
  const ContextConfig config{.context_id = context_id,
                             .device_key = device_key,
                             .name = name,
                             .timeout = ResolveTimeout(timeout_secs, backend)};
  std::shared_ptr<AsyncEmbContext> context;
  {
    nb::gil_scoped_release release;  // the device's memory takes its time
    context = std::make_shared<AsyncEmbContext>(config, spec, backend,
                                                ProcessClock());
  }
  return std::make_shared<PyContext>(std::move(context));
}

std::vector<nb::bytes> Reset(const PyContext& self, std::int32_t rank,
                             std::int32_t world_size) {
  const std::vector<std::string> payloads =
      WithoutGil(self, [&](AsyncEmbContext& context) {
        return context.Reset(rank, world_size);
      });
  std::vector<nb::bytes> made;
  made.reserve(payloads.size());
  for (const std::string& payload : payloads)
    made.emplace_back(payload.data(), payload.size());
  return made;
}

void Handshake(const PyContext& self, const std::vector<nb::bytes>& payloads,
               std::optional<std::int64_t> timeout_secs) {
  std::vector<std::string> copies;
  copies.reserve(payloads.size());
  for (const nb::bytes& payload : payloads)
    copies.emplace_back(payload.c_str(), payload.size());
  WithoutGil(self, [&](AsyncEmbContext& context) {
    std::optional<Clock::Duration> timeout;
    if (timeout_secs) timeout = CheckTimeout(*timeout_secs);
    context.Handshake(copies, timeout);
  });
}

nb::bytes Snapshot(const PyContext& self, const std::string& region) {
  const std::string bytes = WithoutGil(
      self, [&](AsyncEmbContext& context) { return context.Snapshot(region); });
  return nb::bytes(bytes.data(), bytes.size());
}

// A property that counts the steps of one pipeline.
template <auto member, Pipeline pipeline>
std::int64_t Steps(const PyContext& self) {
  return (self.get()->stats().*member)[static_cast<std::size_t>(pipeline)];
}

void BindLifeCycle(nb::class_<PyContext>& type) {
  type.def("reset", &Reset, "rank"_a, "world_size"_a,
           "Gives the context its rank; returns one payload a rank, empty but "
           "on rank 0.")
      .def("handshake", &Handshake, "payloads"_a, "timeout_secs"_a = nb::none(),
           "Blocks until all ranks are there, at most for timeout_secs (None: "
           "a step's time-out); payloads[i] was made by rank i for this rank.")
      .def("close", &PyContext::Close,
           "Ends a lookup that is armed and lets the context go.")
      .def(
          "abort",
          [](const PyContext& self, const std::string& reason) {
            WithoutGil(self, [&](AsyncEmbContext& c) { c.Abort(reason); });
          },
          "reason"_a = "abort() was called",
          "Ends every exchange that is not complete; does not wait for it.")
      .def(
          "check",
          [](const PyContext& self) {
            WithoutGil(self, [](AsyncEmbContext& c) { c.Check(); });
          },
          "Raises the sticky error, if there is one.")
      .def(
          "reset_table_binding",
          [](const PyContext& self) {
            WithoutGil(self, [](AsyncEmbContext& c) { c.ResetTableBinding(); });
          },
          "Forgets which table the steps work on.");
}

void BindSteps(nb::class_<PyContext>& type) {
  type.def("arm_lookup", &PyContext::ArmLookup, "ids"_a.noconvert(), "table"_a,
           "Arms a lookup of ids i32 [T] in table bfloat16 [V, w]; returns the "
           "step's number.")
      .def("consume_lookup", &PyContext::ConsumeLookup,
           "Waits for the armed lookup; returns embeddings bfloat16 [T, W].")
      .def(
          "wait_step_ready",
          [](const PyContext& self) {
            return WithoutGil(
                self, [](AsyncEmbContext& c) { return c.WaitStepReady(); });
          },
          "Waits for the latest lookup step; 0 if none was ever armed.")
      .def(
          "drain",
          [](const PyContext& self) {
            return WithoutGil(self,
                              [](AsyncEmbContext& c) { return c.Drain(); });
          },
          "Waits for the latest step of both pipelines; 0 if none was ever "
          "armed.")
      .def("snapshot", &Snapshot, "region"_a,
           "The bytes of one region of the arena.")
      .def(
          "stats",
          [](const PyContext& self) { return StatsDict(self.get()->stats()); },
          "The counters since the context was made.");
}

void BindProperties(nb::class_<PyContext>& type) {
  using Stats = ContextStats;
  type.def_prop_ro(
          "context_id",
          [](const PyContext& self) { return self.get()->context_id(); })
      .def_prop_ro("rank",
                   [](const PyContext& self) { return self.get()->rank(); })
      .def_prop_ro(
          "world_size",
          [](const PyContext& self) { return self.get()->spec().world_size; })
      .def_prop_ro(
          "device_key",
          [](const PyContext& self) { return self.get()->device_key(); })
      .def_prop_ro("ready",
                   [](const PyContext& self) { return self.get()->ready(); })
      .def_prop_ro("error",
                   [](const PyContext& self) {
                     return WithoutGil(
                         self, [](AsyncEmbContext& c) { return c.error(); });
                   })
      .def_prop_ro(
          "arena_bytes",
          [](const PyContext& self) { return self.get()->arena_bytes(); })
      .def_prop_ro("lookup_steps_armed",
                   &Steps<&Stats::steps_armed, Pipeline::kLookup>)
      .def_prop_ro("lookup_steps_done",
                   &Steps<&Stats::steps_done, Pipeline::kLookup>)
      .def_prop_ro("update_steps_armed",
                   &Steps<&Stats::steps_armed, Pipeline::kUpdate>)
      .def_prop_ro("update_steps_done",
                   &Steps<&Stats::steps_done, Pipeline::kUpdate>);
}

}  // namespace

std::shared_ptr<AsyncEmbContext> PyContext::get() const {
  if (context_ == nullptr) {
    throw AsyncEmbError(ErrorCode::kFailedPrecondition,
                        "async_emb: the context is closed: make a new one");
  }
  return context_;
}

void PyContext::Close() {
  std::shared_ptr<AsyncEmbContext> context = std::move(context_);
  if (context == nullptr) return;
  bool quiet = true;
  {
    nb::gil_scoped_release release;
    if (table_) {
      context->Abort("the context was closed with a lookup armed");
      quiet = context->AwaitQuiet(std::chrono::steady_clock::now() +
                                  std::chrono::seconds(30));
    }
    context.reset();
  }
  if (!quiet) {
    LogWarning("a lookup still reads its table 30 s after its abort; leaking");
    static_cast<void>(new Bf16Array(*table_));
  }
  table_.reset();
}

std::int64_t PyContext::ArmLookup(const IdArray& ids, const nb::object& table) {
  const std::shared_ptr<AsyncEmbContext> context = RequireHost();
  const PipelineSpec& spec = context->spec();
  Bf16Array bits = Bits(table);
  if (ids.shape(0) != static_cast<std::size_t>(spec.tokens_per_rank) ||
      bits.shape(1) != static_cast<std::size_t>(spec.shard_width)) {
    throw AsyncEmbError(
        ErrorCode::kInvalidArgument,
        StrCat("async_emb: arm_lookup needs ids i32[", spec.tokens_per_rank,
               "] and a table bf16[V, ", spec.shard_width, "], got ids [",
               ids.shape(0), "] and a table [", bits.shape(0), ", ",
               bits.shape(1), "]"));
  }
  std::int64_t step = 0;
  {
    nb::gil_scoped_release release;
    step = context->StartLookup(
        StreamRef{}, {.ids = ids.data(),
                      .table = bits.data(),
                      .vocab_rows = static_cast<std::int64_t>(bits.shape(0))});
  }
  if (step == 0) context->Check();  // it has failed
  table_ = std::move(bits);
  return step;
}

nb::object PyContext::ConsumeLookup() {
  const std::shared_ptr<AsyncEmbContext> context = RequireHost();
  const auto rows = static_cast<std::size_t>(context->spec().tokens_per_rank);
  const auto columns = static_cast<std::size_t>(context->spec().emb_width);
  std::vector<Bf16Bits> embeddings(rows * columns);
  {
    nb::gil_scoped_release release;
    context->FinishLookup(StreamRef{}, embeddings.data());
  }
  table_.reset();
  return ToBfloat16(embeddings, rows, columns);
}

std::shared_ptr<AsyncEmbContext> PyContext::RequireHost() const {
  std::shared_ptr<AsyncEmbContext> context = get();
  if (context->platform() == "cpu") return context;
  throw AsyncEmbError(
      ErrorCode::kInvalidArgument,
      StrCat(
          "async_emb: arm_lookup and consume_lookup work on the host backend "
          "only, this context is for ",
          context->platform(), ": call the steps from a JAX program"));
}

void BindContext(nb::module_& module) {
  nb::class_<PyContext> type(
      module, "AsyncEmbContext",
      "The native context of one rank: its life cycle and its steps.");
  type.def(nb::new_(&MakeContext), "context_id"_a, "world_size"_a,
           nb::kw_only(), "tokens_per_rank"_a, "shard_width"_a, "emb_width"_a,
           "num_unique"_a, "out_of_range"_a = "clip", "deterministic"_a = false,
           "check_inputs"_a = false, "any_world_size"_a = false,
           "min_ctas"_a = 1, "max_ctas"_a = 4, "transport"_a = "auto",
           "timeout_secs"_a = nb::none(), "platform"_a = "cpu",
           "device_key"_a = 0, "name"_a = "");
  BindLifeCycle(type);
  BindSteps(type);
  BindProperties(type);
}

nb::dict StatsDict(const ContextStats& stats) {
  constexpr auto kLookup = static_cast<std::size_t>(Pipeline::kLookup);
  constexpr auto kUpdate = static_cast<std::size_t>(Pipeline::kUpdate);
  nb::dict dict;
  dict["lookup_steps_armed"] = stats.steps_armed[kLookup];
  dict["lookup_steps_done"] = stats.steps_done[kLookup];
  dict["update_steps_armed"] = stats.steps_armed[kUpdate];
  dict["update_steps_done"] = stats.steps_done[kUpdate];
  dict["ids_out_of_range"] = stats.ids_out_of_range;
  dict["segments_invalid"] = stats.segments_invalid;
  dict["duplicate_slots"] = stats.duplicate_slots;
  dict["updates_skipped_pending"] = stats.skipped_pending;
  dict["updates_skipped_non_finite"] = stats.skipped_non_finite;
  dict["updates_skipped_invalid"] = stats.skipped_invalid;
  dict["last_norm"] = stats.last_norm;
  dict["table_moved"] = stats.table_moved;
  dict["bytes_sent"] = stats.bytes_sent;
  dict["lookup_wait_secs"] = stats.wait_secs[kLookup];
  dict["update_wait_secs"] = stats.wait_secs[kUpdate];
  return dict;
}

}  // namespace xrex::async_emb
