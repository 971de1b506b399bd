"""Several contexts on one device, what broken rules and operands get, and the library in use."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.xrex.cuda.async_emb.gpu.devices import (
    ON_GPUS,
    beside_a_host_of,
    gpu_mesh,
    on_one_gpu,
)
from tests.xrex.cuda.async_emb.pipeline_pieces import (
    VOCAB_ROWS,
    Pieces,
    assert_rows,
    assert_state,
    expected_update,
    initial_state,
    random_ids,
    table_of,
)
from tests.xrex.cuda.async_emb.testing import make_handle, make_mesh, put, ready_context
from xrex.cuda.async_emb import async_emb, native
from xrex.cuda.async_emb.async_emb import AsyncEmbContextHandle
from xrex.optimizers.recsys import UpdateInFlight

# --- Several contexts on one device -------------------------------------------------------------


@pytest.fixture
def two(num_ranks: int) -> Any:
    """The pieces of two contexts of different sizes on the same devices."""
    sizes = {"tokens_per_batch": 40 * num_ranks, "emb_width": 6 * num_ranks, "num_unique": 20}
    mesh = gpu_mesh(num_ranks)
    with (
        ready_context(mesh, name="first") as first,
        ready_context(mesh, name="second", **sizes) as second,
    ):
        yield Pieces(first), Pieces(second)


@ON_GPUS
def test_contexts_whose_steps_are_interleaved_do_not_disturb_each_other(
    num_ranks: int, two: tuple[Pieces, Pieces]
) -> None:
    first, second = two
    tables = {pieces: pieces.table() for pieces in two}
    states = {pieces: pieces.state() for pieces in two}
    expected = {pieces: initial_state(pieces.ctx) for pieces in two}
    for seed in range(6):
        order = (first, second) if seed % 2 else (second, first)
        updates = {
            pieces: pieces.update_start(pieces.update(seed), tables[pieces], states[pieces])
            for pieces in order
        }
        results = {pieces: pieces.update_done(updates[pieces]) for pieces in reversed(order)}
        lookups = {
            pieces: pieces.lookup_start(pieces.ids(seed), results[pieces].table) for pieces in order
        }
        for pieces in order:
            expected[pieces] = expected_update(pieces.ctx, expected[pieces], seed).state
            embeddings, tables[pieces] = pieces.lookup_done(*lookups[pieces])
            states[pieces] = results[pieces].state
            assert_rows(embeddings, expected[pieces].table, random_ids(pieces.ctx, seed))
    for pieces in two:
        assert_state(tables[pieces], states[pieces], expected[pieces])


@ON_GPUS
def test_two_contexts_in_one_program(num_ranks: int, two: tuple[Pieces, Pieces]) -> None:
    first, second = two

    def program(ids: Any, tables: Any, update: Any, state: Any) -> Any:
        table, pin = first.start_lookup(ids[0], tables[0])
        other, other_pin = second.start_lookup(ids[1], tables[1], pin)
        in_flight = second.start_update(update, other, state, other_pin)
        rows, table = first.finish_lookup(table, pin, in_flight.pin)
        other_rows, other = second.finish_lookup(in_flight.table, other_pin, rows[0, 0])
        result = second.finish_update(in_flight._replace(table=other), other_rows[0, 0])
        return rows, other_rows, table, result

    rows, other_rows, table, result = jax.jit(program, donate_argnums=(1, 2, 3))(
        (first.ids(), second.ids(1)),
        (first.table(), second.table()),
        second.update(2),
        second.state(),
    )
    assert_rows(rows, table_of(first.ctx), random_ids(first.ctx))
    assert_rows(other_rows, table_of(second.ctx), random_ids(second.ctx, 1))
    expected = expected_update(second.ctx, initial_state(second.ctx), 2)
    assert_state(result.table, result.state, expected.state)
    np.testing.assert_array_equal(np.asarray(table).view(np.uint16), table_bits(first))


def table_bits(pieces: Pieces) -> np.ndarray:
    return table_of(pieces.ctx).view(np.uint16)


@ON_GPUS
def test_abort_of_one_context_leaves_the_other_alone(
    num_ranks: int, two: tuple[Pieces, Pieces]
) -> None:
    first, second = two
    async_emb.abort(first.ctx)
    table, pin = second.lookup_start(second.ids(), second.table())
    embeddings, _ = second.lookup_done(table, pin)
    assert_rows(embeddings, table_of(second.ctx), random_ids(second.ctx))
    async_emb.check(second.ctx)
    with pytest.raises(RuntimeError, match="aborted"):
        async_emb.check(first.ctx)


@ON_GPUS
def test_contexts_of_both_platforms_work_side_by_side(num_ranks: int) -> None:
    beside_a_host_of(num_ranks)
    host = make_mesh(num_ranks=num_ranks, platform="cpu")
    with (
        ready_context(gpu_mesh(num_ranks), name="on gpus") as on_gpus,
        ready_context(host, name="on the host") as on_host,
    ):
        for ctx in (on_gpus, on_host, on_gpus):
            pieces = Pieces(ctx)
            async_emb.reset_table_binding(ctx)
            table, pin = pieces.lookup_start(pieces.ids(), pieces.table())
            embeddings, _ = pieces.lookup_done(table, pin)
            assert_rows(embeddings, table_of(ctx), random_ids(ctx))


# --- The same words as on the host --------------------------------------------------------------


def error_of(program: Any, *arguments: Any) -> str:
    """What a program that must fail says, without the names that differ from run to run."""
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(program(*arguments))
    first_line = str(caught.value).splitlines()[0]
    message = re.sub(r"\s*\[executable_name=.*", "", first_line)
    message = re.sub(r"context -?\d+", "context ID", message)
    return re.sub(r"device \d+", "device KEY", message)


def second_lookup_start(pieces: Pieces) -> str:
    in_flight = pieces.lookup_start(pieces.ids(), pieces.table())
    message = error_of(pieces.lookup_start, pieces.ids(1), pieces.table(1))
    pieces.lookup_done(*in_flight)
    return message


def lookup_done_with_nothing_armed(pieces: Pieces) -> str:
    pin = put(pieces.ctx, np.zeros(pieces.ctx.group_size, np.float32), pieces.ctx.tokens_spec)
    return error_of(pieces.lookup_done, pieces.table(), pin)


def second_update_start(pieces: Pieces) -> str:
    in_flight = pieces.update_start(pieces.update(), pieces.table(), pieces.state())
    message = error_of(pieces.update_start, pieces.update(1), pieces.table(1), pieces.state())
    pieces.update_done(in_flight)
    return message


def update_done_with_nothing_armed(pieces: Pieces) -> str:
    return error_of(
        pieces.update_done, UpdateInFlight(pieces.update(), pieces.table(), pieces.state())
    )


def call_without_context(pieces: Pieces) -> str:
    stranger = Pieces(make_handle(pieces.ctx.mesh, name="never initialized"))
    return error_of(stranger.lookup_start, stranger.ids(), stranger.table())


def other_sizes_under_the_same_id(pieces: Pieces) -> str:
    stranger = Pieces(pieces.ctx._replace(num_unique=pieces.ctx.num_unique + 1))
    return error_of(stranger.lookup_start, pieces.ids(), pieces.table())


def raw_lookup_start(
    ctx: AsyncEmbContextHandle,
    *,
    ids_dtype: Any = np.int32,
    table_dtype: Any = jnp.bfloat16,
    tokens: int | None = None,
    aliased: bool = True,
    num_operands: int = 4,
    attributes: dict[str, Any] | None = None,
) -> str:
    """A call that goes past the checks of Python."""
    num_tokens = ctx.tokens_per_rank if tokens is None else tokens

    def per_rank(ids: Any, table: Any) -> Any:
        operands = [ids, table, jax.lax.axis_index("x").astype(jnp.int32), ids]
        results = jax.ffi.ffi_call(
            "xrex_async_emb_lookup_start",
            [
                jax.ShapeDtypeStruct(table.shape, table.dtype),
                jax.ShapeDtypeStruct((1,), jnp.float32),
            ],
            has_side_effect=True,
            input_output_aliases={1: 0} if aliased else None,
        )(*operands[:num_operands], **(ctx.attrs() | (attributes or {})))
        return tuple(results)

    program = jax.shard_map(
        per_rank,
        mesh=ctx.mesh,
        in_specs=(P("x"), P(None, "x")),
        out_specs=(P(None, "x"), P("x")),
        check_vma=False,
    )
    ids = put(ctx, np.zeros(num_tokens * ctx.group_size, ids_dtype), P("x"))
    table = put(ctx, np.zeros((VOCAB_ROWS, ctx.emb_width), table_dtype), P(None, "x"))
    return error_of(jax.jit(program, donate_argnums=1), ids, table)


BROKEN_RULES = [
    second_lookup_start,
    lookup_done_with_nothing_armed,
    second_update_start,
    update_done_with_nothing_armed,
    call_without_context,
    other_sizes_under_the_same_id,
]
BAD_OPERANDS: dict[str, dict[str, Any]] = {
    "ids of another dtype": {"ids_dtype": np.float32},
    "table of another dtype": {"table_dtype": np.float32},
    "too many ids": {"tokens": 9},
    "no alias": {"aliased": False},
    "an operand too few": {"num_operands": 3},
    "another size": {"attributes": {"emb_width": np.int64(8000)}},
    "another type of attribute": {"attributes": {"emb_width": np.int32(4)}},
}


def on_both_platforms(num_ranks: int, message_of: Any) -> list[str]:
    beside_a_host_of(num_ranks)
    messages = []
    for platform in ("gpu", "cpu"):
        mesh = make_mesh(num_ranks=num_ranks, platform=platform)
        with ready_context(mesh, name=f"errors on {platform}") as ctx:
            messages.append(message_of(ctx))
    return messages


@ON_GPUS
@pytest.mark.parametrize("broken", BROKEN_RULES)
def test_broken_rule_is_told_in_the_words_of_the_host_backend(num_ranks: int, broken: Any) -> None:
    on_gpus, on_host = on_both_platforms(num_ranks, lambda ctx: broken(Pieces(ctx)))
    assert on_gpus == on_host
    assert on_gpus.startswith("INVALID_ARGUMENT: ")
    assert "async_emb" in on_gpus


@ON_GPUS
@pytest.mark.parametrize("changes", BAD_OPERANDS.values(), ids=BAD_OPERANDS.keys())
def test_bad_operand_is_told_in_the_words_of_the_host_backend(num_ranks: int, changes: Any) -> None:
    on_gpus, on_host = on_both_platforms(num_ranks, lambda ctx: raw_lookup_start(ctx, **changes))
    assert on_gpus == on_host
    assert "async_emb" in on_gpus


@ON_GPUS
def test_context_works_on_after_a_broken_rule(num_ranks: int) -> None:
    with ready_context(gpu_mesh(num_ranks), name="works on") as ctx:
        pieces = Pieces(ctx)
        for broken in (second_lookup_start, second_update_start, update_done_with_nothing_armed):
            broken(pieces)
        async_emb.drain(ctx)
        async_emb.reset_table_binding(ctx)
        result = pieces.update_done(
            pieces.update_start(pieces.update(), pieces.table(), pieces.state())
        )
        expected = expected_update(ctx, initial_state(ctx))
        assert_state(result.table, result.state, expected.state)


# --- The NCCL library ---------------------------------------------------------------------------


def loaded_nccl_libraries() -> set[Path]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {Path(line.split()[-1]).resolve() for line in maps if "libnccl.so" in line}


@pytest.fixture
def api() -> Any:
    """The native module, in a process that has used NCCL."""
    with ready_context(gpu_mesh(1), name="library"):
        yield native.load("CUDA")


@on_one_gpu
def test_version_is_new_enough(api: Any) -> None:
    assert api.nccl_version() >= 22800


@on_one_gpu
def test_only_one_library_is_loaded_and_it_is_the_one_in_use(api: Any) -> None:
    assert loaded_nccl_libraries() == {Path(api.nccl_library_path()).resolve()}


@on_one_gpu
def test_library_is_the_one_that_xla_finds(api: Any) -> None:
    found = ctypes.CDLL("libnccl.so.2")  # by name, as XLA does
    version = ctypes.c_int()
    assert found.ncclGetVersion(ctypes.byref(version)) == 0
    assert version.value == api.nccl_version()
    package = native._nccl_of_package()
    if package is not None:
        assert Path(api.nccl_library_path()).resolve() == package.resolve()
