from __future__ import annotations

import dataclasses

import pytest

from xrex.cuda.async_emb.async_emb import AsyncEmbOptions


def test_defaults_are_those_of_the_contract():
    assert dataclasses.asdict(AsyncEmbOptions()) == {
        "out_of_range": "clip",
        "deterministic": False,
        "check_inputs": False,
        "min_ctas": 1,
        "max_ctas": 4,
        "transport": "auto",
        "timeout_secs": None,
        "any_world_size": False,
    }


def test_options_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        AsyncEmbOptions().deterministic = True


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out_of_range": "wrap"}, "out_of_range='wrap' is unknown; choose one of clip, zero"),
        ({"transport": "mpi"}, "transport='mpi' is unknown; choose one of auto, nccl, lsa"),
        ({"min_ctas": 0}, "min_ctas=0, max_ctas=4; the rule is 1 <= min_ctas <= max_ctas"),
        ({"min_ctas": 5}, "min_ctas=5, max_ctas=4; the rule is 1 <= min_ctas <= max_ctas"),
        ({"max_ctas": 2**31}, "min_ctas=1, max_ctas=2147483648; .* max_ctas <= 2147483647: give"),
        ({"timeout_secs": 0}, "timeout_secs=0; the rule is 1 <= timeout_secs"),
        ({"timeout_secs": -3}, "timeout_secs=-3; the rule is 1 <= timeout_secs"),
        ({"timeout_secs": 10**10}, "timeout_secs=10000000000; the rule is 1 <= timeout_secs"),
    ],
)
def test_value_out_of_range_is_a_value_error(changes, message):
    with pytest.raises(ValueError, match=f"^AsyncEmbOptions: {message}"):
        AsyncEmbOptions(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"deterministic": 1}, "deterministic=1 is a int"),
        ({"check_inputs": None}, "check_inputs=None is a NoneType"),
        ({"any_world_size": "yes"}, "any_world_size='yes' is a str"),
        ({"min_ctas": 1.5}, "min_ctas=1.5 is a float"),
        ({"max_ctas": True}, "max_ctas=True is a bool"),
        ({"timeout_secs": 2.0}, "timeout_secs=2.0 is a float"),
    ],
)
def test_wrong_type_is_a_type_error(changes, message):
    with pytest.raises(TypeError, match=f"^AsyncEmbOptions: {message}"):
        AsyncEmbOptions(**changes)
