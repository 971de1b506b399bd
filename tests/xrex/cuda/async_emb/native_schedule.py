"""Training with staleness 1 through the native calls, one jitted program for each step."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from tests.xrex.cuda.async_emb.native_program import NativeProgram
from tests.xrex.cuda.async_emb.numerics_cases import bf16, make_batch, make_state
from xrex.cuda.async_emb import async_emb
from xrex.cuda.async_emb.reference import (
    Batch,
    Bf16Array,
    EagerDecay,
    LazyDecay,
    ScheduleOracle,
    TableState,
    UpdateResult,
    exact_update,
)

NUM_TOKENS, NUM_ROWS, EMB_WIDTH, NUM_SLOTS = 512, 300, 24, 200
NUM_STEPS, FLUSH_AFTER, POISONED_STEP = 50, 20, 33
EPS = 1e-8


def learning_rate(step: int) -> float:
    return 0.1 / (1 + step)


def gradient(embeddings: Any, noise: Any) -> Any:
    """bf16 of embeddings / 4 + noise: one rounding to float32, so JAX and NumPy agree on bits."""
    scaled = embeddings.astype(np.float32) * np.float32(0.25)
    return (scaled + noise.astype(np.float32)).astype(embeddings.dtype)


class Deferred(NamedTuple):
    """A step's gradients on the device, and what their update needs."""

    grads: Any
    batch: Batch
    step: int
    pending: int


class NativeSchedule:
    """The schedule on a context that is up: one jitted program for each step."""

    def __init__(self, program: NativeProgram, state: TableState) -> None:
        self._program = program
        self._ctx = program.ctx
        tokens, specs = self._ctx.tokens_spec, TableState(*program.state_specs)
        update_specs = (tokens, tokens, P(), P(), P(), P())
        self._begin = self._jit(self._begin_per_rank, (specs, tokens), (specs, tokens))
        self._step = self._jit(
            self._step_per_rank,
            (specs, tokens, tokens, tokens, *update_specs),
            (specs, tokens, tokens, tokens, tokens),
        )
        self._end = self._jit(self._end_per_rank, (specs, tokens, *update_specs), specs)
        self.state = program.put_state(state)
        self._pin: Any = None
        nothing = np.full(NUM_TOKENS, -1, np.int32), np.full(NUM_SLOTS, NUM_ROWS, np.int32)
        zeros = bf16(np.zeros((NUM_TOKENS, EMB_WIDTH)))
        self._nothing = Deferred(zeros, Batch(nothing[0], *nothing), 0, 0)
        self._deferred = self._nothing

    def _jit(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        program = jax.shard_map(
            function, mesh=self._ctx.mesh, in_specs=in_specs, out_specs=out_specs
        )
        return jax.jit(program, donate_argnums=0)

    def step(
        self, number: int, batch: Batch, next_batch: Batch, noise: Bf16Array
    ) -> tuple[jax.Array, jax.Array]:
        """Embeddings of the step, and norms of the update that ran beside it. Does not wait."""
        if self._pin is None:
            self.state, self._pin = self._begin(self.state, batch.ids)
        self.state, self._pin, grads, embeddings, norms = self._step(
            self.state, self._pin, next_batch.ids, noise, *self._update_operands()
        )
        self._deferred = Deferred(grads, batch, number, 1)
        return embeddings, norms

    def flush(self) -> None:
        self.state = self._end(self.state, self._pin, *self._update_operands())
        jax.block_until_ready(self.state)
        async_emb.drain(self._ctx)
        async_emb.reset_table_binding(self._ctx)
        self._pin, self._deferred = None, self._nothing

    def _update_operands(self) -> tuple[Any, ...]:
        grads, batch, step, pending = self._deferred
        rate = np.float32(learning_rate(step))
        scalars = (np.int32(step), np.int32(pending), rate)
        return grads, batch.segment_ids, batch.unique_tokens, *scalars

    def _begin_per_rank(self, state: Any, ids: Any) -> Any:
        table, pin = async_emb.lookup_start(ids, state.table, ids, self._ctx)
        return state._replace(table=table), pin

    def _step_per_rank(
        self, state: Any, pin: Any, next_ids: Any, noise: Any, *update_operands: Any
    ) -> Any:
        embeddings = async_emb.lookup_done(pin, self._ctx, state.table)
        state = async_emb.order_after(state, embeddings, platform=self._ctx.platform)
        state, norm, _ = self._program.update_per_rank(state, *update_operands)
        table, pin = async_emb.lookup_start(next_ids, state.table, norm, self._ctx)
        return state._replace(table=table), pin, gradient(embeddings, noise), embeddings, norm

    def _end_per_rank(self, state: Any, pin: Any, *update_operands: Any) -> Any:
        embeddings = async_emb.lookup_done(pin, self._ctx, state.table)
        state = async_emb.order_after(state, embeddings, platform=self._ctx.platform)
        return self._program.update_per_rank(state, *update_operands)[0]


class Setting(NamedTuple):
    """What a run of the schedule starts from and is given."""

    state: TableState
    batches: list[Batch]
    noises: list[Bf16Array]


def make_setting() -> Setting:
    rng = np.random.default_rng(0)
    batches = [make_batch(rng, NUM_TOKENS, NUM_ROWS, NUM_SLOTS) for _ in range(NUM_STEPS + 1)]
    noises = [make_noise(rng, step) for step in range(NUM_STEPS)]
    return Setting(make_state(rng, NUM_ROWS, EMB_WIDTH), batches, noises)


def make_oracle(
    setting: Setting, decay: EagerDecay | LazyDecay, outcomes: dict[int, str]
) -> ScheduleOracle:
    """The oracle of a run; writes how each step's update came out into `outcomes`."""

    def update(state: TableState, grads: Bf16Array, batch: Batch, step: int) -> UpdateResult:
        now = decay._replace(step=step) if isinstance(decay, LazyDecay) else decay
        rate = learning_rate(step)
        inputs = (state, grads, batch.segment_ids, batch.unique_tokens)
        result = exact_update(*inputs, learning_rate=rate, eps=EPS, decay=now)
        outcomes[step] = result.outcome
        return result

    return ScheduleOracle(
        setting.state, lambda rows, _, step: gradient(rows, setting.noises[step]), update
    )


def expected_outcomes() -> dict[int, str]:
    return {step: "non_finite" if step == POISONED_STEP else "applied" for step in range(NUM_STEPS)}


def make_noise(rng: np.random.Generator, step: int) -> Bf16Array:
    noise = bf16(rng.standard_normal((NUM_TOKENS, EMB_WIDTH)))
    if step == POISONED_STEP:
        noise[:] = np.inf
    return noise
