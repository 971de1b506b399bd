// L2: the communicators of one process that were made to meet each other. What
// ends one of them ends all.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

namespace xrex::async_emb {

class NcclLocalGroup {
 public:
  // What an abort does with a member: quickly, and without a call of the group.
  struct Ending {
    std::function<void()> fail;  // what it is in the middle of is void
    std::function<void()> end;   // after all members have failed
  };

  // `member` stands for the member and is not looked at. A group that was
  // aborted before ends it at once.
  void Join(const void* member, Ending ending);
  // Afterwards the member's functions neither run nor are called any more.
  void Leave(const void* member);

  // Ends all members, those that join later too. Any thread, any number of
  // times; the first reason stands.
  void Abort(std::string_view reason);
  std::optional<std::string> abort_reason() const;

 private:
  mutable std::mutex mutex_;  // guards everything below, and calls of members
  std::map<const void*, Ending> members_;
  std::optional<std::string> abort_reason_;
};

// The groups that live in this process.
class NcclLocalGroups {
 public:
  // The group of those that give the same key, which is there for as long as
  // somebody holds it.
  std::shared_ptr<NcclLocalGroup> Find(const std::string& key);

 private:
  std::mutex mutex_;
  std::map<std::string, std::weak_ptr<NcclLocalGroup>>
      groups_;  // guarded by mutex_
};

}  // namespace xrex::async_emb
