// L0: the few lines that the core says by itself, on standard error.
#pragma once

#include <cstdio>
#include <string>

namespace xrex::async_emb {

inline void LogLine(const char* level, const std::string& message) {
  std::fprintf(stderr, "[async_emb] %s: %s\n", level, message.c_str());
}

inline void LogInfo(const std::string& message) { LogLine("info", message); }
inline void LogWarning(const std::string& message) {
  LogLine("warning", message);
}

}  // namespace xrex::async_emb
