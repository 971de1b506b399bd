"""Runs a function of a test module in several processes that jax.distributed connects."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

_ROOT = Path(__file__).parents[2]
_TIMEOUT_SECS = 50


def run_in_processes(
    module: str, function: str, *, num_processes: int, devices_per_process: int
) -> list[str]:
    """Runs a function in new processes at once; fails if it fails in one of them.

    Args:
        module: the full name of the module, which the processes import.
        function: its name; it takes no arguments and finds jax.distributed initialised.
        num_processes: how many processes.
        devices_per_process: how many CPU devices each of them has.

    Returns:
        What each process printed.
    """
    program = "import sys; from tests.xrex.processes import main; main(*sys.argv[1:])"
    arguments = ["-c", program, module, function, str(free_port()), str(num_processes)]
    return run_together(
        [[*arguments, str(process)] for process in range(num_processes)], devices_per_process
    )


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def run_together(arguments: Sequence[Sequence[str]], devices_per_process: int) -> list[str]:
    """Runs Python programs at once; fails if one of them fails.

    Args:
        arguments: of the Python interpreter, for each program.
        devices_per_process: how many CPU devices each of them has.

    Returns:
        What each program printed.
    """
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(_ROOT), str(_ROOT / "phoenix"), *sys.path]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices_per_process}",
        "PJRT_NPROC": str(max(4, 2 * len(arguments) * devices_per_process)),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, *program],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for program in arguments
    ]
    try:
        texts = [process.communicate(timeout=_TIMEOUT_SECS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    everything = "\n".join(output + error for output, error in texts)
    assert [process.returncode for process in processes] == [0] * len(processes), everything
    return [output for output, _ in texts]


def main(module: str, function: str, port: str, num_processes: str, process: str) -> None:
    """What one of the processes does."""
    jax.distributed.initialize(
        f"localhost:{port}", num_processes=int(num_processes), process_id=int(process)
    )
    getattr(importlib.import_module(module), function)()
    jax.distributed.shutdown()
