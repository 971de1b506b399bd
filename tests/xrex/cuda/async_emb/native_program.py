"""The native calls as one jitted step, for tests of their arithmetic."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tests.xrex.cuda.async_emb.numerics_cases import UpdateCase
from tests.xrex.cuda.async_emb.testing import make_mesh, put, ready_context
from xrex.cuda.async_emb import async_emb, native
from xrex.cuda.async_emb.async_emb import AsyncEmbContextHandle, AsyncEmbOptions
from xrex.cuda.async_emb.reference import Bf16Array, EagerDecay, LazyDecay, TableState


class NativeUpdate(NamedTuple):
    """What an update gave, on the host. norm and valid are those of every rank."""

    state: TableState
    norms: np.ndarray
    valids: np.ndarray


class NativeProgram:
    """Lookups and updates on a context that is up, on global NumPy arrays.

    Args:
        ctx: the context's handle.
        decay: of the update.
        eps: of the update.
    """

    def __init__(
        self, ctx: AsyncEmbContextHandle, decay: EagerDecay | LazyDecay, eps: float = 1e-8
    ) -> None:
        self.ctx = ctx
        self._decay = decay
        self._eps = eps
        tokens, state = ctx.tokens_spec, TableState(*self.state_specs)
        self._lookup = self._jit(self._lookup_per_rank, (tokens, ctx.table_spec), tokens)
        self._update = self._jit(
            self.update_per_rank,
            (state, tokens, tokens, P(), P(), P(), P()),
            (state, tokens, tokens),
            donate_argnums=0,
        )

    @property
    def state_specs(self) -> Any:
        """How table, row_state and last_step lie on the mesh."""
        return self.ctx.table_spec, P(), P()

    @property
    def num_compiled_updates(self) -> int:
        return self._update._cache_size()

    def _jit(self, function: Any, in_specs: Any, out_specs: Any, **options: Any) -> Any:
        program = jax.shard_map(
            function, mesh=self.ctx.mesh, in_specs=in_specs, out_specs=out_specs
        )
        return jax.jit(program, **options)

    def put_state(self, state: TableState) -> Any:
        """The state on the mesh, in memory of its own, so that it can be donated."""
        specs = self.state_specs
        return TableState(*(put(self.ctx, x, spec) for x, spec in zip(state, specs, strict=True)))

    def lookup(self, ids: Any, table: Bf16Array) -> Bf16Array:
        """bf16 [N, W]."""
        return np.asarray(self._lookup(ids, table))

    def update(
        self,
        case: UpdateCase,
        *,
        pending: int = 1,
        learning_rate: float = 0.05,
        step: int | None = None,
    ) -> NativeUpdate:
        """One update; `step` defaults to that of the lazy decay."""
        if step is None:
            step = self._decay.step if isinstance(self._decay, LazyDecay) else 0
        state, norms, valids = self._update(
            self.put_state(case.state),
            case.grads,
            case.segment_ids,
            case.unique_tokens,
            np.int32(step),
            np.int32(pending),
            np.float32(learning_rate),
        )
        state = TableState(*(np.asarray(x) for x in state))
        return NativeUpdate(state, np.asarray(norms), np.asarray(valids))

    def _lookup_per_rank(self, ids: Any, table: Any) -> Any:
        table, pin = async_emb.lookup_start(ids, table, ids, self.ctx)
        return async_emb.lookup_done(pin, self.ctx, table)

    def update_per_rank(
        self,
        state: Any,
        grads: Any,
        segment_ids: Any,
        unique_tokens: Any,
        step: Any,
        pending: Any,
        learning_rate: Any,
    ) -> Any:
        """Start and done; gives the state, and norm and valid of this rank as [1] arrays."""
        inputs: Any = (grads, segment_ids, unique_tokens, state.table, state.row_state)
        shared: Any = {"learning_rate": learning_rate, "eps": self._eps}
        start: Any
        if isinstance(self._decay, EagerDecay):
            start = async_emb.rowwise_adagrad_update_start
            kept = start(*inputs, pending, pending, self.ctx, **shared, **self._decay._asdict())
            last_step = state.last_step
        else:
            start = async_emb.rowwise_adagrad_lazy_update_start
            kept = start(
                *inputs,
                state.last_step,
                step,
                pending,
                pending,
                self.ctx,
                **shared,
                accum_decay_rate=self._decay.accum_decay_rate,
                weight_decay_rate=self._decay.weight_decay_rate,
            )
            last_step = kept[5]
        norm, valid, pin = async_emb.rowwise_adagrad_update_done(kept[3], self.ctx, *kept)
        state = TableState(kept[3], kept[4], last_step)
        state = async_emb.order_after(state, pin, platform=self.ctx.platform)
        # FFI results count as equal on all ranks; here each rank's own are wanted.
        own = async_emb.mark_varying(jnp.stack([norm]), self.ctx.data_axis)
        return state, own, async_emb.mark_varying(jnp.stack([valid]), self.ctx.data_axis)


@contextlib.contextmanager
def native_program(
    num_ranks: int,
    num_tokens: int,
    emb_width: int,
    num_slots: int,
    decay: EagerDecay | LazyDecay,
    *,
    eps: float = 1e-8,
    platform: str | None = None,
    **options: Any,
) -> Iterator[NativeProgram]:
    """A program whose context is up inside the with block; deterministic unless options say no."""
    with ready_context(
        make_mesh(num_ranks=num_ranks, platform=platform),
        name=platform or "",
        tokens_per_batch=num_tokens,
        emb_width=emb_width,
        num_unique=num_slots,
        options=AsyncEmbOptions(**({"deterministic": True} | options)),
    ) as ctx:
        yield NativeProgram(ctx, decay, eps)


def lookup_without_jax(ids: np.ndarray, shards: list[Bf16Array]) -> Bf16Array:
    """Looks `ids` [N] up in column shards [V, w], one for each rank, on NumPy's own memory."""
    num_ranks, shard_width = len(shards), shards[0].shape[1]
    contexts = [
        native.load("cpu").AsyncEmbContext(
            1,
            num_ranks,
            tokens_per_rank=len(ids) // num_ranks,
            shard_width=shard_width,
            emb_width=num_ranks * shard_width,
            num_unique=1,
        )
        for _ in range(num_ranks)
    ]
    payloads = [context.reset(rank, num_ranks) for rank, context in enumerate(contexts)]
    received = [list(of_rank) for of_rank in zip(*payloads, strict=True)]
    with concurrent.futures.ThreadPoolExecutor(num_ranks) as pool:
        list(pool.map(lambda context, own: context.handshake(own), contexts, received))
    for context, own_ids, shard in zip(contexts, np.split(ids, num_ranks), shards, strict=True):
        context.arm_lookup(own_ids, shard)
    return np.concatenate([context.consume_lookup() for context in contexts])
