#include "phoenix/xrex/cuda/async_emb/src/nccl_local_group.hpp"

#include <utility>

namespace xrex::async_emb {

void NcclLocalGroup::Join(const void* member, Ending ending) {
  std::lock_guard lock(mutex_);
  const Ending& joined =
      members_.insert_or_assign(member, std::move(ending)).first->second;
  if (!abort_reason_) return;
  joined.fail();
  joined.end();
}

void NcclLocalGroup::Leave(const void* member) {
  std::lock_guard lock(mutex_);
  members_.erase(member);
}

void NcclLocalGroup::Abort(std::string_view reason) {
  std::lock_guard lock(mutex_);
  if (abort_reason_) return;
  abort_reason_ = reason;
  for (const auto& [member, ending] : members_) ending.fail();
  for (const auto& [member, ending] : members_) ending.end();
}

std::optional<std::string> NcclLocalGroup::abort_reason() const {
  std::lock_guard lock(mutex_);
  return abort_reason_;
}

std::shared_ptr<NcclLocalGroup> NcclLocalGroups::Find(const std::string& key) {
  std::lock_guard lock(mutex_);
  std::erase_if(groups_,
                [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<NcclLocalGroup>& known = groups_[key];
  std::shared_ptr<NcclLocalGroup> group = known.lock();
  if (group == nullptr) {
    group = std::make_shared<NcclLocalGroup>();
    known = group;
  }
  return group;
}

}  // namespace xrex::async_emb
