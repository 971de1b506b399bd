"""movielens: the MovieLens-100K ratings as the repository @movielens_100k.

The three text files are taken out of a wheel that pip downloads and checks. The data
set has terms of its own: free for research, no redistribution, no commercial use.
"""

load("//third_party/python:pip.bzl", "run_pip")

_FILES = ["ml-100k.inter", "ml-100k.item", "ml-100k.user"]
_FOLDER_IN_WHEEL = "recbole/dataset_example/ml-100k"

_BUILD = """\
load("@rules_python//python:defs.bzl", "py_library")

package(default_visibility = ["//visibility:public"])

exports_files({files})

filegroup(
    name = "data",
    srcs = {files},
)

# import movielens_100k: says where the files are.
py_library(
    name = "movielens_100k",
    srcs = ["movielens_100k.py"],
    data = [":data"],
    imports = ["."],
)
"""

def _movielens_impl(rctx):
    requirements = Label("//third_party/movielens:requirements_lock.txt")
    run_pip(rctx, "download", requirements, ["--dest", "wheel"])
    wheels = rctx.path("wheel").readdir()
    if len(wheels) != 1:
        fail("%s must name one wheel, but pip downloaded %d: %s" % (requirements, len(wheels), wheels))

    # Bazel tells the format by the suffix, and Bazel 7 does not know a wheel's.
    rctx.symlink(wheels[0], "wheel.zip")
    rctx.extract("wheel.zip", "extracted", _FOLDER_IN_WHEEL)
    for name in _FILES:
        if not rctx.path("extracted/" + name).exists:
            fail("%s holds no %s/%s" % (wheels[0].basename, _FOLDER_IN_WHEEL, name))
        rctx.symlink("extracted/" + name, name)
    rctx.delete("wheel.zip")
    rctx.delete("wheel")
    rctx.symlink(Label("//third_party/movielens:movielens_100k.py"), "movielens_100k.py")
    rctx.file("BUILD.bazel", _BUILD.format(files = repr(_FILES)))

_movielens_repository = repository_rule(implementation = _movielens_impl)

def _extension_impl(_mctx):
    _movielens_repository(name = "movielens_100k")

movielens = module_extension(implementation = _extension_impl)
