"""cuda_configure: a CUDA toolkit as the repository @cuda; fetched by CUDA builds only.

The first that is there and recent enough, of: the toolkit at CUDA_HOME or CUDA_PATH, that
of the nvcc on PATH, /usr/local/cuda, the wheels of requirements_lock.txt, which pip
downloads and checks. CUDA_HOME=pypi asks for the wheels.
"""

load("//third_party/python:pip.bzl", "run_pip")

# The first release whose compiler knows compute capability 10.0.
_MIN_VERSION = [12, 8]

_DEFAULT_FOLDER = "/usr/local/cuda"
_WHEELS = "pypi"
_FOLDER_IN_WHEELS = "nvidia/cu13"

_LIBRARY_FOLDERS = ["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"]

def _static_runtime(folder):
    """The static runtime of a toolkit, or None."""
    for name in _LIBRARY_FOLDERS:
        library = folder.get_child(name).get_child("libcudart_static.a")
        if library.exists:
            return library
    return None

def _refusal(rctx, folder):
    """Why this toolkit cannot be used, or None."""
    nvcc = folder.get_child("bin", "nvcc")
    for file in [nvcc, folder.get_child("include", "cuda_runtime.h")]:
        if not file.exists:
            return "has no %s/%s" % (file.dirname.basename, file.basename)
    if not _static_runtime(folder):
        return "has no libcudart_static.a"
    run = rctx.execute([nvcc, "--version"])
    words = run.stdout.split(", release ")
    if run.return_code != 0 or len(words) != 2:
        return "has an nvcc that does not tell its version: %s" % (run.stderr or run.stdout)
    version = words[1].split(",")[0]
    if [int(part) for part in version.split(".")] < _MIN_VERSION:
        return "holds CUDA %s, older than %d.%d" % (version, _MIN_VERSION[0], _MIN_VERSION[1])
    return None

def _named_toolkit(rctx):
    """The toolkit that the environment names, as (variable, value), or None."""
    for variable in ["CUDA_HOME", "CUDA_PATH"]:
        value = rctx.getenv(variable)
        if value:
            return variable, value
    return None

def _candidates(rctx):
    """Folders in which a toolkit may be, best first."""
    folders = []
    nvcc = rctx.which("nvcc")
    if nvcc:
        # It may be a script that starts another: a dry run tells where it works.
        run = rctx.execute([nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null"])
        folders = [line.split("TOP=")[1].strip() for line in run.stderr.split("\n") if "TOP=" in line]
    return [rctx.path(folder) for folder in folders + [_DEFAULT_FOLDER]]

def _toolkit_of_wheels(rctx):
    requirements = Label("//third_party/cuda:requirements_lock.txt")
    run_pip(rctx, "install", requirements, [
        "--no-compile",
        "--root-user-action=ignore",
        "--target",
        "wheels",
    ])
    folder = rctx.path("wheels/" + _FOLDER_IN_WHEELS)
    refusal = _refusal(rctx, folder)
    if refusal:
        fail("the toolkit that pip installed from %s %s" % (requirements, refusal))
    return folder

def _find_toolkit(rctx):
    named = _named_toolkit(rctx)
    if named and named[1] != _WHEELS:
        variable, value = named
        if not value.startswith("/"):
            fail("%s is '%s': give the absolute path of a CUDA toolkit, or '%s' for the one on PyPI" % (variable, value, _WHEELS))
        folder = rctx.path(value)
        refusal = _refusal(rctx, folder)
        if refusal:
            fail(("%s is %s, a folder that %s: give that of a CUDA toolkit of %d.%d or later, or '%s' for " +
                  "the one on PyPI, or unset it") % (variable, value, refusal, _MIN_VERSION[0], _MIN_VERSION[1], _WHEELS))
        return folder
    if not named:
        for folder in _candidates(rctx):
            if not _refusal(rctx, folder):
                return folder.realpath
    return _toolkit_of_wheels(rctx)

def _cuda_impl(rctx):
    toolkit = _find_toolkit(rctx)
    rctx.symlink(toolkit, "toolkit")
    rctx.symlink(_static_runtime(toolkit), "libcudart_static.a")
    rctx.symlink(Label("//third_party/cuda:cuda.BUILD"), "BUILD.bazel")

_cuda_repository = repository_rule(implementation = _cuda_impl)

def _extension_impl(_mctx):
    _cuda_repository(name = "cuda")

cuda_configure = module_extension(implementation = _extension_impl)
