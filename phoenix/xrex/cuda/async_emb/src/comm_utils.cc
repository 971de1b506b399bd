#include "phoenix/xrex/cuda/async_emb/src/comm_utils.hpp"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <exception>
#include <utility>

#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"
#include "phoenix/xrex/cuda/async_emb/src/log.hpp"
#include "phoenix/xrex/cuda/async_emb/src/str_cat.hpp"

namespace xrex::async_emb {
namespace {

constexpr const char* kTimeoutVariable = "XAI_ASYNC_EMB_TIMEOUT_SECONDS";

// A year: nanoseconds of it still fit 64 bits with room to add.
constexpr std::int64_t kMaxTimeoutSecs = 366LL * 24 * 3600;

std::chrono::seconds RequireTimeout(std::int64_t secs, std::string_view source,
                                    std::string_view value) {
  if (secs < 1 || secs > kMaxTimeoutSecs) {
    throw AsyncEmbError(
        ErrorCode::kInvalidArgument,
        StrCat("async_emb: ", source, " is '", value,
               "': it must be a whole number of seconds from 1 to ",
               kMaxTimeoutSecs));
  }
  return std::chrono::seconds(secs);
}

std::chrono::steady_clock::time_point TeardownLimit() {
  return std::chrono::steady_clock::now() + std::chrono::seconds(30);
}

template <typename Wait>
std::int64_t LeastStep(const std::vector<Registry::ContextPtr>& contexts,
                       const Wait& wait) {
  // A context that has failed says why before another is waited for.
  for (const Registry::ContextPtr& context : contexts) context->Check();
  std::optional<std::int64_t> least;
  std::exception_ptr first_error;
  for (const Registry::ContextPtr& context : contexts) {
    try {
      const std::int64_t step = wait(*context);
      least = std::min(least.value_or(step), step);
    } catch (const AsyncEmbError&) {
      if (first_error == nullptr) first_error = std::current_exception();
    }
  }
  if (first_error != nullptr) std::rethrow_exception(first_error);
  return least.value_or(0);
}

}  // namespace

std::chrono::seconds CheckTimeout(std::int64_t secs) {
  return RequireTimeout(secs, "timeout_secs", StrCat(secs));
}

std::chrono::seconds ResolveTimeout(std::optional<std::int64_t> option_secs,
                                    const Backend& backend) {
  if (option_secs) return CheckTimeout(*option_secs);
  const char* text = std::getenv(kTimeoutVariable);
  if (text == nullptr) return backend.default_timeout();
  const std::string_view value(text);
  std::int64_t secs = 0;
  const auto [end, error] =
      std::from_chars(value.data(), value.data() + value.size(), secs);
  const bool whole = error == std::errc() && end == value.data() + value.size();
  return RequireTimeout(whole ? secs : 0, kTimeoutVariable, value);
}

Registry& Registry::Global() {
  // Never destroyed: handlers may run until the process ends.
  static Registry* const registry = new Registry;
  return *registry;
}

void Registry::AddBackend(std::unique_ptr<Backend> backend) {
  std::lock_guard lock(mutex_);
  const std::string platform(backend->platform());
  backends_.try_emplace(platform, std::move(backend));
}

Backend& Registry::backend(std::string_view platform) {
  std::lock_guard lock(mutex_);
  const auto found = backends_.find(platform);
  if (found != backends_.end()) return *found->second;
  std::string known;
  for (const auto& [name, backend] : backends_)
    known += (known.empty() ? "" : ", ") + name;
  throw AsyncEmbError(ErrorCode::kInvalidArgument,
                      StrCat("async_emb: platform '", platform,
                             "' is not in this build: it has ", known,
                             "; for GPUs build with --config=cuda"));
}

bool Registry::HasBackend(std::string_view platform) {
  std::lock_guard lock(mutex_);
  return backends_.contains(platform);
}

void Registry::Add(ContextPtr context) {
  std::lock_guard lock(mutex_);
  const Key key{context->platform(), context->context_id(),
                context->device_key()};
  if (!contexts_.emplace(key, std::move(context)).second) {
    throw AsyncEmbError(
        ErrorCode::kFailedPrecondition,
        StrCat("async_emb: context ", std::get<1>(key), " exists on device ",
               std::get<2>(key), " already: destroy it first"));
  }
}

Registry::ContextPtr Registry::Find(std::string_view platform,
                                    std::int64_t context_id,
                                    std::int64_t device_key) {
  std::lock_guard lock(mutex_);
  const auto found = contexts_.find(Key{platform, context_id, device_key});
  return found == contexts_.end() ? nullptr : found->second;
}

std::vector<Registry::ContextPtr> Registry::All(std::int64_t context_id) {
  std::vector<ContextPtr> contexts;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [key, context] : contexts_) {
      if (std::get<1>(key) == context_id) contexts.push_back(context);
    }
  }
  std::stable_sort(contexts.begin(), contexts.end(),
                   [](const ContextPtr& a, const ContextPtr& b) {
                     return a->rank() < b->rank();
                   });
  return contexts;
}

std::vector<Registry::ContextPtr> Registry::Remove(std::int64_t context_id) {
  std::vector<ContextPtr> contexts;
  std::lock_guard lock(mutex_);
  for (auto entry = contexts_.begin(); entry != contexts_.end();) {
    if (std::get<1>(entry->first) == context_id) {
      contexts.push_back(std::move(entry->second));
      entry = contexts_.erase(entry);
    } else {
      ++entry;
    }
  }
  return contexts;
}

std::int64_t Registry::WaitStepReady(std::int64_t context_id) {
  return LeastStep(All(context_id),
                   [](AsyncEmbContext& c) { return c.WaitStepReady(); });
}

std::int64_t Registry::Drain(std::int64_t context_id) {
  return LeastStep(All(context_id),
                   [](AsyncEmbContext& c) { return c.Drain(); });
}

void Registry::Abort(std::int64_t context_id, std::string_view reason) {
  const std::vector<ContextPtr> contexts = All(context_id);
  for (const ContextPtr& context : contexts) context->Abort(reason);
  const auto limit = TeardownLimit();
  for (const ContextPtr& context : contexts) {
    if (!context->AwaitQuiet(limit)) {
      LogWarning(StrCat("context ", context_id, " rank ", context->rank(),
                        " still runs 30 s after its abort"));
    }
  }
}

std::int64_t Registry::Destroy(std::int64_t context_id) {
  const std::vector<ContextPtr> contexts = Remove(context_id);
  const auto limit = TeardownLimit();  // one for all, not one for each
  for (const ContextPtr& context : contexts) context->Close(limit);
  return static_cast<std::int64_t>(contexts.size());
}

}  // namespace xrex::async_emb
