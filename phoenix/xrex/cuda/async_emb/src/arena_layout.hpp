// L1: where each region of a context's one allocation lies. Pure: sizes and
// offsets only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "phoenix/xrex/cuda/async_emb/src/pipeline_spec.hpp"

namespace xrex::async_emb {

// R, T, N, W, w, U as in PipelineSpec.
enum class Region : std::uint8_t {
  // Regions that a snapshot can show. They never share space, but that a single
  // rank receives what it sends where it lies.
  kLookupIds,         // i32 [N]        ids of all ranks, rank after rank
  kLookupSend,        // bf16 [N, w]    own columns of every token's row
  kLookupEmbeddings,  // bf16 [R, T, w] own tokens' columns, rank after rank
  kUpdateIndices,     // i32 [N]        segment index of every token
  kUpdateSend,  // bf16 [R, T, w] own tokens' gradients, cut into column shards
  kUpdateGradients,  // bf16 [N, w]    every token's gradient, own columns
  kUpdateStats,  // f32 [U + 1]    S over all W columns, then the summed verdict
                 // flag
  kUpdateGradAccum,  // f32 [U, w]     A, the segment sums
  // Inner regions.
  kLocalIds,       // i32 [T]      own ids, copied when the step is armed
  kLocalSegments,  // i32 [T]      own segment indices, copied when the step is
                   // armed
  kPartialStats,   // f32 [U + 1]  own columns' share of S, then the own verdict
                   // flag
  kUpdateScalars,  // UpdateScalars, copied when the step is armed
  kUpdateResult,   // UpdateResult
  kScratch,        // the backend's own, disjoint lifetimes may share it
};
inline constexpr int kNumRegions = static_cast<int>(Region::kScratch) + 1;
inline constexpr int kNumSnapshotRegions =
    static_cast<int>(Region::kUpdateGradAccum) + 1;
inline constexpr std::size_t kArenaAlignment = 128;

// The name that a snapshot request uses, e.g. "lookup_ids".
std::string_view RegionName(Region region);

// The snapshot region of that name, or nothing.
std::optional<Region> FindSnapshotRegion(std::string_view name);

// All names that FindSnapshotRegion knows, separated by ", ".
std::string SnapshotRegionNames();

class ArenaLayout {
 public:
  // `scratch_bytes` is what the backend wants for itself. Throws
  // AsyncEmbError(kInvalidArgument) when a size does not fit 63 bits.
  ArenaLayout(const PipelineSpec& spec, std::size_t scratch_bytes);

  std::size_t offset(Region region) const { return entry(region).offset; }

  // Bytes that belong to the region, without the padding behind it.
  std::size_t bytes(Region region) const { return entry(region).bytes; }

  // Bytes that a snapshot of the region shows: update_stats without its flag.
  std::size_t snapshot_bytes(Region region) const;

  // Bytes of the whole arena, a multiple of kArenaAlignment.
  std::size_t total_bytes() const { return total_bytes_; }

 private:
  struct Entry {
    std::size_t offset = 0;
    std::size_t bytes = 0;
  };
  const Entry& entry(Region region) const {
    return entries_[static_cast<std::size_t>(region)];
  }

  std::array<Entry, kNumRegions> entries_{};
  std::size_t total_bytes_ = 0;
};

}  // namespace xrex::async_emb
