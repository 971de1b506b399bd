"""One process for each GPU: the schedule's bits, and what the others get when one is lost."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.xrex.cuda.async_emb.gpu.devices import MANY, SEVERAL_GPUS
from tests.xrex.cuda.async_emb.gpu.gpu_processes import gpu_processes
from tests.xrex.cuda.async_emb.numerics_cases import LAZY, assert_same_bits, make_batch, make_case
from xrex.cuda.async_emb import async_emb
from xrex.cuda.async_emb.async_emb import AsyncEmbContextHandle, AsyncEmbOptions
from xrex.cuda.async_emb.reference import exact_lookup, exact_update

MODULE = "tests.xrex.cuda.async_emb.gpu.processes_test"
NUM_TOKENS, NUM_ROWS, EMB_WIDTH, NUM_SLOTS = 512, 300, 64, 200
NUM_STEPS = 50
TIMEOUT_SECS = 3
HYPER: dict[str, Any] = {"learning_rate": 0.05, "eps": 1e-8}

pytestmark = [*SEVERAL_GPUS]


def make_context(**options: Any) -> AsyncEmbContextHandle:
    return async_emb.make_context_handle(
        Mesh(np.array(jax.devices()), ("x",)),
        "x",
        data_axis="x",
        tokens_per_batch=NUM_TOKENS,
        emb_width=EMB_WIDTH,
        num_unique=NUM_SLOTS,
        num_devices_per_node=len(jax.devices()),
        options=AsyncEmbOptions(**({"deterministic": True} | options)),
    )


def place(ctx: AsyncEmbContextHandle, x: Any, spec: P) -> jax.Array:
    """A global array of which each process makes its own shards."""
    array = np.asarray(x)
    return jax.make_array_from_callback(
        array.shape, NamedSharding(ctx.mesh, spec), lambda index: array[index].copy()
    )


class Program:
    """A whole step: update, then lookup in the updated table."""

    def __init__(self, ctx: AsyncEmbContextHandle) -> None:
        self.ctx = ctx
        tokens, table, same = ctx.tokens_spec, ctx.table_spec, P()
        mapped = jax.shard_map(
            self._per_rank,
            mesh=ctx.mesh,
            in_specs=((table, same, same), tokens, tokens, same, same, tokens),
            out_specs=((table, same, same), tokens, same, same),
            check_vma=False,
        )
        self._program = jax.jit(mapped, donate_argnums=0)

    def _per_rank(
        self, state: Any, grads: Any, segments: Any, slots: Any, step: Any, ids: Any
    ) -> Any:
        kept = async_emb.rowwise_adagrad_lazy_update_start(
            grads,
            segments,
            slots,
            state[0],
            state[1],
            state[2],
            step,
            True,
            ids,
            self.ctx,
            **HYPER,
            accum_decay_rate=LAZY.accum_decay_rate,
            weight_decay_rate=LAZY.weight_decay_rate,
        )
        norm, valid, pin = async_emb.rowwise_adagrad_update_done(kept[3], self.ctx, *kept)
        table, row_state, last_step = async_emb.order_after(
            kept[3:], pin, platform=self.ctx.platform
        )
        table, pin = async_emb.lookup_start(ids, table, pin, self.ctx)
        embeddings = async_emb.lookup_done(pin, self.ctx, table)
        table = async_emb.order_after(table, embeddings, platform=self.ctx.platform)
        return (table, row_state, last_step), embeddings, norm, valid

    def start(self, state: Any) -> Any:
        specs = (self.ctx.table_spec, P(), P())
        return tuple(place(self.ctx, x, spec) for x, spec in zip(state, specs, strict=True))

    def step(self, state: Any, case: Any, ids: np.ndarray, number: int) -> Any:
        """(state, embeddings, norm, valid); waits for nothing."""
        tokens = self.ctx.tokens_spec
        return self._program(
            state,
            place(self.ctx, case.grads, tokens),
            place(self.ctx, case.segment_ids, tokens),
            place(self.ctx, case.unique_tokens, P()),
            np.int32(number),
            place(self.ctx, ids, tokens),
        )


def assert_same_shards(found: jax.Array, expected: Any) -> None:
    for shard in found.addressable_shards:
        assert_same_bits(shard.data, np.asarray(expected)[shard.index])


def cases_of(num_steps: int) -> tuple[list[Any], list[np.ndarray]]:
    rng = np.random.default_rng(0)
    cases = [make_case(rng, NUM_TOKENS, NUM_ROWS, EMB_WIDTH, NUM_SLOTS) for _ in range(num_steps)]
    ids = [make_batch(rng, NUM_TOKENS, NUM_ROWS, NUM_SLOTS).ids for _ in range(num_steps)]
    return cases, ids


def run_steps_and_compare() -> None:
    """Body of one process."""
    assert len(jax.local_devices()) == 1
    cases, ids = cases_of(NUM_STEPS)
    ctx = make_context()
    with async_emb.initialized(ctx):
        program = Program(ctx)
        state, expected = program.start(cases[0].state), cases[0].state
        results = []
        for number in range(NUM_STEPS):
            state, *result = program.step(state, cases[number], ids[number], number)
            results.append(result)
        for number, (embeddings, norm, valid) in enumerate(results):
            inputs = cases[number]._replace(state=expected)
            update = exact_update(*inputs, decay=LAZY._replace(step=number), **HYPER)
            expected = update.state
            assert_same_shards(embeddings, exact_lookup(ids[number], expected.table))
            assert_same_shards(norm, update.norm)
            assert int(valid.addressable_data(0)) == 1
        for found, wanted in zip(state, expected, strict=True):
            assert_same_shards(found, wanted)
        async_emb.check(ctx)
    # The same processes once more, with new contexts under the same id.
    with async_emb.initialized(ctx):
        state, *_ = program.step(program.start(cases[0].state), cases[0], ids[0], 0)
        jax.block_until_ready(state)
        async_emb.check(ctx)
    print("RIGHT", jax.process_index())


def test_processes_take_fifty_steps_as_the_oracle_says() -> None:
    with gpu_processes(MODULE, run_steps_and_compare.__name__, MANY) as processes:
        for process in processes:
            process.wait_for_line("RIGHT", timeout_secs=100)
        for process in processes:
            assert process.wait(timeout_secs=20) == 0, process.text


# --- A process that is lost ---------------------------------------------------------------------


def run_until_a_peer_is_lost() -> None:
    """Body of one process: a good step, then steps until the context fails."""
    cases, ids = cases_of(2)
    ctx = make_context(timeout_secs=TIMEOUT_SECS)
    async_emb.initialize(ctx)
    program = Program(ctx)
    state, *_ = program.step(program.start(cases[0].state), cases[0], ids[0], 0)
    jax.block_until_ready(state)
    async_emb.check(ctx)
    print("READY", flush=True)
    if jax.process_index() != 0:
        time.sleep(600)  # never comes to its next step
    input_line = os.read(0, 1)  # the others are lost by now
    assert input_line == b"x", input_line

    before = [np.array(x.addressable_data(0)) for x in state]
    began = time.monotonic()
    state, embeddings, norm, valid = program.step(state, cases[1], ids[1], 1)
    rows = np.asarray(embeddings.addressable_data(0), np.float32)
    spent = time.monotonic() - began
    assert np.isnan(rows).all()
    assert np.isnan(np.asarray(norm.addressable_data(0)))
    assert int(valid.addressable_data(0)) == 0
    for found, wanted in zip(state, before, strict=True):
        assert_same_bits(found.addressable_data(0), wanted)
    try:
        async_emb.check(ctx)
    except RuntimeError as error:
        print(f"FAILED after {spent:.2f} s: {error}", flush=True)
    began = time.monotonic()
    async_emb.destroy(ctx)
    print(f"DESTROYED after {time.monotonic() - began:.2f} s", flush=True)
    os._exit(0)  # jax.distributed would wait for the others


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_survivor_of_a_lost_process_gets_the_error_within_the_time_out(
    how: signal.Signals,
) -> None:
    with gpu_processes(MODULE, run_until_a_peer_is_lost.__name__, MANY) as processes:
        for process in processes:
            process.wait_for_line("READY", timeout_secs=90)
        for lost in processes[1:]:
            lost.send(how)
        survivor = processes[0]
        survivor.write("x")
        line = survivor.wait_for_line("FAILED", timeout_secs=TIMEOUT_SECS + 20)
        assert ": async_emb communicator aborted: " in line
        spent = float(line.removeprefix("FAILED after ").split(" ", 1)[0])
        assert spent < TIMEOUT_SECS + 2
        survivor.wait_for_line("DESTROYED", timeout_secs=40)
        assert survivor.wait(timeout_secs=20) == 0, survivor.text
