"""nccl_configure: NCCL as the repository @nccl; fetched by CUDA builds only.

That of the folder NCCL_HOME, or else the wheel of requirements_lock.txt, which pip
downloads and checks.
"""

load("//third_party/python:pip.bzl", "run_pip")

_FOLDER_IN_WHEEL = "nvidia/nccl"
_LIBRARY_FOLDERS = ["lib", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu"]

def _library(folder):
    """The shared library of an NCCL, or None."""
    for name in _LIBRARY_FOLDERS:
        library = folder.get_child(name).get_child("libnccl.so.2")
        if library.exists:
            return library
    return None

def _refusal(folder):
    """Why this folder cannot be used, or None."""
    if not folder.get_child("include", "nccl.h").exists:
        return "has no include/nccl.h"
    if not _library(folder):
        return "has no libnccl.so.2 in any of " + ", ".join(_LIBRARY_FOLDERS)
    return None

def _find_nccl(rctx):
    home = rctx.getenv("NCCL_HOME")
    if home:
        if not home.startswith("/"):
            fail("NCCL_HOME is '%s': give an absolute path" % home)
        folder = rctx.path(home)
        way_out = "NCCL_HOME is %s, a folder that %%s: give one with NCCL, or unset it for the wheel from PyPI" % home
    else:
        requirements = Label("//third_party/nccl:requirements_lock.txt")
        run_pip(rctx, "install", requirements, [
            "--no-compile",
            "--root-user-action=ignore",
            "--target",
            "wheel",
        ])
        folder = rctx.path("wheel/" + _FOLDER_IN_WHEEL)
        way_out = "the NCCL that pip installed from %s %%s" % requirements
    refusal = _refusal(folder)
    if refusal:
        fail(way_out % refusal)
    return folder

def _nccl_impl(rctx):
    folder = _find_nccl(rctx)
    headers = folder.get_child("include")

    # One by one: the folder may be /usr/include, with the headers of much else.
    for entry in headers.readdir():
        if entry.basename.startswith("nccl"):
            rctx.symlink(entry, "include/" + entry.basename)
    rctx.symlink(_library(folder), "libnccl.so.2")
    rctx.symlink(Label("//third_party/nccl:nccl.BUILD"), "BUILD.bazel")

_nccl_repository = repository_rule(implementation = _nccl_impl)

def _extension_impl(_mctx):
    _nccl_repository(name = "nccl")

nccl_configure = module_extension(implementation = _extension_impl)
