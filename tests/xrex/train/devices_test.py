import os
from collections.abc import Iterator

import jax
import pytest

from xrex.train.devices import cpu_mesh

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs CPU devices")

NUM_DEVICES = len(jax.devices())  # from now on JAX has as many as the test was started with


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    saved = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(saved)


def test_mesh_takes_the_number_of_devices_asked_for() -> None:
    assert dict(cpu_mesh(2, "data").shape) == {"data": 2}


def test_other_flags_are_kept_and_the_number_is_replaced() -> None:
    os.environ["XLA_FLAGS"] = "--xla_a=1 --xla_force_host_platform_device_count=7 --xla_b=2"
    cpu_mesh(2)
    assert os.environ["XLA_FLAGS"] == "--xla_a=1 --xla_b=2 --xla_force_host_platform_device_count=2"


def test_thread_pool_gets_two_threads_for_each_device() -> None:
    os.environ["PJRT_NPROC"] = "3"
    cpu_mesh(4)
    assert int(os.environ["PJRT_NPROC"]) >= 8


def test_more_devices_than_jax_started_with_are_refused() -> None:
    with pytest.raises(RuntimeError, match=f"JAX has {NUM_DEVICES} CPU devices"):
        cpu_mesh(NUM_DEVICES + 1)


def test_no_device_is_refused() -> None:
    with pytest.raises(ValueError, match="0 devices; at least 1 is needed"):
        cpu_mesh(0)
