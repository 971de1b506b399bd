"""One process for each GPU, connected by jax.distributed; some of them may be stopped or killed."""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax

_ROOT = Path(__file__).parents[5]


class GpuProcess:
    """One process; what it prints can be waited for line by line."""

    def __init__(self, arguments: list[str], env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            arguments,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.output: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def wait_for_line(self, start: str, timeout_secs: float) -> str:
        """The first line from now on that begins with `start`."""
        deadline = time.monotonic() + timeout_secs
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"no {start!r} within {timeout_secs} s: {self.text}") from None
            if line is None:
                raise AssertionError(f"the process ended without {start!r}: {self.text}")
            self.output.append(line)
            if line.startswith(start):
                return line

    def wait(self, timeout_secs: float) -> int:
        """The exit status, once the process has ended."""
        status = self._process.wait(timeout_secs)
        while (line := self._lines.get(timeout=10)) is not None:
            self.output.append(line)
        return status

    @property
    def text(self) -> str:
        """What it has printed, as far as it was waited for."""
        return "\n".join(self.output)

    def write(self, text: str) -> None:
        """Gives the process `text` to read."""
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process."""
        self._process.send_signal(number)

    def end(self) -> None:
        """Ends the process, also a stopped one."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def gpu_processes(
    module: str, function: str, num_processes: int, **env: str
) -> Iterator[list[GpuProcess]]:
    """Runs a function of a test module in processes that have ended when the with block ends.

    Args:
        module: the full name of the module.
        function: its name; it takes no arguments and finds jax.distributed initialised.
        num_processes: how many; process i has GPU i and sees them all.
        **env: environment variables beside those that connect the processes.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    variables = dict(os.environ)
    variables |= {
        "PYTHONPATH": os.pathsep.join([str(_ROOT), str(_ROOT / "phoenix"), *sys.path]),
        "PYTHONUNBUFFERED": "1",
        "JAX_PLATFORMS": "cuda",
        # The process that runs the tests may hold memory of the same GPUs.
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2",
    }
    program = (
        "import sys; from tests.xrex.cuda.async_emb.gpu.gpu_processes import main; "
        "main(*sys.argv[1:])"
    )
    common = [sys.executable, "-c", program, module, function, str(port), str(num_processes)]
    processes = [
        GpuProcess([*common, str(process)], variables | env) for process in range(num_processes)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.end()


def main(module: str, function: str, port: str, num_processes: str, process: str) -> None:
    """What one of the processes does."""
    jax.distributed.initialize(
        f"localhost:{port}",
        num_processes=int(num_processes),
        process_id=int(process),
        local_device_ids=[int(process)],
    )
    getattr(importlib.import_module(module), function)()
    jax.distributed.shutdown()
