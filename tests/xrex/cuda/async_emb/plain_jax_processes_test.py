"""The plain JAX path on CPU devices of two processes, whose collectives go through gloo."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.xrex.cuda.async_emb.numerics_cases import LAZY, assert_same_bits, make_batch, make_case
from tests.xrex.processes import run_in_processes
from xrex.cuda.async_emb import plain_jax
from xrex.cuda.async_emb.handle import make_context_handle
from xrex.cuda.async_emb.reference import exact_lookup
from xrex.cuda.async_emb.reference_formula import Bounded, formula_update

NUM_PROCESSES, DEVICES_PER_PROCESS = 2, 2
NUM_TOKENS, NUM_ROWS, EMB_WIDTH, NUM_SLOTS = 64, 50, 12, 40


def look_up_and_update() -> None:
    """Body of one process: all ranks look up and update, and each checks its own shards."""
    ctx = make_context_handle(
        Mesh(np.array(jax.devices()), ("x",)),
        "x",
        data_axis="x",
        tokens_per_batch=NUM_TOKENS,
        emb_width=EMB_WIDTH,
        num_unique=NUM_SLOTS,
        num_devices_per_node=DEVICES_PER_PROCESS,
    )
    assert ctx.group_size == NUM_PROCESSES * DEVICES_PER_PROCESS
    rng = np.random.default_rng(0)
    ids = make_batch(rng, NUM_TOKENS, NUM_ROWS, NUM_SLOTS).ids
    case = make_case(rng, NUM_TOKENS, NUM_ROWS, EMB_WIDTH, NUM_SLOTS)
    hyper: dict[str, Any] = {"learning_rate": 0.05, "eps": 1e-8}
    rates: dict[str, Any] = LAZY._asdict()
    step_number = rates.pop("step")

    def step(ids: Any, *update_operands: Any) -> Any:
        embeddings = plain_jax.lookup(ids, update_operands[3], ctx)
        update: Any = plain_jax.rowwise_adagrad_lazy_update
        return embeddings, *update(*update_operands, step_number, 1, ctx, **hyper, **rates)

    tokens, columns = ctx.tokens_spec, ctx.table_spec
    in_specs = (tokens, tokens, tokens, P(), columns, P(), P())
    arrays: Any = (ids, case.grads, case.segment_ids, case.unique_tokens, *case.state)
    placed = [
        jax.make_array_from_callback(x.shape, NamedSharding(ctx.mesh, spec), x.__getitem__)
        for x, spec in zip(arrays, in_specs, strict=True)
    ]
    out_specs = (tokens, columns, P(), P(), P(), P())
    program = jax.shard_map(step, mesh=ctx.mesh, in_specs=in_specs, out_specs=out_specs)
    embeddings, table, row_state, last_step, norm, valid = jax.jit(program)(*placed)

    expected = formula_update(*case, **hyper, decay=LAZY, arithmetic="xla")
    assert int(valid.addressable_data(0)) == 1
    assert expected.norm.contains(norm.addressable_data(0))
    assert_same_shards(embeddings, exact_lookup(ids, case.state.table))
    assert_shards_within(table, expected.table)
    assert_shards_within(row_state, expected.row_state)
    assert_same_shards(last_step, expected.last_step)


def assert_same_shards(found: jax.Array, expected: Any) -> None:
    assert len(found.addressable_shards) == DEVICES_PER_PROCESS
    for shard in found.addressable_shards:
        assert_same_bits(shard.data, expected[shard.index])


def assert_shards_within(found: jax.Array, expected: Bounded) -> None:
    for shard in found.addressable_shards:
        part = Bounded(*(x[shard.index] for x in expected))
        assert part.contains(shard.data).all()


def test_two_processes_look_up_and_update_as_the_oracles_say() -> None:
    run_in_processes(
        "tests.xrex.cuda.async_emb.plain_jax_processes_test",
        look_up_and_update.__name__,
        num_processes=NUM_PROCESSES,
        devices_per_process=DEVICES_PER_PROCESS,
    )
