// L5: the Python module. Registrations and host calls, no arithmetic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_api_context.hpp"
#include "phoenix/xrex/cuda/async_emb/src/async_emb_api_ids.hpp"
#include "phoenix/xrex/cuda/async_emb/src/async_emb_ffi.hpp"
#include "phoenix/xrex/cuda/async_emb/src/comm_utils.hpp"
#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"
#include "phoenix/xrex/cuda/async_emb/src/platform_backends.hpp"

namespace xrex::async_emb {
namespace {

namespace nb = nanobind;
using nb::literals::operator""_a;

// One of the two places where our errors become somebody else's.
void Translate(const std::exception_ptr& pointer, void* /*payload*/) {
  try {
    std::rethrow_exception(pointer);
  } catch (const AsyncEmbError& error) {
    const bool bad_value = error.code() == ErrorCode::kInvalidArgument;
    PyErr_SetString(bad_value ? PyExc_ValueError : PyExc_RuntimeError,
                    error.what());
  }
}

nb::dict FfiHandlers(const std::string& platform) {
  nb::dict handlers;
  if (!Registry::Global().HasBackend(platform)) return handlers;
  for (const FfiTarget& target : FfiTargets(platform)) {
    handlers[target.name] =
        nb::capsule(target.handler, "xla._CUSTOM_CALL_TARGET");
  }
  return handlers;
}

void Check(std::int64_t context_id) {
  for (const auto& context : Registry::Global().All(context_id))
    context->Check();
}

void ResetTableBinding(std::int64_t context_id) {
  for (const auto& context : Registry::Global().All(context_id))
    context->ResetTableBinding();
}

// By device key: ranks are unique in a replica group only.
nb::dict Stats(std::int64_t context_id) {
  std::vector<std::pair<std::int64_t, ContextStats>> by_device;
  {
    nb::gil_scoped_release release;  // the last reference may go here
    for (const auto& context : Registry::Global().All(context_id)) {
      by_device.emplace_back(context->device_key(), context->stats());
    }
  }
  nb::dict dicts;
  for (const auto& [device_key, stats] : by_device) {
    dicts[nb::int_(device_key)] = StatsDict(stats);
  }
  return dicts;
}

nb::bytes TestSnapshot(std::int64_t context_id, const std::string& region,
                       std::optional<std::int64_t> device) {
  std::string bytes;
  {
    nb::gil_scoped_release release;
    Registry::ContextPtr chosen;
    for (const auto& context : Registry::Global().All(context_id)) {
      if (chosen == nullptr &&
          device.value_or(context->device_key()) == context->device_key()) {
        chosen = context;
      }
    }
    if (chosen == nullptr) {
      throw AsyncEmbError(ErrorCode::kInvalidArgument,
                          "async_emb context not initialized");
    }
    bytes = chosen->Snapshot(region);
  }
  return nb::bytes(bytes.data(), bytes.size());
}

void BindHostCalls(nb::module_& module) {
  const auto release = nb::call_guard<nb::gil_scoped_release>();
  module.def(
      "register_context",
      [](const PyContext& context) { Registry::Global().Add(context.get()); },
      "context"_a,
      "Makes a context known to the FFI handlers, under its id and device "
      "key.");
  module.def(
      "destroy_contexts",
      [](std::int64_t context_id) {
        return Registry::Global().Destroy(context_id);
      },
      "context_id"_a, release,
      "Ends and forgets the local contexts of an id; returns how many "
      "there were.");
  module.def(
      "has_contexts",
      [](std::int64_t context_id) {
        return !Registry::Global().All(context_id).empty();
      },
      "context_id"_a, release, "Whether there are local contexts of that id.");
  module.def(
      "wait_step_ready",
      [](std::int64_t context_id) {
        return Registry::Global().WaitStepReady(context_id);
      },
      "context_id"_a, release,
      "Waits for the latest lookup step of all local devices; returns the "
      "least one.");
  module.def(
      "drain",
      [](std::int64_t context_id) {
        return Registry::Global().Drain(context_id);
      },
      "context_id"_a, release,
      "Waits for the latest steps of all local devices; returns the least "
      "one.");
  module.def(
      "abort",
      [](std::int64_t context_id, const std::string& reason) {
        Registry::Global().Abort(context_id, reason);
      },
      "context_id"_a, "reason"_a = "abort() was called", release,
      "Ends every exchange; returns when no array of the caller's is touched "
      "any more.");
  module.def("check", &Check, "context_id"_a, release,
             "Raises the sticky error, if there is one.");
  module.def("reset_table_binding", &ResetTableBinding, "context_id"_a, release,
             "Forgets which table the steps work on.");
  module.def("stats", &Stats, "context_id"_a,
             "The counters of the local devices: {device key: dict}.");
  module.def("_test_snapshot", &TestSnapshot, "context_id"_a, "region"_a,
             "device"_a = nb::none(),
             "The bytes of one region of a local context's arena.");
}

}  // namespace

NB_MODULE(async_emb_api, module) {
  module.doc() = "The native part of async_emb.";
  nb::register_exception_translator(&Translate, nullptr);
  for (auto& backend : PlatformBackends()) {
    Registry::Global().AddBackend(std::move(backend));
  }
  BindContext(module);
  BindHostCalls(module);
  BindIds(module);
  module.def("ffi_handlers", &FfiHandlers, "platform"_a,
             "The FFI handlers of a platform: {target name: capsule}; empty if "
             "it is not there.");
  module.def(
      "nccl_version", [] { return NcclVersion(); },
      "The version of the NCCL library in use, as NCCL encodes it.");
  module.def(
      "nccl_library_path", [] { return NcclLibraryPath(); },
      "The path of the NCCL library in use.");
}

}  // namespace xrex::async_emb
