"""Test macros: GoogleTest for C++, pytest on virtual CPU devices for Python."""

load("@rules_cc//cc:defs.bzl", "cc_test")
load("@rules_python//python:defs.bzl", "py_test")
load(":copts.bzl", "ASYNC_EMB_COPTS", "ASYNC_EMB_LINKOPTS")

_PYTEST_MAIN = Label("//tools/testing:pytest_main.py")

def async_emb_cc_test(name, size = "small", deps = [], copts = [], linkopts = [], **kwargs):
    """A GoogleTest without main(), with the project's flags.

    Args:
      name: name of the target.
      size: "small" (60 s), "medium" (300 s) or "large" (900 s).
      deps: libraries under test. GoogleTest and GoogleMock are added.
      copts: flags after the project's own.
      linkopts: linker flags after the project's own.
      **kwargs: as for cc_test.
    """
    cc_test(
        name = name,
        size = size,
        copts = ASYNC_EMB_COPTS + copts,
        linkopts = ASYNC_EMB_LINKOPTS + linkopts,
        linkstatic = True,
        deps = deps + [Label("//third_party/googletest:gtest_main")],
        **kwargs
    )

def _device_env(num_devices):
    """JAX with num_devices CPU devices; XLA's thread pool must hold two threads for each."""
    return {
        "JAX_PLATFORMS": "cpu",
        "PJRT_NPROC": str(max(2 * num_devices, 4)),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=%d" % num_devices,
    }

def async_emb_py_test(
        name,
        srcs = None,
        deps = [],
        data = [],
        devices = [1],
        env = {},
        size = "small",
        tags = [],
        **kwargs):
    """A pytest file, run once for each number of virtual CPU devices.

    With one number the target is NAME. With several there is NAME_<n>dev for each, and
    NAME stands for all of them.

    Args:
      name: name of the target, and of the file: NAME.py.
      srcs: other test files than NAME.py. Helpers belong into a py_library in deps.
      deps: what the tests import. pytest is added.
      data: files that the tests read.
      devices: numbers of virtual CPU devices.
      env: environment variables beside those that set the devices.
      size: "small" (60 s), "medium" (300 s) or "large" (900 s).
      tags: as for py_test. "gpu" and "multi_gpu" keep a test out of a plain run.
      **kwargs: as for py_test.
    """
    srcs = srcs or [name + ".py"]
    names = []
    for num_devices in devices:
        target = name if len(devices) == 1 else "%s_%ddev" % (name, num_devices)
        names.append(target)
        py_test(
            name = target,
            size = size,
            srcs = srcs + [_PYTEST_MAIN],
            args = ["$(rootpath %s)" % src for src in srcs],
            data = data + [Label("//:pyproject.toml")],
            env = _device_env(num_devices) | env,
            legacy_create_init = False,
            main = _PYTEST_MAIN,
            tags = tags,
            deps = deps + [Label("@pip//:pytest")],
            **kwargs
        )
    if len(devices) > 1:
        native.test_suite(
            name = name,
            tags = tags,
            tests = [":" + target for target in names],
        )
