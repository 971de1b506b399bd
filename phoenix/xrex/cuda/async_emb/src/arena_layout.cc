#include "phoenix/xrex/cuda/async_emb/src/arena_layout.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"

namespace xrex::async_emb {
namespace {

constexpr std::int64_t kIndexBytes = 4;   // i32
constexpr std::int64_t kFloatBytes = 4;   // f32
constexpr std::int64_t kBf16Bytes = 2;    // bf16
constexpr std::int64_t kScalarBytes = 4;  // f32 or i32
constexpr std::int64_t kUpdateScalars = 3;
constexpr std::int64_t kUpdateResults = 2;

constexpr std::array<std::string_view, kNumRegions> kRegionNames = {
    "lookup_ids",     "lookup_send",       "lookup_embeddings",
    "update_indices", "update_send",       "update_gradients",
    "update_stats",   "update_grad_accum", "local_ids",
    "local_segments", "partial_stats",     "update_scalars",
    "update_result",  "scratch",
};

[[noreturn]] void RejectSize(Region region) {
  throw AsyncEmbError(ErrorCode::kInvalidArgument,
                      "async_emb: the arena up to region " +
                          std::string(RegionName(region)) +
                          " must be smaller than 2^63 bytes: lower "
                          "tokens_per_rank, emb_width or "
                          "num_unique");
}

std::size_t Product(Region region,
                    std::initializer_list<std::int64_t> factors) {
  std::int64_t product = 1;
  for (const std::int64_t factor : factors) {
    if (__builtin_mul_overflow(product, factor, &product)) RejectSize(region);
  }
  return static_cast<std::size_t>(product);
}

std::size_t RegionBytes(const PipelineSpec& spec, Region region,
                        std::size_t scratch_bytes) {
  const std::int64_t ranks = spec.world_size;
  const std::int64_t tokens = spec.tokens_per_rank;
  switch (region) {
    case Region::kLookupIds:
    case Region::kUpdateIndices:
      return Product(region, {ranks, tokens, kIndexBytes});
    case Region::kLookupSend:
    case Region::kLookupEmbeddings:
    case Region::kUpdateSend:
    case Region::kUpdateGradients:
      return Product(region, {ranks, tokens, spec.shard_width, kBf16Bytes});
    case Region::kUpdateStats:
    case Region::kPartialStats:
      return Product(region, {spec.num_unique + 1, kFloatBytes});
    case Region::kUpdateGradAccum:
      return Product(region, {spec.num_unique, spec.shard_width, kFloatBytes});
    case Region::kLocalIds:
    case Region::kLocalSegments:
      return Product(region, {tokens, kIndexBytes});
    case Region::kUpdateScalars:
      return kUpdateScalars * kScalarBytes;
    case Region::kUpdateResult:
      return kUpdateResults * kScalarBytes;
    case Region::kScratch:
      return scratch_bytes;
  }
  throw AsyncEmbError(ErrorCode::kInternal, "async_emb: unknown arena region");
}

// The region that holds, before an all-to-all, what this one holds after it.
std::optional<Region> SentAs(Region region) {
  if (region == Region::kLookupEmbeddings) return Region::kLookupSend;
  if (region == Region::kUpdateGradients) return Region::kUpdateSend;
  return std::nullopt;
}

// The first offset at or behind offset + bytes that is aligned.
std::size_t AlignedEnd(Region region, std::size_t offset, std::size_t bytes) {
  constexpr std::size_t kMaxBytes = std::numeric_limits<std::int64_t>::max();
  std::size_t end = 0;
  if (__builtin_add_overflow(offset, bytes, &end) ||
      end > kMaxBytes - (kArenaAlignment - 1)) {
    RejectSize(region);
  }
  return (end + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
}

}  // namespace

std::string_view RegionName(Region region) {
  return kRegionNames[static_cast<std::size_t>(region)];
}

std::optional<Region> FindSnapshotRegion(std::string_view name) {
  for (int i = 0; i < kNumSnapshotRegions; ++i) {
    const auto region = static_cast<Region>(i);
    if (RegionName(region) == name) return region;
  }
  return std::nullopt;
}

std::string SnapshotRegionNames() {
  std::string names;
  for (int i = 0; i < kNumSnapshotRegions; ++i) {
    if (i > 0) names += ", ";
    names += RegionName(static_cast<Region>(i));
  }
  return names;
}

ArenaLayout::ArenaLayout(const PipelineSpec& spec, std::size_t scratch_bytes) {
  for (int i = 0; i < kNumRegions; ++i) {
    const auto region = static_cast<Region>(i);
    Entry& entry = entries_[static_cast<std::size_t>(i)];
    entry.bytes = RegionBytes(spec, region, scratch_bytes);
    if (const auto sent = SentAs(region); sent && spec.world_size == 1) {
      entry.offset = offset(*sent);
      continue;
    }
    entry.offset = total_bytes_;
    total_bytes_ = AlignedEnd(region, entry.offset, entry.bytes);
  }
}

std::size_t ArenaLayout::snapshot_bytes(Region region) const {
  const std::size_t all_bytes = bytes(region);
  return region == Region::kUpdateStats ? all_bytes - kFloatBytes : all_bytes;
}

}  // namespace xrex::async_emb
