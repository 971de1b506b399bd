"""What the calls refuse when a program is traced, and how they mark what they return."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from tests.xrex.cuda.async_emb.testing import BFLOAT16, make_handle, make_mesh, needs_devices
from xrex.cuda.async_emb import async_emb

ROOT = Path(__file__).parents[4]
VOCAB_ROWS = 10
CTX = make_handle(name="traced only")
TOKENS, SHARD, WIDTH, SLOTS = CTX.tokens_per_rank, CTX.shard_width, CTX.emb_width, CTX.num_unique
UPDATED = ["grads", "segment_ids", "unique_tokens", "table", "row_state", "last_step"]
RATES = {"learning_rate": 0.1, "eps": 1e-8}


def zeros(shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


def operands(**changes):
    """Per-rank operands of the calls, valid but for `changes`."""
    return {
        "token_ids": zeros(TOKENS, jnp.int32),
        "grads": zeros((TOKENS, WIDTH), BFLOAT16),
        "segment_ids": zeros(TOKENS, jnp.int32),
        "unique_tokens": zeros(SLOTS, jnp.int32),
        "table": zeros((VOCAB_ROWS, SHARD), BFLOAT16),
        "row_state": zeros(VOCAB_ROWS),
        "last_step": zeros(VOCAB_ROWS, jnp.int32),
        "step": 3,
        "pending": True,
        "gate": zeros(()),
    } | changes


def lookup_start(**changes):
    given = operands(**changes)
    return async_emb.lookup_start(given["token_ids"], given["table"], given["gate"], CTX)


def update_start(decay=None, rates=None, **changes):
    given = operands(**changes)
    names = [*UPDATED[:5], "pending", "gate"]
    decay = decay or {"decay_factor": 0.9, "weight_decay_factor": 0.99}
    return async_emb.rowwise_adagrad_update_start(
        *(given[name] for name in names), CTX, **RATES | (rates or {}) | decay
    )


def lazy_update_start(decay=None, rates=None, **changes):
    given = operands(**changes)
    names = [*UPDATED[:5], "last_step", "step", "pending", "gate"]
    decay = decay or {"accum_decay_rate": 0.1, "weight_decay_rate": 0.01}
    return async_emb.rowwise_adagrad_lazy_update_start(
        *(given[name] for name in names), CTX, **RATES | (rates or {}) | decay
    )


def traced(call, *args, mesh=CTX.mesh, check_vma=True, **kwargs):
    """Traces a call inside shard_map; returns the types of its results inside."""
    types = []

    def per_rank():
        types.extend(map(jax.typeof, jax.tree.leaves(call(*args, **kwargs))))

    jax.eval_shape(
        jax.shard_map(per_rank, mesh=mesh, in_specs=(), out_specs=None, check_vma=check_vma)
    )
    return types


STARTS = [lookup_start, update_start, lazy_update_start]
UPDATES = [update_start, lazy_update_start]


@pytest.mark.parametrize("call", STARTS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_valid_operands_are_accepted(call, check_vma):
    assert traced(call, check_vma=check_vma)


def test_lookup_start_returns_the_table_and_a_pin():
    table, pin = traced(lookup_start)
    assert (table.shape, table.dtype) == ((VOCAB_ROWS, SHARD), BFLOAT16)
    assert (pin.shape, pin.dtype) == ((1,), jnp.float32)


def test_lookup_done_returns_the_embeddings():
    (embeddings,) = traced(async_emb.lookup_done, zeros(1), CTX, zeros((3, 4)), zeros(2, jnp.int8))
    assert (embeddings.shape, embeddings.dtype) == ((TOKENS, WIDTH), BFLOAT16)


def test_update_starts_return_what_they_alias():
    given = operands()
    for call, count in [(update_start, 5), (lazy_update_start, 6)]:
        found = [(x.shape, x.dtype) for x in traced(call)]
        assert found == [(given[name].shape, given[name].dtype) for name in UPDATED[:count]]


def test_update_done_returns_norm_valid_and_a_pin():
    norm, valid, pin = traced(async_emb.rowwise_adagrad_update_done, zeros(1), CTX, zeros((3, 4)))
    assert (norm.shape, norm.dtype) == ((), jnp.float32)
    assert (valid.shape, valid.dtype) == ((), jnp.int32)
    assert (pin.shape, pin.dtype) == ((1,), jnp.float32)


@needs_devices(4)
def test_outputs_vary_over_the_axes_of_the_contract():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("replica", "x"))
    ctx = make_handle(mesh, tokens_per_batch=2 * TOKENS, emb_width=2 * SHARD, name="axes")

    def per_rank(ids, table, grads):
        same = zeros(VOCAB_ROWS)
        table, pin = async_emb.lookup_start(ids, table, pin_of_nothing, ctx)
        embeddings = async_emb.lookup_done(pin, ctx, table)
        grads, segments, slots, table, row_state = async_emb.rowwise_adagrad_update_start(
            grads,
            ids,
            zeros(SLOTS, jnp.int32),
            table,
            same,
            True,
            pin,
            ctx,
            **RATES,
            decay_factor=1,
        )
        norm, valid, done_pin = async_emb.rowwise_adagrad_update_done(pin, ctx, table)
        for x in (table, pin, embeddings, grads, segments, done_pin):
            assert jax.typeof(x).manual_axis_type.varying == {"x"}
        for x in (slots, row_state, norm, valid):
            assert jax.typeof(x).manual_axis_type.varying == set()

    pin_of_nothing = zeros(1)
    tokens = 2 * TOKENS
    jax.eval_shape(
        jax.shard_map(per_rank, mesh=mesh, in_specs=(P("x"), P(None, "x"), P("x")), out_specs=None),
        zeros(tokens, jnp.int32),
        zeros((VOCAB_ROWS, 2 * SHARD), BFLOAT16),
        zeros((tokens, 2 * SHARD), BFLOAT16),
    )


@pytest.mark.parametrize(
    ("call", "changes", "message"),
    [
        (
            lookup_start,
            {"table": zeros((VOCAB_ROWS, SHARD))},
            "table of dtype float32; the rule is bf",
        ),
        (
            lookup_start,
            {"token_ids": zeros(TOKENS)},
            "token_ids of dtype float32; ids are integers",
        ),
        (lookup_start, {"token_ids": zeros(TOKENS, bool)}, "token_ids of dtype bool; ids are"),
        (lookup_start, {"gate": "pin"}, "got a str where it takes an array"),
        (lookup_start, {"gate": jax.random.key(1)}, "jax.random.key_data"),
        (
            update_start,
            {"grads": zeros((TOKENS, WIDTH))},
            "grads of dtype float32; the rule is bfloat16",
        ),
        (
            update_start,
            {"segment_ids": zeros(TOKENS, jnp.int16)},
            "segment_ids of dtype int16; the rule is int32",
        ),
        (
            update_start,
            {"unique_tokens": zeros(SLOTS, jnp.uint32)},
            "unique_tokens of dtype uint32; the rule",
        ),
        (
            update_start,
            {"row_state": zeros(VOCAB_ROWS, BFLOAT16)},
            "row_state of dtype bfloat16; the rule is",
        ),
        (
            update_start,
            {"pending": 1.0},
            "pending of dtype float32; .* jnp.asarray.pending, 'int32'",
        ),
        (
            update_start,
            {"rates": {"learning_rate": zeros((), BFLOAT16)}},
            "learning_rate of dtype bfloat16",
        ),
        (
            update_start,
            {"rates": {"eps": zeros(())}},
            "eps as a .*; it is compiled into the program",
        ),
        (update_start, {"decay": {"decay_factor": "1"}}, "decay_factor as a str"),
        (
            lazy_update_start,
            {"last_step": zeros(VOCAB_ROWS)},
            "last_step of dtype float32; the rule is int32",
        ),
        (
            lazy_update_start,
            {"step": 3.0},
            "step .*; the rule is int32: .* jnp.asarray.step, 'int32'",
        ),
        (lookup_start, {"token_ids": [0.5]}, "token_ids .*: .* jnp.asarray.token_ids, 'int32'"),
        (lazy_update_start, {"step": True}, "step of dtype bool; the rule is int32"),
    ],
)
def test_wrong_dtype_is_a_type_error(call, changes, message):
    with pytest.raises(TypeError, match=f"^async_emb: .*{message}"):
        traced(call, **changes)


@pytest.mark.parametrize(
    ("call", "changes", "message"),
    [
        (
            lookup_start,
            {"token_ids": zeros(TOKENS + 1, jnp.int32)},
            r"token_ids of shape \[9\]; the rule is \[T\] = \[8\]",
        ),
        (
            lookup_start,
            {"table": zeros((VOCAB_ROWS, SHARD + 1), BFLOAT16)},
            r"table of shape \[10, 5\]; the rule is \[V, w\] = \[1..2147483647, 4\]",
        ),
        (lookup_start, {"table": zeros((0, SHARD), BFLOAT16)}, r"table of shape \[0, 4\]"),
        (lookup_start, {"table": zeros(SHARD, BFLOAT16)}, r"table of shape \[4\]"),
        pytest.param(
            update_start,
            {"grads": zeros((TOKENS, SHARD), BFLOAT16)},
            r"grads of shape \[8, 4\]; the rule is \[T, W\]",
            marks=needs_devices(2),
        ),
        (
            update_start,
            {"segment_ids": zeros((TOKENS, 1), jnp.int32)},
            r"segment_ids of shape \[8, 1\]",
        ),
        (
            update_start,
            {"unique_tokens": zeros(SLOTS - 1, jnp.int32)},
            r"unique_tokens of shape \[15\]; the rule is \[U\] = \[16\]",
        ),
        (
            update_start,
            {"row_state": zeros(VOCAB_ROWS + 1)},
            r"row_state of shape \[11\]; the rule is \[V\] = \[10\]",
        ),
        (
            update_start,
            {"pending": zeros(1, jnp.int32)},
            r"pending of shape \[1\]; the rule is a scalar",
        ),
        (update_start, {"rates": {"learning_rate": zeros(1)}}, r"learning_rate of shape \[1\]"),
        (
            lazy_update_start,
            {"last_step": zeros(VOCAB_ROWS - 1, jnp.int32)},
            r"last_step of shape \[9\]",
        ),
        (lazy_update_start, {"step": 2**31}, "step=2147483648; steps are int32"),
    ],
)
def test_wrong_shape_is_a_value_error(call, changes, message):
    with pytest.raises(ValueError, match=f"^async_emb: .*{message}"):
        traced(call, **changes)


@pytest.mark.parametrize("eps", [0.0, -1e-8, 1e-46, 1e-40, 1e39, float("nan"), float("inf")])
@pytest.mark.parametrize("call", UPDATES)
def test_eps_without_a_finite_inverse_is_refused(call, eps):
    message = re.escape(f"eps={eps!r}; eps and 1/eps must be finite and positive")
    with pytest.raises(ValueError, match=message):
        traced(call, rates={"eps": eps})


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -float("inf"), 1e39])
@pytest.mark.parametrize("call", UPDATES)
def test_learning_rate_given_as_a_float_must_be_finite(call, rate):
    with pytest.raises(ValueError, match="must be finite in float32: give a finite number"):
        traced(call, rates={"learning_rate": rate})


@pytest.mark.parametrize(
    "rate", [0, -0.5, np.float32(0.1), np.float64(0.1), np.ones((), np.float32)]
)
@pytest.mark.parametrize("call", UPDATES)
def test_learning_rate_may_be_any_finite_number(call, rate):
    assert traced(call, rates={"learning_rate": rate})


@pytest.mark.parametrize(
    ("call", "decay", "message"),
    [
        (update_start, {"decay_factor": -0.1}, "decay_factor=-0.1; .* 0 <= decay_factor <= 1"),
        (update_start, {"decay_factor": 1.1}, "decay_factor=1.1"),
        (update_start, {"decay_factor": float("nan")}, "decay_factor=nan"),
        (update_start, {"decay_factor": 1 + 1e-12}, "decay_factor=1.00"),
        (
            update_start,
            {"decay_factor": 1, "weight_decay_factor": 0.0},
            "weight_decay_factor=0.0; .* 0 < weight_decay_factor <= 1",
        ),
        (
            update_start,
            {"decay_factor": 1, "weight_decay_factor": 1e-50},
            "weight_decay_factor=1e-50",
        ),
        (update_start, {"decay_factor": 1, "weight_decay_factor": 2}, "weight_decay_factor=2"),
        (
            lazy_update_start,
            {"accum_decay_rate": -1e-9, "weight_decay_rate": 0.0},
            "accum_decay_rate=-1e-09; a rate is finite",
        ),
        (
            lazy_update_start,
            {"accum_decay_rate": 0.0, "weight_decay_rate": float("inf")},
            "weight_decay_rate=inf",
        ),
        (
            lazy_update_start,
            {"accum_decay_rate": 1e39, "weight_decay_rate": 0.0},
            "accum_decay_rate=1e\\+39",
        ),
    ],
)
def test_decay_out_of_range_is_refused(call, decay, message):
    with pytest.raises(ValueError, match=message):
        traced(call, decay=decay)


@pytest.mark.parametrize("pending", [True, False, 0, 1, np.bool_(True), np.int32(0)])
@pytest.mark.parametrize("call", UPDATES)
def test_pending_may_be_a_bool_or_an_int(call, pending):
    assert traced(call, pending=pending)


def varying(x):
    return lax.pcast(x, ("x",), to="varying")


@needs_devices(2)
@pytest.mark.parametrize("name", ["unique_tokens", "row_state", "last_step", "pending", "step"])
def test_replicated_operand_that_varies_is_refused(name):
    def call():
        value = jnp.asarray(operands()[name])
        if name in ("pending", "step"):
            value = value.astype(jnp.int32)
        return lazy_update_start(**{name: varying(value)})

    with pytest.raises(ValueError, match=rf"got {name}, which varies over mesh axes \['x'\]"):
        traced(call)


CALLS = [
    *STARTS,
    lambda: async_emb.lookup_done(zeros(1), CTX),
    lambda: async_emb.rowwise_adagrad_update_done(zeros(1), CTX),
]


@pytest.mark.parametrize("call", CALLS)
def test_call_outside_shard_map_is_refused(call):
    with pytest.raises(ValueError, match=r"traced under no mesh; call it inside jax\.shard_map"):
        jax.eval_shape(call)


@pytest.mark.parametrize("call", CALLS)
def test_call_under_a_mesh_but_outside_shard_map_is_refused(call):
    with (
        jax.set_mesh(CTX.mesh),
        pytest.raises(ValueError, match=r"mesh axes \['x'\] are not manual"),
    ):
        jax.eval_shape(call)


@needs_devices(4)
@pytest.mark.parametrize("call", CALLS)
def test_call_over_another_mesh_is_refused(call):
    with pytest.raises(ValueError, match=r"traced under a mesh of \{'x': 2\}"):
        traced(call, mesh=make_mesh(num_ranks=2))


@needs_devices(4)
def test_call_over_a_mesh_with_swapped_axes_is_refused():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh, swapped = Mesh(devices, ("a", "b")), Mesh(devices, ("b", "a"))
    ctx = make_handle(mesh, table_axis=("a", "b"), data_axis=("a", "b"), name="axes")
    with pytest.raises(ValueError, match=r"under a mesh of \{'b': 2, 'a': 2\}; call it inside"):
        traced(async_emb.lookup_done, zeros(()), ctx, mesh=swapped)


@needs_devices(4)
def test_axis_left_to_the_compiler_is_refused():
    mesh = Mesh(
        np.array(jax.devices()[:4]).reshape(2, 2), ("r", "x"), axis_types=(AxisType.Auto,) * 2
    )
    ctx = make_handle(mesh, tokens_per_batch=16, emb_width=8, name="partly manual")

    def per_rank():
        async_emb.lookup_done(zeros(1), ctx)

    mapped = jax.shard_map(per_rank, mesh=mesh, in_specs=(), out_specs=None, axis_names={"x"})
    with pytest.raises(ValueError, match=r"mesh axes \['r'\] are not manual"):
        jax.eval_shape(jax.jit(mapped))


@pytest.mark.parametrize(("call", "name"), [(lookup_start, "table"), (update_start, "grads")])
def test_derivative_of_an_operand_is_refused_with_the_way_out(call, name):
    def loss(x):
        return jnp.sum(call(**{name: x})[0].astype(jnp.float32))

    with pytest.raises(ValueError, match=rf"no derivative with respect to {name}; differentiate"):
        traced(jax.grad(loss), operands()[name])


def test_import_sets_what_nccl_reads_where_unset():
    found = run_python(
        "import xrex.cuda.async_emb.async_emb, os\n"
        "print(os.environ['NCCL_RUNTIME_CONNECT'], os.environ['NCCL_LAUNCH_ORDER_IMPLICIT'])",
        NCCL_RUNTIME_CONNECT="1",
    )
    assert found.split() == ["1", "1"]
    found = run_python(
        "import xrex.cuda.async_emb.async_emb, os\nprint(os.environ['NCCL_RUNTIME_CONNECT'])"
    )
    assert found.split() == ["0"]


def test_without_the_native_module_only_calls_that_need_it_fail():
    found = run_python(
        "import sys\n"
        "sys.modules['xrex.cuda.async_emb.async_emb_api'] = None\n"
        "from xrex.cuda.async_emb import async_emb\n"
        "import jax, numpy as np\n"
        "mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ('x',))\n"
        "ctx = async_emb.make_context_handle(mesh, 'x', data_axis='x', tokens_per_batch=2,\n"
        "    emb_width=2, num_unique=2, num_devices_per_node=1)\n"
        "async_emb.make_segments([0, 1], 4, 2)\n"
        "call = lambda: async_emb.lookup_done(np.float32(1), ctx)\n"
        "mapped = jax.shard_map(call, mesh=mesh, in_specs=(), out_specs=jax.P('x'))\n"
        "for needs in (lambda: async_emb.initialize(ctx), lambda: jax.eval_shape(mapped)):\n"
        "    try:\n"
        "        needs()\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    way_out = "`./bazelw build //phoenix/xrex/cuda/async_emb:async_emb_api`"
    assert [way_out in line for line in found.splitlines()] == [True, True]


def run_python(script: str, **env: str) -> str:
    """Runs a script in a new process without NCCL's variables; returns what it printed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    path = os.pathsep.join([str(ROOT / "phoenix"), *sys.path])
    found = subprocess.run(
        [sys.executable, "-c", script],
        env=clean | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"} | env,
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout
