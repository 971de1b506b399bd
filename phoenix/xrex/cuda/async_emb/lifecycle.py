"""Bringing contexts up and down, and the host calls that look after them."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import logging
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from xrex.cuda.async_emb import comm_utils, native
from xrex.cuda.async_emb.comm_utils import LocalRank, Payloads, ProcessExchange
from xrex.cuda.async_emb.handle import AsyncEmbContextHandle, context_name
from xrex.cuda.async_emb.operands import require_single_process_cpu

_logger = logging.getLogger(__name__)

# How long ranks wait for each other in `initialize`, whatever the time-out of a step: a slow one
# may still be reading its model.
_BRING_UP_TIMEOUT_SECS = 1800
# How long `destroy` waits for running programs, which may hang.
_DESTROY_TIMEOUT_SECS = 30.0
# What the native module says to ranks that fail because another one did.
_ABORTED = "async_emb communicator aborted"

# Serialises initialize and destroy, and guards those below.
_lock = threading.Lock()
_generations: collections.Counter[int] = collections.Counter()
_exchanges: dict[int, ProcessExchange] = {}
_warned_of_pool = False


class RankStats(NamedTuple):
    """Counters of one rank, monotone since `initialize`.

    Attributes:
        lookup_steps_armed: lookups started.
        lookup_steps_done: lookups whose exchange completed and whose done call ran.
        update_steps_armed: updates started.
        update_steps_done: likewise of updates; skipped ones count, failed ones do not.
        ids_out_of_range: this rank's own tokens whose id had no row.
        segments_invalid: this rank's own tokens whose segment index was neither -1 nor a slot.
        duplicate_slots: slots that named a row which another slot of the same update named.
        updates_skipped_pending: updates skipped because nothing was pending.
        updates_skipped_non_finite: updates skipped for the norm or the learning rate.
        updates_skipped_invalid: updates skipped for invalid segments or duplicate slots.
        last_norm: norm of the summed gradients of the last update.
        table_moved: times that a start found the table at another address.
        bytes_sent: bytes that left this rank in steps that did not fail.
        lookup_wait_secs: seconds for which done calls of lookups held the caller back: the part of
            the exchange that nothing hid. On CPU devices, for which the calling thread was blocked;
            on a GPU, for which the caller's stream stood still until the step's end, counted when
            the done call has run there.
        update_wait_secs: likewise of updates.
    """

    lookup_steps_armed: int
    lookup_steps_done: int
    update_steps_armed: int
    update_steps_done: int
    ids_out_of_range: int
    segments_invalid: int
    duplicate_slots: int
    updates_skipped_pending: int
    updates_skipped_non_finite: int
    updates_skipped_invalid: int
    last_norm: float
    table_moved: int
    bytes_sent: int
    lookup_wait_secs: float
    update_wait_secs: float

    @property
    def wait_secs(self) -> float:
        """Seconds for which done calls of either kind held the caller back."""
        return self.lookup_wait_secs + self.update_wait_secs


def initialize(ctx: AsyncEmbContextHandle) -> None:
    """Brings up one native context on each local device; returns when every rank is ready.

    Collective: every process that owns devices of the mesh calls it, equally often, and several
    handles in the same order. Does nothing if the contexts are up already. If one rank fails, all
    contexts of the handle are destroyed, in all processes, and each process raises an error that
    names the rank.

    Raises:
        ValueError: a rank was refused (for example the number of ranks), or the mesh is made of CPU
            devices of several processes.
        RuntimeError: a rank failed or did not come within half an hour; or the contexts are up but
            failed earlier: `destroy` them first; or, on GPUs, an environment variable that NCCL or
            CUDA has read by now breaks its rule.
        ImportError: the native module is not built for the mesh's platform.
    """
    if ctx.platform == "CUDA":
        native.require_gpu_environment()
    require_single_process_cpu(ctx)
    api = native.load(ctx.platform)
    with _lock:
        if api.has_contexts(ctx.context_id):
            try:
                api.check(ctx.context_id)
            except RuntimeError as error:
                raise RuntimeError(
                    f"{error}; call destroy(ctx), then initialize(ctx) again"
                ) from error
            return
        if ctx.platform == "cpu":
            _warn_of_small_pool()
        _generations[ctx.context_id] += 1
        try:
            _bring_up(api, ctx, _process_exchange(ctx))
        except BaseException:
            api.destroy_contexts(ctx.context_id)
            raise


@contextlib.contextmanager
def initialized(ctx: AsyncEmbContextHandle) -> Iterator[AsyncEmbContextHandle]:
    """Keeps the contexts of a handle up inside a with block: `initialize`, then `destroy`.

    Also destroys contexts that were up before the block.

    Raises:
        ValueError: as for `initialize`.
        RuntimeError: likewise.
        ImportError: likewise.
    """
    initialize(ctx)
    try:
        yield ctx
    finally:
        destroy(ctx)


def destroy(ctx: AsyncEmbContextHandle) -> None:
    """Takes the local contexts down. Does nothing if there are none.

    An equal handle may be initialised again; compiled programs stay valid. Waits for the programs
    that this thread has started, of whatever context, but for half a minute at most. `abort` first
    where one may hang: programs that lose their contexts half-way fail.

    Raises:
        ValueError: the mesh is made of CPU devices of several processes.
        ImportError: the native module is not built.
    """
    api = _api(ctx)
    # A program that loses its contexts half-way fails on some devices only; the others would wait
    # for them in the next collective, until XLA ends the process.
    if not _wait_for(_running_programs(), _DESTROY_TIMEOUT_SECS):
        _logger.warning(
            "async_emb: programs are still running after %g s; destroying context %d (%r) without "
            "waiting any longer: call abort(ctx) before destroy(ctx) where a step may hang",
            _DESTROY_TIMEOUT_SECS,
            ctx.context_id,
            context_name(ctx),
        )
    with _lock:
        api.destroy_contexts(ctx.context_id)


def check(ctx: AsyncEmbContextHandle) -> None:
    """Raises the error that a local context met on its own, if any.

    Raises:
        RuntimeError: a step timed out, the communicator failed or was aborted, or the table moved
            while a step was in flight.
        ValueError: the mesh is made of CPU devices of several processes.
        ImportError: the native module is not built.
    """
    _api(ctx).check(ctx.context_id)


def stats(ctx: AsyncEmbContextHandle) -> dict[int, RankStats]:
    """Returns the counters of the local ranks by rank. Never waits; works after an abort too.

    With several replica groups ranks are counted group after group, as in `flatten_replicas`.

    Raises:
        ValueError: the mesh is made of CPU devices of several processes.
        ImportError: the native module is not built.
    """
    by_device = _api(ctx).stats(ctx.context_id)
    return {
        member.group * ctx.group_size + member.rank: RankStats(**by_device[member.device_key])
        for member in comm_utils.local_ranks(ctx.mesh, ctx.table_axis)
        if member.device_key in by_device
    }


def wait_step_ready(ctx: AsyncEmbContextHandle) -> int:
    """Waits for the armed lookup of every local device and returns the least step number.

    0 if there is no context or nothing was ever armed.

    Raises:
        RuntimeError: a context failed, or the step's time-out passed.
        ValueError: the mesh is made of CPU devices of several processes.
        ImportError: the native module is not built.
    """
    return _api(ctx).wait_step_ready(ctx.context_id)


def drain(ctx: AsyncEmbContextHandle) -> int:
    """Waits until nothing is in flight on any local device and returns the least step number.

    0 if there is no context or nothing was ever armed.

    Raises:
        RuntimeError: a context failed, or a step's time-out passed.
        ValueError: the mesh is made of CPU devices of several processes.
        ImportError: the native module is not built.
    """
    return _api(ctx).drain(ctx.context_id)


def abort(ctx: AsyncEmbContextHandle) -> None:
    """Ends all exchanges of the local contexts; every later call raises. Safe from any thread.

    Raises:
        ValueError: the mesh is made of CPU devices of several processes.
        ImportError: the native module is not built.
    """
    _api(ctx).abort(ctx.context_id)


def reset_table_binding(ctx: AsyncEmbContextHandle) -> None:
    """Makes the local contexts forget where the table lies, as before a checkpoint is restored.

    Raises:
        RuntimeError: something is in flight.
        ValueError: the mesh is made of CPU devices of several processes.
        ImportError: the native module is not built.
    """
    _api(ctx).reset_table_binding(ctx.context_id)


def _api(ctx: AsyncEmbContextHandle) -> Any:
    """Returns the native module, for a mesh that it can serve."""
    require_single_process_cpu(ctx)
    return native.load()


def _running_programs() -> list[Any]:
    """Returns what becomes ready when the programs that this thread has started are done.

    JAX keeps one token for each device and thread; `jax.effects_barrier`, the public way, waits for
    those of its own thread without bound, hence the private module.
    """
    from jax._src import dispatch

    tokens = dispatch.runtime_tokens
    return [*tokens.current_tokens.values(), *tokens.output_runtime_tokens.values()]


def _wait_for(tokens: Sequence[Any], timeout_secs: float) -> bool:
    """Returns whether all tokens became ready, or failed, in time."""

    def wait() -> None:
        for token in tokens:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # raised where results are used
                token.block_until_ready()

    waiter = threading.Thread(target=wait, name="async_emb destroy", daemon=True)
    waiter.start()
    waiter.join(timeout_secs)
    return not waiter.is_alive()


class _RankError(Exception):
    """What went wrong on one rank or in one process, in words that other processes can repeat."""

    def __init__(self, kind: type[Exception], message: str) -> None:
        super().__init__(message)
        self.kind = kind

    @classmethod
    def of(cls, member: LocalRank, ctx: AsyncEmbContextHandle, error: Exception) -> _RankError:
        kind = ValueError if isinstance(error, ValueError) else RuntimeError
        group = f" of replica group {member.group}" if _num_groups(ctx) > 1 else ""
        return cls(kind, f"rank {member.rank}{group} failed to initialize: {error}")

    def encode(self) -> bytes:
        return f"!{self.kind.__name__}:{self}".encode()

    @classmethod
    def decode(cls, message: bytes) -> _RankError | None:
        if not message.startswith(b"!"):
            return None
        name, text = message[1:].decode().split(":", 1)
        return cls(ValueError if name == "ValueError" else RuntimeError, text)

    @property
    def follows_another(self) -> bool:
        """Whether the rank failed only because another one had."""
        return _ABORTED in str(self)


def _num_groups(ctx: AsyncEmbContextHandle) -> int:
    return len(ctx.flatten_replicas) // ctx.group_size


def _process_exchange(ctx: AsyncEmbContextHandle) -> ProcessExchange | None:
    """Returns the way to the other processes of the mesh, or None if there are none."""
    processes = comm_utils.process_indices(ctx.mesh)
    if len(processes) == 1:
        return None
    exchange = ProcessExchange(
        comm_utils.distributed_store(),
        context_id=ctx.context_id,
        generation=_generations[ctx.context_id],
        process=jax.process_index(),
        processes=processes,
        timeout_secs=_BRING_UP_TIMEOUT_SECS,
        earlier=_exchanges.get(ctx.context_id),
    )
    _exchanges[ctx.context_id] = exchange
    return exchange


def _bring_up(api: Any, ctx: AsyncEmbContextHandle, exchange: ProcessExchange | None) -> None:
    """Makes, connects and registers the local contexts.

    Each phase ends with an exchange of its outcome, so that no process goes on to wait for one that
    failed.
    """
    contexts: dict[LocalRank, Any] = {}
    try:
        payloads, error = _make_contexts(api, ctx, contexts)
        sent = _agree(exchange, "payload", comm_utils.encode_payloads(payloads), error)
        everything: Payloads = {}
        for message in sent:
            everything.update(comm_utils.decode_payloads(message))
        _agree(exchange, "ready", b"", _handshake_all(ctx, contexts, everything))
    except BaseException:
        for context in contexts.values():
            context.close()
        raise
    if exchange is not None:
        exchange.forget("payload")


def _make_contexts(
    api: Any, ctx: AsyncEmbContextHandle, contexts: dict[LocalRank, Any]
) -> tuple[Payloads, _RankError | None]:
    """Adds a registered context for each local rank to `contexts`; stops at the first that fails.

    Returns the payloads they made, and what went wrong.
    """
    payloads: Payloads = {}
    for member in comm_utils.local_ranks(ctx.mesh, ctx.table_axis):
        try:
            contexts[member] = _make_context(api, ctx, member)
            api.register_context(contexts[member])
            made = contexts[member].reset(member.rank, ctx.group_size)
        except Exception as error:
            return payloads, _RankError.of(member, ctx, error)
        payloads[member.group, member.rank] = made
    return payloads, None


def _make_context(api: Any, ctx: AsyncEmbContextHandle, member: LocalRank) -> Any:
    options = ctx.options
    return api.AsyncEmbContext(
        ctx.context_id,
        ctx.group_size,
        tokens_per_rank=ctx.tokens_per_rank,
        shard_width=ctx.shard_width,
        emb_width=ctx.emb_width,
        num_unique=ctx.num_unique,
        out_of_range=options.out_of_range,
        deterministic=options.deterministic,
        check_inputs=options.check_inputs,
        any_world_size=options.any_world_size,
        min_ctas=options.min_ctas,
        max_ctas=options.max_ctas,
        transport=options.transport,
        timeout_secs=options.timeout_secs,
        platform=ctx.platform,
        device_key=member.device_key,
        name=context_name(ctx),
    )


def _agree(
    exchange: ProcessExchange | None,
    round_name: str,
    message: bytes,
    failure: _RankError | None,
) -> list[bytes]:
    """Returns the messages of all processes, or raises one failure among them, the same in all."""
    if exchange is None:
        if failure is not None:
            raise failure.kind(f"async_emb: {failure}") from failure
        return [message]
    sent = message if failure is None else failure.encode()
    messages = exchange.all_gather(round_name, sent)
    decoded = ((process, _RankError.decode(received)) for process, received in messages.items())
    failures = [(process, failed) for process, failed in decoded if failed is not None]
    if failures:
        process, failed = min(failures, key=lambda item: item[1].follows_another)
        raise failed.kind(f"async_emb: process {process}: {failed}") from failure
    return list(messages.values())


def _handshake_all(
    ctx: AsyncEmbContextHandle, contexts: dict[LocalRank, Any], payloads: Payloads
) -> _RankError | None:
    """Runs the handshakes of all local ranks at once; they wait for each other.

    Returns what went wrong on the rank that caused it, after ending the handshakes that would wait
    for that rank; on the lowest rank if several did.
    """
    if not contexts:
        return None
    errors: dict[LocalRank, _RankError] = {}

    def abort_all() -> None:
        for context in contexts.values():
            context.abort("another rank failed to initialize")

    with concurrent.futures.ThreadPoolExecutor(len(contexts)) as pool:
        members = {
            pool.submit(
                context.handshake,
                comm_utils.payloads_for(payloads, member.group, member.rank, ctx.group_size),
                timeout_secs=_BRING_UP_TIMEOUT_SECS,
            ): member
            for member, context in contexts.items()
        }
        try:
            for future in concurrent.futures.as_completed(members):
                error = future.exception()
                if isinstance(error, Exception):
                    if not errors:
                        abort_all()
                    errors[members[future]] = _RankError.of(members[future], ctx, error)
                elif error is not None:
                    raise error
        except BaseException:
            abort_all()
            raise
    if not errors:
        return None
    return errors[min(errors, key=lambda member: (errors[member].follows_another, member))]


def _warn_of_small_pool() -> None:
    """Warns, once, if XLA's CPU thread pool has fewer than two threads for each device.

    Programs with collectives can then stop for good when many steps are in flight.
    """
    global _warned_of_pool
    num_devices = jax.local_device_count("cpu")
    wanted = 2 * num_devices
    given = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC") or ""
    num_threads = int(given) if given.isdecimal() else (os.cpu_count() or 1)
    if _warned_of_pool or num_threads >= wanted:
        return
    _warned_of_pool = True
    warnings.warn(
        f"async_emb: XLA's CPU thread pool has {max(num_threads, num_devices)} threads for "
        f"{num_devices} devices; with fewer than {wanted}, programs can hang when more than 16 "
        f"steps are in flight: set PJRT_NPROC={wanted} (or more) before JAX is first used",
        RuntimeWarning,
        stacklevel=3,
    )
