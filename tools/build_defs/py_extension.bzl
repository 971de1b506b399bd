"""py_extension: a nanobind module."""

load("@rules_cc//cc:defs.bzl", "cc_binary")
load("@rules_python//python:defs.bzl", "py_library")
load(":copts.bzl", "ASYNC_EMB_COPTS", "ASYNC_EMB_LINKOPTS", "NANOBIND_COPTS")

def py_extension(name, srcs = [], deps = [], copts = [], linkopts = [], imports = [], **kwargs):
    """A module NAME, found beside the Python files of the package the target is in.

    The file is NAME.so without a version in its name, which every CPython imports. It
    uses the stable ABI of Python 3.12, so one build serves 3.12 and all later versions.

    Args:
      name: name of the target and of the module.
      srcs: C++ files; NB_MODULE may also come from a library in deps that has alwayslink.
      deps: C++ libraries. nanobind is added.
      copts: flags after the project's own.
      linkopts: linker flags after the project's own.
      imports: as for py_library, the Python root relative to this package.
      **kwargs: visibility, tags and the like, for both the library and the module.
    """
    shared_object = name + ".so"
    cc_binary(
        name = shared_object,
        srcs = srcs,
        copts = ASYNC_EMB_COPTS + NANOBIND_COPTS + copts,
        linkopts = ASYNC_EMB_LINKOPTS + linkopts,
        linkshared = True,
        linkstatic = True,
        deps = deps + [Label("//third_party/nanobind")],
        **kwargs
    )
    py_library(
        name = name,
        data = [":" + shared_object],
        imports = imports,
        **kwargs
    )
