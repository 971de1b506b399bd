// L2: what the core needs of a communicator of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "phoenix/xrex/cuda/async_emb/src/clock.hpp"
#include "phoenix/xrex/cuda/async_emb/src/device.hpp"

namespace xrex::async_emb {

// Collectives are enqueued in the same order on every rank. One that cannot be
// completed, because the communicator was aborted, fails its step's guard. On
// the host one completes on all ranks or on none; on a device it may complete
// on some ranks before an abort reaches the others.
class Communicator {
 public:
  virtual ~Communicator() = default;

  // Blocks until every rank has connected, or throws kTimeout at `deadline`, or
  // kAborted. `payloads[i]` is what rank i made for this rank. `arena` holds
  // all send and receive buffers.
  virtual void Connect(const std::vector<std::string>& payloads,
                       std::shared_ptr<std::byte> arena, const Clock& clock,
                       Clock::TimePoint deadline) = 0;

  // send [bytes] -> recv [R * bytes], in rank order.
  virtual void AllGather(StreamRef stream, StepGuard& guard, const void* send,
                         void* recv, std::size_t bytes) = 0;

  // send [R, bytes] -> recv [R, bytes]: block i of `send` becomes this rank's
  // block at rank i. They do not overlap, but that a single rank may give the
  // same memory twice.
  virtual void AllToAll(StreamRef stream, StepGuard& guard, const void* send,
                        void* recv, std::size_t bytes) = 0;

  // Sum over ranks, bit-identical on all of them. `send` and `recv` do not
  // overlap. With `fixed_order` by the pairwise tree over ranks, neighbours
  // first.
  virtual void AllReduceSum(StreamRef stream, StepGuard& guard,
                            const float* send, float* recv, std::size_t count,
                            bool fixed_order) = 0;

  // The reason for which the communicator was aborted or has failed by itself,
  // if so. Never waits.
  virtual std::optional<std::string> PollError() const = 0;

  // What an exchange that does not end waits for, e.g. "rank 1 has not
  // arrived"; may be empty.
  virtual std::string DescribeStall() const = 0;

  // Ends every exchange that is not complete, on this rank and on the peers in
  // this process; peers in other processes find that theirs does not end. Any
  // thread, any number of times; the first reason stands.
  virtual void Abort(std::string_view reason) = 0;
};

}  // namespace xrex::async_emb
