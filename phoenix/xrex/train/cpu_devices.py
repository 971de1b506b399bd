"""Virtual CPU devices: several JAX devices in one process, on a machine without any accelerator."""

from __future__ import annotations

import os

import jax
import numpy as np
from jax.sharding import Mesh

_COUNT_FLAG = "--xla_force_host_platform_device_count"


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
