#include "phoenix/xrex/cuda/async_emb/src/id_groups.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"
#include "phoenix/xrex/cuda/async_emb/src/str_cat.hpp"

namespace xrex::async_emb {
namespace {

// How a row splits: its upper bits name a bucket and are sorted by, digit after
// digit; its lower bits are looked up in a table of the bucket's rows, which
// stays in the processor's cache.
constexpr int kDigitBits = 9;
constexpr int kMaxLowBits = 16;
constexpr int kWordBits = 64;

// A bucket whose table has more words than this for each token is sorted
// instead: looking through the table would take longer.
constexpr std::size_t kMaxWordsPerToken = 16;

// A token: the row above, its position in the batch below, so that the order
// of entries is by row first.
using Entry = std::uint64_t;
constexpr int kRowShift = 32;

constexpr Entry MakeEntry(std::uint32_t row, std::size_t position) {
  return Entry{row} << kRowShift | position;
}
constexpr std::uint32_t RowOf(Entry entry) {
  return static_cast<std::uint32_t>(entry >> kRowShift);
}
constexpr std::uint32_t PositionOf(Entry entry) {
  return static_cast<std::uint32_t>(entry);
}

int LowBits(std::int32_t vocab_rows) {
  const int bits = std::bit_width(static_cast<std::uint32_t>(vocab_rows - 1));
  return std::clamp(bits - kDigitBits, std::countr_zero(unsigned{kWordBits}),
                    kMaxLowBits);
}

// The tokens that have a row, by bucket, and within a bucket as in the batch.
class SortedByBucket {
 public:
  SortedByBucket(std::span<const std::int32_t> rows, std::int32_t vocab_rows,
                 int low_bits)
      : entries_(std::make_unique_for_overwrite<Entry[]>(rows.size())) {
    const auto last_bucket =
        static_cast<std::uint32_t>(vocab_rows - 1) >> low_bits;
    const auto from_rows = [rows](const auto& visit) {
      for (std::size_t i = 0; i < rows.size(); ++i) {
        if (rows[i] >= 0)
          visit(MakeEntry(static_cast<std::uint32_t>(rows[i]), i));
      }
    };
    size_ = SortByDigit(from_rows, low_bits);
    for (int shift = kDigitBits; (last_bucket >> shift) != 0;
         shift += kDigitBits) {
      const auto sorted = std::exchange(
          entries_, std::make_unique_for_overwrite<Entry[]>(size_));
      const auto from_sorted = [&](const auto& visit) {
        for (std::size_t i = 0; i < size_; ++i) visit(sorted[i]);
      };
      SortByDigit(from_sorted, low_bits + shift);
    }
  }

  std::span<Entry> entries() const { return {entries_.get(), size_}; }

 private:
  // Puts what `for_each` visits into entries_, in the order of one digit and
  // otherwise as visited. Returns how much there is.
  template <typename ForEach>
  std::size_t SortByDigit(const ForEach& for_each, int shift) {
    constexpr std::uint32_t kMask = (1U << kDigitBits) - 1;
    std::array<std::uint32_t, std::size_t{kMask} + 1> next{};
    for_each([&](Entry entry) { ++next[RowOf(entry) >> shift & kMask]; });
    std::uint32_t sum = 0;
    for (std::uint32_t& count : next) sum += std::exchange(count, sum);
    for_each([&](Entry entry) {
      entries_[next[RowOf(entry) >> shift & kMask]++] = entry;
    });
    return sum;
  }

  std::unique_ptr<Entry[]> entries_;
  std::size_t size_ = 0;
};

// Numbers the rows of one bucket after the other.
class Numbering {
 public:
  Numbering(int low_bits, std::span<std::int32_t> rows,
            std::span<std::int32_t> distinct)
      : low_bits_(low_bits),
        rows_(rows),
        distinct_(distinct),
        used_((std::size_t{1} << low_bits) / kWordBits),
        number_(std::make_unique_for_overwrite<std::int32_t[]>(std::size_t{1}
                                                               << low_bits)) {}

  void Add(std::span<Entry> bucket) {
    if (used_.size() > bucket.size() * kMaxWordsPerToken) {
      AddSorted(bucket);
    } else {
      AddByTable(bucket);
    }
  }

  std::int64_t num_rows() const { return num_rows_; }

 private:
  // Gives the row the next number.
  std::int32_t Append(std::uint32_t row) {
    const std::int32_t number = num_rows_++;
    const auto slot = static_cast<std::size_t>(number);
    if (slot < distinct_.size())
      distinct_[slot] = static_cast<std::int32_t>(row);
    return number;
  }

  void AddSorted(std::span<Entry> bucket) {
    std::sort(bucket.begin(), bucket.end());
    std::int32_t number = Append(RowOf(bucket.front()));
    std::uint32_t row = RowOf(bucket.front());
    for (const Entry entry : bucket) {
      if (RowOf(entry) != row) {
        row = RowOf(entry);
        number = Append(row);
      }
      rows_[PositionOf(entry)] = number;
    }
  }

  void AddByTable(std::span<const Entry> bucket) {
    const std::uint32_t low_mask = (1U << low_bits_) - 1;
    const std::uint32_t first_row = RowOf(bucket.front()) & ~low_mask;
    for (const Entry entry : bucket) {
      const std::uint32_t low = RowOf(entry) & low_mask;
      used_[low / kWordBits] |= std::uint64_t{1} << low % kWordBits;
    }
    for (std::size_t word = 0; word < used_.size(); ++word) {
      for (std::uint64_t left = std::exchange(used_[word], 0); left != 0;
           left &= left - 1) {
        const auto low = static_cast<std::uint32_t>(
            word * kWordBits + static_cast<unsigned>(std::countr_zero(left)));
        number_[low] = Append(first_row | low);
      }
    }
    for (const Entry entry : bucket)
      rows_[PositionOf(entry)] = number_[RowOf(entry) & low_mask];
  }

  int low_bits_;
  std::span<std::int32_t> rows_;
  std::span<std::int32_t> distinct_;
  std::vector<std::uint64_t> used_;  // a bit a row of the bucket; 0 in between
  std::unique_ptr<std::int32_t[]> number_;  // of a row whose bit was set
  std::int32_t num_rows_ = 0;
};

void Require(bool holds, const std::string& message) {
  if (!holds) throw AsyncEmbError(ErrorCode::kInvalidArgument, message);
}

}  // namespace

std::int64_t GroupRows(std::int32_t vocab_rows, std::span<std::int32_t> rows,
                       std::span<std::int32_t> distinct) {
  const int low_bits = LowBits(vocab_rows);
  const SortedByBucket sorted(rows, vocab_rows, low_bits);
  Numbering numbering(low_bits, rows, distinct);
  const std::span<Entry> entries = sorted.entries();
  for (std::size_t begin = 0; begin < entries.size();) {
    const std::uint32_t bucket = RowOf(entries[begin]) >> low_bits;
    std::size_t end = begin + 1;
    while (end < entries.size() && RowOf(entries[end]) >> low_bits == bucket)
      ++end;
    numbering.Add(entries.subspan(begin, end - begin));
    begin = end;
  }
  return numbering.num_rows();
}

template <typename Id>
IdGroupCounts GroupIds(std::span<const Id> ids, std::span<const bool> mask,
                       std::int32_t vocab_rows,
                       std::span<std::int32_t> unique_tokens,
                       std::span<std::int32_t> segment_ids) {
  Require(vocab_rows >= 1, StrCat("async_emb: vocab_rows is ", vocab_rows,
                                  ": it must be at least 1"));
  Require(ids.size() <= std::numeric_limits<std::int32_t>::max(),
          StrCat("async_emb: the batch has ", ids.size(),
                 " tokens: positions are int32, make it smaller"));
  Require(mask.empty() || mask.size() == ids.size(),
          StrCat("async_emb: the mask has ", mask.size(), " elements and the ",
                 "batch ", ids.size(), " tokens: give one element a token"));
  Require(segment_ids.size() == ids.size(),
          StrCat("async_emb: segment_ids has ", segment_ids.size(),
                 " elements and the batch ", ids.size(),
                 " tokens: give one element a token"));
  IdGroupCounts counts;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::int64_t row = WrapOnce(ids[i], vocab_rows);
    const bool listed = row >= 0 && row < vocab_rows;
    const bool counted = mask.empty() || mask[i];
    if (counted && !listed && counts.num_out_of_range++ == 0)
      counts.first_out_of_range = static_cast<std::int64_t>(i);
    segment_ids[i] = listed && counted ? static_cast<std::int32_t>(row) : -1;
  }
  counts.num_rows = GroupRows(vocab_rows, segment_ids, unique_tokens);
  const auto num_rows = static_cast<std::size_t>(counts.num_rows);
  Require(num_rows <= unique_tokens.size(),
          StrCat("async_emb: the batch has ", num_rows,
                 " distinct ids, but the list of distinct ids has a capacity "
                 "of ",
                 unique_tokens.size(),
                 "; raise num_unique or make the batch smaller"));
  std::ranges::fill(unique_tokens.subspan(num_rows), vocab_rows);
  return counts;
}

template IdGroupCounts GroupIds(std::span<const std::int32_t>,
                                std::span<const bool>, std::int32_t,
                                std::span<std::int32_t>,
                                std::span<std::int32_t>);
template IdGroupCounts GroupIds(std::span<const std::int64_t>,
                                std::span<const bool>, std::int32_t,
                                std::span<std::int32_t>,
                                std::span<std::int32_t>);

}  // namespace xrex::async_emb
