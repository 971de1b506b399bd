"""pip_env: the wheels of a hash-pinned lock file as a repository.

Every package NAME of the lock file becomes a py_library //:NAME with its dependencies.
C++ files in a wheel are offered by the packages listed in cc_packages: BUILD file
//third_party/x:x.BUILD for wheel folder y makes the package //y, in which the folder y
of the installed wheel is found as "files". Programs in wheels are offered as
//:site-packages/PATH.
"""

load(":pip.bzl", "host_python_executable", "run_pip")

_BUILD_HEAD = """\
load("@rules_python//python:defs.bzl", "py_library")

package(default_visibility = ["//visibility:public"])
"""

# Hypothesis and other tools tell by this name what is not the project's own code.
_SITE = "site-packages"

# The lock file and the interpreter, which together determine what is installed.
_FINGERPRINT = "fingerprint.txt"

_BUILD_BINARIES = """
exports_files({files})
"""

# Whole folders and not the thousands of files in them, which would be linked one by one
# for each test. Bazel does not look into a folder for changes: that what is installed is
# another, it sees by the fingerprint.
_BUILD_PACKAGE = """
py_library(
    name = "{name}",
    srcs = {sources},
    data = {data},
    imports = ["{site}"],
    deps = {deps},
)
"""

def _package_build(name, package):
    modules = package["modules"]
    folders_and_libraries = package["folders"] + [m for m in modules if not m.endswith(".py")]
    return _BUILD_PACKAGE.format(
        name = name,
        sources = ["%s/%s" % (_SITE, m) for m in modules if m.endswith(".py")],
        data = [_FINGERPRINT] + ["%s/%s" % (_SITE, entry) for entry in folders_and_libraries],
        site = _SITE,
        deps = [":" + dep for dep in package["deps"]],
    )

def _pip_env_impl(rctx):
    executable = host_python_executable(rctx)
    helper = rctx.path(Label("//third_party/python:describe_packages.py"))
    rctx.watch(helper)
    run_pip(rctx, "install", rctx.attr.requirements, [
        "--no-compile",
        "--root-user-action=ignore",
        "--target",
        _SITE,
    ])

    # Compiled once, here: each sandboxed test would otherwise compile JAX anew.
    # A hash instead of a time stamp, as Bazel does not keep times.
    rctx.execute(
        [executable, "-m", "compileall", "-q", "-j0", "--invalidation-mode=unchecked-hash", _SITE],
        timeout = 600,
    )
    run = rctx.execute([executable, "-I", helper, _SITE])
    if run.return_code != 0:
        fail("cannot describe the packages of %s:\n%s" % (rctx.attr.requirements, run.stderr))
    packages = json.decode(run.stdout)
    rctx.file(_FINGERPRINT, executable + "\n" + rctx.read(rctx.attr.requirements))
    build = _BUILD_HEAD
    if rctx.attr.binaries:
        build += _BUILD_BINARIES.format(files = [_SITE + "/" + b for b in rctx.attr.binaries])
    for name, package in packages.items():
        build += _package_build(name, package)
    rctx.file("BUILD.bazel", build)
    for build_file, folder in rctx.attr.cc_packages.items():
        rctx.symlink(_SITE + "/" + folder, folder + "/files")
        rctx.symlink(rctx.path(build_file), folder + "/BUILD.bazel")

_pip_env_repository = repository_rule(
    implementation = _pip_env_impl,
    attrs = {
        "binaries": attr.string_list(),
        "cc_packages": attr.label_keyed_string_dict(),
        "requirements": attr.label(mandatory = True),
    },
)

def _extension_impl(mctx):
    for module in mctx.modules:
        for tag in module.tags.install:
            _pip_env_repository(
                name = tag.name,
                binaries = tag.binaries,
                cc_packages = tag.cc_packages,
                requirements = tag.requirements,
            )

pip_env = module_extension(
    implementation = _extension_impl,
    tag_classes = {
        "install": tag_class(attrs = {
            "binaries": attr.string_list(doc = "programs in wheels, as paths below site-packages"),
            "cc_packages": attr.label_keyed_string_dict(doc = "BUILD file -> folder of a wheel"),
            "name": attr.string(mandatory = True),
            "requirements": attr.label(mandatory = True),
        }),
    },
)
