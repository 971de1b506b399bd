// L3: the contexts of this process and the backends they run on. The only
// process-wide table.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_comm.hpp"
#include "phoenix/xrex/cuda/async_emb/src/backend.hpp"

namespace xrex::async_emb {

// The time-out of a step: the option, else XAI_ASYNC_EMB_TIMEOUT_SECONDS, else
// the backend's own. Throws kInvalidArgument for one that is not a positive
// integer.
std::chrono::seconds ResolveTimeout(std::optional<std::int64_t> option_secs,
                                    const Backend& backend);

// A time-out that a caller gave. Throws kInvalidArgument likewise.
std::chrono::seconds CheckTimeout(std::int64_t secs);

class Registry {
 public:
  using ContextPtr = std::shared_ptr<AsyncEmbContext>;

  static Registry& Global();

  // A backend lives as long as the process. kInvalidArgument for a platform
  // that is not there.
  void AddBackend(std::unique_ptr<Backend> backend);
  Backend& backend(std::string_view platform);
  bool HasBackend(std::string_view platform);

  // Under its platform, context id and device key. kFailedPrecondition if that
  // key is taken.
  void Add(ContextPtr context);

  // Null if there is none. `device_key` is a key that the platform reports,
  // never an index.
  ContextPtr Find(std::string_view platform, std::int64_t context_id,
                  std::int64_t device_key);

  // The local contexts of an id, by rank.
  std::vector<ContextPtr> All(std::int64_t context_id);

  // Takes the local contexts of an id out and closes them, in 30 s at most;
  // returns how many there were.
  std::int64_t Destroy(std::int64_t context_id);

  // Takes the local contexts of an id out; the caller holds the last references
  // but for calls that are under way.
  std::vector<ContextPtr> Remove(std::int64_t context_id);

  // The waits of one id over all local devices: every device is waited for,
  // then the first error is thrown, or the least step returned; 0 if there is
  // no such context.
  std::int64_t WaitStepReady(std::int64_t context_id);
  std::int64_t Drain(std::int64_t context_id);

  // Aborts all local contexts of an id, and returns when none touches a
  // caller's array any more.
  void Abort(std::int64_t context_id, std::string_view reason);

 private:
  using Key = std::tuple<std::string, std::int64_t, std::int64_t>;

  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<Backend>, std::less<>>
      backends_;                        // guarded by mutex_
  std::map<Key, ContextPtr> contexts_;  // guarded by mutex_
};

}  // namespace xrex::async_emb
