// L5: the Python calls on ids in host memory. They need no context.
#pragma once

#include <nanobind/nanobind.h>

namespace xrex::async_emb {

// Adds `group_ids` and `plan_shared_rows` to the module.
void BindIds(nanobind::module_& module);

}  // namespace xrex::async_emb
