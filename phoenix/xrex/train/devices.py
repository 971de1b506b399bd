"""The devices of a run: GPUs, or virtual CPU devices on a machine without any accelerator."""

from __future__ import annotations

import os

import jax
import numpy as np
from jax.sharding import Mesh

CPU, GPU = "cpu", "gpu"
PLATFORMS = (CPU, GPU)

_DEFAULT_CPU_DEVICES = 4
_DETERMINISTIC_FLAG = "--xla_gpu_deterministic_ops=true"
_COUNT_FLAG = "--xla_force_host_platform_device_count"


def training_mesh(
    platform: str,
    num_devices: int | None = None,
    axis: str = "data",
    *,
    deterministic: bool = False,
) -> Mesh:
    """A mesh of devices along one axis.

    Args:
      platform: CPU or GPU.
      num_devices: devices of each process; None for 4 virtual CPU devices or all GPUs.
      axis: name of the axis.
      deterministic: have XLA choose kernels that give the same bits in every run; those for CPUs
        always do.

    Raises:
      ValueError: `num_devices` is not positive.
      RuntimeError: there are fewer devices, or JAX was used before and cannot make more.
    """
    if platform == CPU:
        return cpu_mesh(_DEFAULT_CPU_DEVICES if num_devices is None else num_devices, axis)
    if deterministic:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DETERMINISTIC_FLAG}".strip()
    return gpu_mesh(num_devices, axis)


def gpu_mesh(num_devices: int | None = None, axis: str = "data") -> Mesh:
    """A mesh of the first `num_devices` GPUs of each process, by default all.

    Raises:
      ValueError: `num_devices` is not positive.
      RuntimeError: JAX finds fewer GPUs.
    """
    found = jax.local_devices(backend="cuda")
    wanted = len(found) if num_devices is None else num_devices
    if wanted < 1:
        raise ValueError(f"{wanted} devices; at least 1 is needed")
    if len(found) < wanted:
        raise RuntimeError(f"JAX has {len(found)} GPUs and {wanted} were asked for; ask for fewer")
    if jax.process_count() == 1:
        return Mesh(np.array(found[:wanted]), (axis,))
    if len(found) != wanted:
        raise RuntimeError(
            f"each process trains on all its GPUs when there are several, here {len(found)}, and "
            f"{wanted} were asked for; hide the others with CUDA_VISIBLE_DEVICES"
        )
    return Mesh(np.array(jax.devices("cuda")), (axis,))


def cpu_mesh(num_devices: int, axis: str = "data") -> Mesh:
    """Makes the process use `num_devices` CPU devices, and a mesh of them.

    Where jax.distributed connects several processes, each of them calls this with the same number,
    and the mesh is made of the devices of all.

    To be called before JAX is first used: XLA reads its settings once. XLA's thread pool gets two
    threads for each device, without which programs with collectives may wait for each other
    forever.

    Raises:
      ValueError: `num_devices` is not positive.
      RuntimeError: JAX was used before, with fewer devices.
    """
    if num_devices < 1:
        raise ValueError(f"{num_devices} devices; at least 1 is needed")
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(_COUNT_FLAG)]
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"{_COUNT_FLAG}={num_devices}"])
    threads = max(2 * num_devices, int(os.environ.get("PJRT_NPROC", "0")), os.cpu_count() or 1)
    os.environ["PJRT_NPROC"] = str(threads)
    jax.config.update("jax_platforms", "cpu")
    devices = jax.local_devices(backend="cpu")
    if len(devices) < num_devices:
        raise RuntimeError(
            f"JAX has {len(devices)} CPU devices and {num_devices} were asked for; it was used "
            "before the number was set: ask for them first"
        )
    if jax.process_count() > 1:
        devices = jax.devices("cpu")
    else:
        devices = devices[:num_devices]
    return Mesh(np.array(devices), (axis,))
