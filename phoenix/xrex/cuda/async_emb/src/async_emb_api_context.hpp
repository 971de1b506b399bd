// L5: the Python class of the native context.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_comm.hpp"

namespace xrex::async_emb {

using IdArray = nanobind::ndarray<const std::int32_t, nanobind::ndim<1>,
                                  nanobind::c_contig, nanobind::device::cpu>;
using Bf16Array = nanobind::ndarray<const Bf16Bits, nanobind::ndim<2>,
                                    nanobind::c_contig, nanobind::device::cpu>;

// A native context in Python's hands. On the host backend it can arm lookups on
// NumPy arrays.
class PyContext {
 public:
  explicit PyContext(std::shared_ptr<AsyncEmbContext> context)
      : context_(std::move(context)) {}
  ~PyContext() { Close(); }

  PyContext(const PyContext&) = delete;
  PyContext& operator=(const PyContext&) = delete;

  // Throws kFailedPrecondition after Close. To be called with the GIL; the
  // reference keeps the context for a caller that then lets the GIL go.
  std::shared_ptr<AsyncEmbContext> get() const;

  // Ends a lookup that is armed, then lets the context go; calls under way in
  // other threads end on their own references. Any number of times.
  void Close();

  std::int64_t ArmLookup(const IdArray& ids, const nanobind::object& table);
  nanobind::object ConsumeLookup();

 private:
  std::shared_ptr<AsyncEmbContext> RequireHost() const;

  std::optional<Bf16Array> table_;  // of the lookup that is armed
  std::shared_ptr<AsyncEmbContext> context_;
};

// Adds class `AsyncEmbContext` to the module.
void BindContext(nanobind::module_& module);

// The counters as the dict that Python makes its RankStats of.
nanobind::dict StatsDict(const ContextStats& stats);

}  // namespace xrex::async_emb
