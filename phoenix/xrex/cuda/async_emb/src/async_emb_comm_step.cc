// The steps of a context: arming, what is enqueued in which order, finishing.
#include <array>
#include <exception>
#include <span>

#include "phoenix/xrex/cuda/async_emb/src/async_emb_comm.hpp"
#include "phoenix/xrex/cuda/async_emb/src/errors.hpp"
#include "phoenix/xrex/cuda/async_emb/src/log.hpp"
#include "phoenix/xrex/cuda/async_emb/src/str_cat.hpp"

namespace xrex::async_emb {

std::int64_t AsyncEmbContext::BeginStart(Pipeline pipeline, const void* table) {
  AdoptErrors();
  std::string moved;
  {
    std::lock_guard state(state_mutex_);
    if (failure_) return 0;
    state_.RequireStart(pipeline);
    const void* const bound = state_.table();
    if (state_.BindTable(table) != TableBinding::kMoved) {
      const std::int64_t step = state_.Arm(pipeline);
      watchdog_.OnArmed(pipeline, step);
      return step;
    }
    moved = StrCat("the table moved from ", bound, " to ", table, " before ",
                   PipelineName(pipeline), " step ", state_.armed(pipeline) + 1,
                   " on rank ", state_.rank(),
                   " while another step was in flight: XLA put a copy in "
                   "between, and updates would "
                   "be lost; donate the table, use the table that each call "
                   "returns, and let "
                   "nothing else read it between a start and its done");
  }
  Abort(moved);
  return 0;
}

void AsyncEmbContext::EndStart(Pipeline pipeline) {
  std::lock_guard state(state_mutex_);
  state_.SetEnqueued(pipeline);
}

bool AsyncEmbContext::BeginFinish(Pipeline pipeline) {
  AdoptErrors();
  std::lock_guard state(state_mutex_);
  if (failure_ && state_.phase(pipeline) != Phase::kInFlight) return false;
  state_.BeginFinish(pipeline);
  return true;
}

void AsyncEmbContext::EndFinish(Pipeline pipeline) {
  std::lock_guard state(state_mutex_);
  NoteEndLocked(pipeline);
  state_.EndFinish(pipeline);
}

template <typename Enqueue>
std::int64_t AsyncEmbContext::ArmStep(StreamRef caller, Pipeline pipeline,
                                      const void* table,
                                      const Enqueue& enqueue) {
  std::lock_guard arm(arm_mutex_);
  const std::int64_t step = BeginStart(pipeline, table);
  if (step == 0) return 0;
  Lane& of_pipeline = lane(pipeline);
  bool failed = false;
  const auto attempt = [&](const auto& work) {
    try {
      work();
    } catch (const std::exception& error) {
      // Found by this rank alone, so no handler fails: see the header.
      failed = true;
      of_pipeline.guard->Fail();
      Abort(StrCat(PipelineName(pipeline),
                   " could not be enqueued: ", error.what()));
    }
  };
  attempt([&] { enqueue(*communicator()); });
  // Also after a failure: what was enqueued before it still reads the caller's
  // arrays.
  attempt([&] { EnqueueEnd(pipeline, step); });
  if (failed) {
    RecordAfterFailure(of_pipeline, *of_pipeline.armed, caller);
    RecordAfterFailure(of_pipeline, *of_pipeline.completed,
                       resources_->stream->ref());
  }
  EndStart(pipeline);
  return step;
}

template <typename Enqueue>
void AsyncEmbContext::FinishStep(StreamRef caller, Pipeline pipeline,
                                 const Enqueue& enqueue) {
  const bool pending = BeginFinish(pipeline);
  Device& device = *resources_->device;
  Lane& of_pipeline = lane(pipeline);
  StepGuard& never_armed = *resources_->never_armed;
  try {
    if (pending) {
      device.WaitForStep(caller, *of_pipeline.guard, *of_pipeline.completed,
                         clock_);
    }
    enqueue(pending ? *of_pipeline.guard : never_armed);
    device.Record(*of_pipeline.taken, caller);
  } catch (const std::exception& error) {
    // Found by this rank alone, as above.
    Abort(StrCat(PipelineName(pipeline),
                 " could not be taken over: ", error.what()));
    try {
      enqueue(never_armed);
    } catch (const std::exception& again) {
      LogWarning(StrCat(Describe(), ": the outputs of ", PipelineName(pipeline),
                        " are not written: ", again.what()));
    }
    RecordAfterFailure(of_pipeline, *of_pipeline.taken, caller);
  }
  if (pending) EndFinish(pipeline);
}

void AsyncEmbContext::RecordAfterFailure(Lane& of_pipeline, Event& event,
                                         StreamRef stream) {
  try {
    resources_->device->Record(event, stream);
  } catch (const std::exception& error) {
    of_pipeline.is_lost = true;
    LogWarning(StrCat(Describe(),
                      ": the end of its work is not known: ", error.what()));
  }
}

void AsyncEmbContext::EnqueueEnd(Pipeline pipeline, std::int64_t step) {
  Device& device = *resources_->device;
  const StreamRef side = resources_->stream->ref();
  device.EndStep(side, *lane(pipeline).guard, step);
  device.Record(*lane(pipeline).completed, side);
}

void AsyncEmbContext::EnqueueRankCheck(StreamRef caller, Pipeline pipeline,
                                       const std::int32_t* program_rank) {
  if (program_rank == nullptr) return;
  resources_->device->CheckRank(caller, *lane(pipeline).guard, program_rank,
                                rank());
  // Of a check that has run inside the call.
  if (lane(pipeline).guard->failed()) AdoptErrors();
}

std::int64_t AsyncEmbContext::StartLookup(StreamRef caller,
                                          const LookupStart& args) {
  return ArmStep(
      caller, Pipeline::kLookup, args.table, [&](Communicator& comm) {
        EnqueueRankCheck(caller, Pipeline::kLookup, args.program_rank);
        EnqueueLookup(caller, args, comm);
      });
}

void AsyncEmbContext::EnqueueLookup(StreamRef caller, const LookupStart& args,
                                    Communicator& comm) {
  Device& device = *resources_->device;
  Lane& lookup = lane(Pipeline::kLookup);
  const StreamRef side = resources_->stream->ref();
  const std::size_t id_bytes = layout_.bytes(Region::kLocalIds);
  auto* const ids = region<std::int32_t>(Region::kLookupIds);
  const std::int64_t own_begin = rank() * spec_.tokens_per_rank;

  const CopyItem own_ids{.dst = region<std::int32_t>(Region::kLocalIds),
                         .src = args.ids,
                         .bytes = id_bytes};
  device.Copy(caller, {&own_ids, 1});
  device.Record(*lookup.armed, caller);
  device.Wait(side, *lookup.armed);
  comm.AllGather(side, *lookup.guard, region<std::int32_t>(Region::kLocalIds),
                 ids, id_bytes);
  device.GatherRows(side, *lookup.guard,
                    {.ids = ids,
                     .num_ids = spec_.num_tokens(),
                     .table = args.table,
                     .vocab_rows = args.vocab_rows,
                     .width = spec_.shard_width,
                     .out_of_range = spec_.out_of_range,
                     .count_begin = own_begin,
                     .count_end = own_begin + spec_.tokens_per_rank,
                     .rows = region<Bf16Bits>(Region::kLookupSend)});
  comm.AllToAll(side, *lookup.guard, region<Bf16Bits>(Region::kLookupSend),
                region<Bf16Bits>(Region::kLookupEmbeddings), slice_bytes());
}

void AsyncEmbContext::FinishLookup(StreamRef caller, Bf16Bits* embeddings) {
  FinishStep(caller, Pipeline::kLookup, [&](const StepGuard& guard) {
    resources_->device->CombineSlices(
        caller, guard, slice_shape(),
        region<Bf16Bits>(Region::kLookupEmbeddings), embeddings);
  });
}

std::int64_t AsyncEmbContext::StartUpdate(StreamRef caller,
                                          const UpdateStart& args) {
  return ArmStep(
      caller, Pipeline::kUpdate, args.table, [&](Communicator& comm) {
        EnqueueRankCheck(caller, Pipeline::kUpdate, args.program_rank);
        EnqueueUpdate(caller, args, comm);
      });
}

void AsyncEmbContext::EnqueueUpdate(StreamRef caller, const UpdateStart& args,
                                    Communicator& comm) {
  Device& device = *resources_->device;
  Lane& update = lane(Pipeline::kUpdate);
  const StreamRef side = resources_->stream->ref();
  const std::size_t segment_bytes = layout_.bytes(Region::kLocalSegments);
  auto* const local_segments = region<std::int32_t>(Region::kLocalSegments);
  auto* const segments = region<std::int32_t>(Region::kUpdateIndices);
  auto* const scalars = region<UpdateScalars>(Region::kUpdateScalars);
  auto* const partial_stats = region<float>(Region::kPartialStats);
  const std::int64_t own_begin = rank() * spec_.tokens_per_rank;

  const std::array<CopyItem, kMaxCopies> inputs{
      {{local_segments, args.segment_ids, segment_bytes},
       {&scalars->learning_rate, args.learning_rate, sizeof(float)},
       {&scalars->pending, args.pending, sizeof(std::int32_t)},
       {&scalars->step, args.step, sizeof(std::int32_t)}}};
  device.Copy(caller,
              std::span(inputs).first(args.params.lazy ? kMaxCopies : 3));
  device.Record(*update.armed, caller);
  device.Wait(side, *update.armed);

  comm.AllGather(side, *update.guard, local_segments, segments, segment_bytes);
  device.RouteGradients(side, *update.guard, slice_shape(), args.grads,
                        region<Bf16Bits>(Region::kUpdateSend));
  comm.AllToAll(side, *update.guard, region<Bf16Bits>(Region::kUpdateSend),
                region<Bf16Bits>(Region::kUpdateGradients), slice_bytes());
  device.CheckUpdate(side, *update.guard,
                     {.segments = segments,
                      .num_tokens = spec_.num_tokens(),
                      .count_begin = own_begin,
                      .count_end = own_begin + spec_.tokens_per_rank,
                      .unique_tokens = args.unique_tokens,
                      .num_unique = spec_.num_unique,
                      .vocab_rows = args.vocab_rows,
                      .check_duplicates = spec_.check_inputs,
                      .scalars = scalars,
                      .flag = partial_stats + spec_.num_unique});
  device.SumSegments(side, *update.guard,
                     {.segments = segments,
                      .grads = region<Bf16Bits>(Region::kUpdateGradients),
                      .num_tokens = spec_.num_tokens(),
                      .num_unique = spec_.num_unique,
                      .width = spec_.shard_width,
                      .deterministic = spec_.deterministic,
                      .accum = region<float>(Region::kUpdateGradAccum),
                      .partial_stats = partial_stats});
  // The last exchange: from here on the step takes place on all ranks, or it
  // has failed on all.
  comm.AllReduceSum(
      side, *update.guard, partial_stats, region<float>(Region::kUpdateStats),
      static_cast<std::size_t>(spec_.num_unique) + 1, spec_.deterministic);
  EnqueueApply(args);
}

void AsyncEmbContext::EnqueueApply(const UpdateStart& args) {
  resources_->device->ApplyAdagrad(
      resources_->stream->ref(), *lane(Pipeline::kUpdate).guard,
      {.accum = region<float>(Region::kUpdateGradAccum),
       .stats = region<float>(Region::kUpdateStats),
       .unique_tokens = args.unique_tokens,
       .num_unique = spec_.num_unique,
       .width = spec_.shard_width,
       .emb_width = spec_.emb_width,
       .vocab_rows = args.vocab_rows,
       .params = args.params,
       .scalars = region<UpdateScalars>(Region::kUpdateScalars),
       .table = args.table,
       .row_state = args.row_state,
       .last_step = args.last_step,
       .result = region<UpdateResult>(Region::kUpdateResult)});
}

void AsyncEmbContext::FinishUpdate(StreamRef caller, float* norm,
                                   std::int32_t* valid) {
  FinishStep(caller, Pipeline::kUpdate, [&](const StepGuard& guard) {
    resources_->device->WriteResult(caller, guard,
                                    region<UpdateResult>(Region::kUpdateResult),
                                    norm, valid);
  });
}

void AsyncEmbContext::WritePin(StreamRef caller, float* pin) {
  try {
    resources_->device->Zero(caller, pin, sizeof(float));
  } catch (const std::exception& error) {
    // Found by this rank alone, as above; nobody reads a pin's value.
    Abort(StrCat("a pin could not be written: ", error.what()));
  }
}

SliceShape AsyncEmbContext::slice_shape() const {
  return {.world_size = spec_.world_size,
          .tokens_per_rank = spec_.tokens_per_rank,
          .shard_width = spec_.shard_width};
}

std::size_t AsyncEmbContext::slice_bytes() const {
  return static_cast<std::size_t>(spec_.tokens_per_rank * spec_.shard_width) *
         sizeof(Bf16Bits);
}

}  // namespace xrex::async_emb
