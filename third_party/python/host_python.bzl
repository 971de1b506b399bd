"""host_python: the machine's own CPython, as a toolchain and as C headers.

Nothing is downloaded: the first interpreter that runs, is new enough and has pip and
its C headers is taken. PYTHON_BIN_PATH names one instead.
"""

# Preferred first. Any later CPython is found as plain python3.
_MINOR_VERSIONS = ["3.13", "3.12", "3.14"]

_BUILD = """\
load("@rules_cc//cc:defs.bzl", "cc_library")
load("@rules_python//python:defs.bzl", "py_runtime", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

exports_files(["python.json"])

# Without stub_shebang the launcher of a py_binary would start under any python3.
py_runtime(
    name = "runtime",
    interpreter_path = "{executable}",
    python_version = "PY3",
    stub_shebang = "#!{executable}",
)

py_runtime_pair(
    name = "runtime_pair",
    py3_runtime = ":runtime",
)

cc_library(
    name = "headers",
    hdrs = glob(["include/**/*.h"]),
    includes = ["include"],
)
"""

def _candidates(rctx):
    """Paths of the interpreters to try, best first."""
    chosen = rctx.getenv("PYTHON_BIN_PATH")
    if chosen:
        return [chosen]
    found = [rctx.which("python" + minor) for minor in _MINOR_VERSIONS]
    home = rctx.getenv("HOME") or ""
    pyenv = rctx.path((rctx.getenv("PYENV_ROOT") or home + "/.pyenv") + "/versions")
    if pyenv.exists:
        for minor in _MINOR_VERSIONS:
            found += [
                folder.get_child("bin", "python" + minor)
                for folder in pyenv.readdir()
                if folder.basename.startswith(minor + ".")
            ]
    found.append(rctx.which("python3"))
    return [path for path in found if path]

def _refusal(python, min_version):
    """Why this interpreter cannot be used, or None."""
    if python["version"] < [int(part) for part in min_version.split(".")]:
        return "is %s, older than %s" % (".".join([str(n) for n in python["version"]]), min_version)
    if not python["has_pip"]:
        return "lacks pip (on Debian: apt-get install python3-pip)"
    if not python["has_headers"]:
        return "lacks its C headers, Python.h (on Debian: apt-get install python3-dev)"
    return None

def _host_python_impl(rctx):
    probe = rctx.path(Label("//third_party/python:probe_python.py"))
    refused = []
    for executable in _candidates(rctx):
        # Each one is run: a pyenv shim exists for versions that are not active.
        run = rctx.execute([executable, "-I", probe])
        if run.return_code != 0:
            lines = (run.stderr.strip() or "no output").split("\n")
            refused.append("%s: does not run: %s" % (executable, lines[-1]))
            continue
        python = json.decode(run.stdout)
        reason = _refusal(python, rctx.attr.min_version)
        if reason:
            refused.append("%s: %s" % (executable, reason))
            continue
        rctx.symlink(python["include"], "include")
        rctx.file("python.json", json.encode(python))
        rctx.file("BUILD.bazel", _BUILD.format(executable = python["executable"]))
        return
    fail("found no Python >= %s with pip and C headers; install one, or set PYTHON_BIN_PATH to one. Tried:\n  %s" % (
        rctx.attr.min_version,
        "\n  ".join(refused) or "(no python3 on PATH or under ~/.pyenv/versions)",
    ))

_host_python_repository = repository_rule(
    implementation = _host_python_impl,
    attrs = {"min_version": attr.string(mandatory = True)},
    doc = "Finds an interpreter; //:python.json describes it for other repository rules.",
)

def _extension_impl(mctx):
    for module in mctx.modules:
        for tag in module.tags.find:
            _host_python_repository(name = tag.name, min_version = tag.min_version)

host_python = module_extension(
    implementation = _extension_impl,
    tag_classes = {
        "find": tag_class(attrs = {
            "min_version": attr.string(mandatory = True),
            "name": attr.string(mandatory = True),
        }),
    },
)
