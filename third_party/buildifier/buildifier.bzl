"""buildifier: the formatter of Bazel files as the repository @buildifier.

npm fetches the package of package-lock.json and checks its hash. On a machine without
npm //:buildifier is a program that says so and exits with code 77, and lint goes on
without it.
"""

_BUILD = """\
package(default_visibility = ["//visibility:public"])

exports_files(["buildifier"])
"""

_STAND_IN = """\
#!/bin/sh
echo "skipped: {reason}" >&2
exit 77
"""

# Names of buildifier's binaries, by the machine's own name for its architecture.
_ARCHITECTURES = {
    "aarch64": "arm64",
    "amd64": "amd64",
    "arm64": "arm64",
    "x86_64": "amd64",
}

def _install(rctx, npm):
    for name in ["package.json", "package-lock.json"]:
        rctx.symlink(Label("//third_party/buildifier:" + name), name)
    run = rctx.execute(
        [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--no-progress"],
        timeout = 600,
    )
    if run.return_code != 0:
        fail("npm could not install //third_party/buildifier:package-lock.json (exit code %d):\n%s" % (
            run.return_code,
            run.stderr[-3000:],
        ))
    system = "darwin" if rctx.os.name.startswith("mac") else rctx.os.name
    name = "buildifier-%s_%s" % (system, _ARCHITECTURES.get(rctx.os.arch, rctx.os.arch))
    binary = rctx.path("node_modules/@bazel/buildifier/" + name)
    if not binary.exists:
        return "the npm package of buildifier has no " + name
    rctx.symlink(binary, "buildifier")
    return None

def _buildifier_impl(rctx):
    npm = rctx.which("npm")
    reason = _install(rctx, npm) if npm else "there is no npm on PATH"
    if reason:
        rctx.file("buildifier", _STAND_IN.format(reason = reason), executable = True)
    rctx.file("BUILD.bazel", _BUILD)

_buildifier_repository = repository_rule(implementation = _buildifier_impl)

def _extension_impl(_mctx):
    _buildifier_repository(name = "buildifier")

buildifier = module_extension(implementation = _extension_impl)
