"""Devices of tests that are run without Bazel: eight virtual CPU devices beside any GPUs.

Bazel's test targets set their own, and have no part of this file.
"""

import os

NUM_CPU_DEVICES = 8

os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={NUM_CPU_DEVICES}")
# XLA's thread pool must hold two threads for each device.
os.environ.setdefault("PJRT_NPROC", str(2 * NUM_CPU_DEVICES))
