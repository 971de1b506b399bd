"""Test macros: GoogleTest for C++, pytest on virtual CPU devices or GPUs for Python."""

load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_test")
load("@rules_python//python:defs.bzl", "py_test")
load(":cc.bzl", "async_emb_cc_library")
load(":copts.bzl", "ASYNC_EMB_COPTS", "ASYNC_EMB_LINKOPTS")
load(":cuda.bzl", "REQUIRES_CUDA")

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

def async_emb_cuda_test(
        name,
        srcs,
        deps = [],
        num_gpus = 1,
        size = "small",
        tags = [],
        target_compatible_with = [],
        visibility = None):
    """A GoogleTest that needs GPUs: built with --config=cuda, run with --config=gpu.

    programs/NAME is the same as a program, for a bundle: Bazel configures tests apart from
    all else, so that no other target can depend on one while it is built itself.

    Args:
      name: name of the target.
      srcs: C++ files.
      deps: libraries under test. GoogleTest, GoogleMock and CUDA's runtime are added.
      num_gpus: how many the test needs; if more than one, it runs with --config=multi_gpu.
      size: "small" (60 s), "medium" (300 s) or "large" (900 s).
      tags: as for cc_test. "gpu" or "multi_gpu" is added.
      target_compatible_with: constraints beside that of a CUDA build.
      visibility: of the program.
    """
    target_compatible_with = target_compatible_with + REQUIRES_CUDA
    async_emb_cc_library(
        name = name + "_cases",
        testonly = True,
        srcs = srcs,
        alwayslink = True,
        target_compatible_with = target_compatible_with,
        deps = deps + [
            Label("//third_party/cuda:runtime"),
            Label("//third_party/googletest:gtest_main"),
        ],
    )
    async_emb_cc_test(
        name = name,
        size = size,
        tags = tags + ["gpu" if num_gpus == 1 else "multi_gpu"],
        target_compatible_with = target_compatible_with,
        deps = [":%s_cases" % name],
    )
    cc_binary(
        name = "programs/" + name,
        testonly = True,
        linkopts = ASYNC_EMB_LINKOPTS,
        linkstatic = True,
        target_compatible_with = target_compatible_with,
        visibility = visibility,
        deps = [":%s_cases" % name],
    )

def _cpu_env(num_devices):
    """JAX with num_devices CPU devices; XLA's thread pool must hold two threads for each."""
    return {
        "JAX_PLATFORMS": "cpu",
        "PJRT_NPROC": str(max(2 * num_devices, 4)),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=%d" % num_devices,
    }

# How many CPU devices there are beside the GPUs, to compare with.
_NUM_CPU_DEVICES_BESIDE_GPUS = 8

# JAX with one GPU, or with all; GPUs are its default devices.
_GPU_ENV = {
    "gpu": {"JAX_CUDA_VISIBLE_DEVICES": "0"},
    "multi_gpu": {},
}

def _pytest(name, srcs, deps, data, args = [], **kwargs):
    py_test(
        name = name,
        srcs = srcs + [_PYTEST_MAIN],
        args = args + ["$(rootpath %s)" % src for src in srcs],
        data = data + [Label("//:pyproject.toml")],
        legacy_create_init = False,
        main = _PYTEST_MAIN,
        deps = deps + [Label("@pip//:pytest")],
        **kwargs
    )

def async_emb_py_test(
        name,
        srcs = None,
        deps = [],
        data = [],
        devices = [1],
        env = {},
        gpus = [],
        size = "small",
        tags = [],
        target_compatible_with = [],
        **kwargs):
    """A pytest file, run once for each number of virtual CPU devices, and on GPUs.

    With one number the target is NAME. With several there is NAME_<n>dev for each, and
    NAME stands for all of them. NAME_gpu and NAME_multi_gpu are apart from these.

    Args:
      name: name of the target, and of the file: NAME.py.
      srcs: other test files than NAME.py. Helpers belong into a py_library in deps.
      deps: what the tests import. pytest is added.
      data: files that the tests read.
      devices: numbers of virtual CPU devices.
      env: environment variables beside those that set the devices.
      gpus: "gpu" for a target NAME_gpu, in which JAX has one GPU, "multi_gpu" for a target
        NAME_multi_gpu, in which it has all; both have CPU devices to compare with. They
        are built with --config=cuda and run with --config=gpu or --config=multi_gpu.
      size: "small" (60 s), "medium" (300 s) or "large" (900 s).
      tags: as for py_test.
      target_compatible_with: as for py_test.
      **kwargs: as for py_test.
    """
    srcs = srcs or [name + ".py"]
    names = []
    for num_devices in devices:
        target = name if len(devices) == 1 else "%s_%ddev" % (name, num_devices)
        names.append(target)
        _pytest(
            name = target,
            size = size,
            srcs = srcs,
            data = data,
            env = _cpu_env(num_devices) | env,
            tags = tags,
            target_compatible_with = target_compatible_with,
            deps = deps,
            **kwargs
        )
    if len(devices) > 1:
        native.test_suite(
            name = name,
            tags = tags,
            tests = [":" + target for target in names],
        )
    for gpu_tag in gpus:
        _pytest(
            name = "%s_%s" % (name, gpu_tag),
            size = size,
            srcs = srcs,
            args = ["--needs-gpu"],
            data = data,
            env = _cpu_env(_NUM_CPU_DEVICES_BESIDE_GPUS) | {"JAX_PLATFORMS": "cuda,cpu"} |
                  _GPU_ENV[gpu_tag] | env,
            tags = tags + [gpu_tag],
            target_compatible_with = target_compatible_with + REQUIRES_CUDA,
            deps = deps,
            **kwargs
        )
