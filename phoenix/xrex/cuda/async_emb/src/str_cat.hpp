// L0: message building. <format> is not in every C++20 library that we build
// with.
#pragma once

#include <sstream>
#include <string>

namespace xrex::async_emb {

// The arguments as text, one after the other.
template <typename... Args>
std::string StrCat(const Args&... args) {
  std::ostringstream text;
  (text << ... << args);
  return std::move(text).str();
}

}  // namespace xrex::async_emb
