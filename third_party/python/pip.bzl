"""Runs pip of the host's Python inside a repository rule."""

# pip must not obey what a person has set for his own installs; where packages come
# from (pip.conf, PIP_INDEX_URL) stays the machine's business.
_ENVIRONMENT = {
    "PIP_REQUIRE_VIRTUALENV": "0",
    "PIP_USER": "0",
    "PYTHONHOME": "",
    "PYTHONPATH": "",
}

def host_python_executable(rctx):
    """Path of the interpreter behind @host_python; a change of it fetches the caller again."""
    return json.decode(rctx.read(Label("@host_python//:python.json")))["executable"]

def run_pip(rctx, subcommand, requirements, arguments):
    """Runs a pip subcommand on a lock file whose every line is pinned by hash.

    Args:
      rctx: the repository context; the lock file is watched in it.
      subcommand: "install" or "download".
      requirements: label of the lock file.
      arguments: further arguments of the subcommand.
    """
    lock = rctx.path(requirements)
    rctx.watch(lock)
    rctx.report_progress("pip %s -r %s" % (subcommand, lock.basename))
    run = rctx.execute(
        [
            host_python_executable(rctx),
            "-m",
            "pip",
            subcommand,
            "--quiet",
            "--no-input",
            "--no-deps",
            "--only-binary=:all:",
            "--require-hashes",
            "--disable-pip-version-check",
            "--requirement",
            lock,
        ] + arguments,
        environment = _ENVIRONMENT,
        timeout = 1800,
    )
    if run.return_code != 0:
        fail("pip could not %s %s (exit code %d):\n%s" % (
            subcommand,
            requirements,
            run.return_code,
            run.stderr[-3000:],
        ))
