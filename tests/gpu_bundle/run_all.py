"""Runs all tests of the project on the GPUs of this machine, once, and writes a report.

usage: python3 run_all.py [--multi-gpu] [--only PATTERN] [--sanitize] [--report DIR] ...

Every C++ program and every Python test file runs in a process of its own with a time limit of its
own, so one that crashes or hangs does not end the rest. C++ programs, the files of
tests/xrex/cuda/async_emb/gpu and the benchmarks run alone; the others share the GPU, several at a
time. Needs nothing but Python for itself. The exit status is 1 if anything failed or was not run; a
process whose cases were all skipped counts as not run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import glob
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from gpu_reports import (
    CRASHED,
    FAILED,
    NOT_RUN,
    PASSED,
    RECORDS,
    TIMED_OUT,
    Outcome,
    count_cases,
    count_lines,
    line_of,
    summary,
    write_report,
)

NO_CASES = 5  # pytest's exit status when there was nothing to run
# How a file of GPU_TESTS says that it has cases for several GPUs, and that it has no others.
SEVERAL_GPUS = ("ON_GPUS", "SEVERAL_GPUS", "pytest.mark.multi_gpu")
ONLY_SEVERAL_GPUS = "pytestmark = [*SEVERAL_GPUS]"
GPU_TESTS = Path("tests", "xrex", "cuda", "async_emb", "gpu")
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "numpy", "nvidia-nccl-cu13", "pytest")
SANITIZER_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SANITIZER_EXIT = 99
BENCHMARKS = {
    "benchmarks.gpu_exchange": [],
    "benchmarks.train_step": [
        "--platform=gpu",
        "--rows=4000000",
        "--examples=16384",
        "--width=256",
        "--hidden=2048",
        "--layers=2",
        "--unique=131072",
        "--prefetch_workers=4",
        "--steps_per_window=16",
    ],
}
NUM_CPU_DEVICES = 8
TAIL_LINES = 40


@dataclasses.dataclass(frozen=True)
class Job:
    """A process to run.

    Attributes:
        name: how the report calls it.
        command: its command line, without what tells it where to write its XML.
        kind: "cc" or "python", which says how to ask for the XML.
        alone: whether nothing else may use the GPU meanwhile.
        limit_secs: its time limit.
    """

    name: str
    command: list[str]
    kind: str
    alone: bool
    limit_secs: float


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    root = find_root()
    report = options.report.resolve()
    report.mkdir(parents=True, exist_ok=True)
    environment = environment_of(root, options)
    versions = describe_machine(root, environment)
    print("\n".join(f"{name}: {value}" for name, value in versions.items()), flush=True)
    jobs = find_jobs(root, options)
    if not jobs:
        print(f"no test matches {options.only!r} below {root}")
        return 1
    if options.list:
        print("\n".join(job.name for job in jobs))
        return 0
    if options.multi_gpu and (found := count_gpus(root, environment)) < 2:
        print(f"--multi-gpu needs at least 2 GPUs, and JAX sees {found}: leave it out")
        return 1
    for path in report.glob(f"{RECORDS}*.json"):  # of an earlier run
        path.unlink()
    outcomes = run_jobs(jobs, root, report, versions, environment, options)
    if options.k:  # whoever asked for some cases knows that not every file has one
        outcomes = [outcome for outcome in outcomes if outcome.exit_status != NO_CASES]
    print(summary(outcomes))
    print(f"details: {report / 'report.txt'}")
    return 0 if outcomes and all(outcome.status == PASSED for outcome in outcomes) else 1


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Runs all tests on the GPUs of this machine and writes a report."
    )
    parser.add_argument(
        "--multi-gpu",
        action="store_true",
        help="use all GPUs, and run what needs several; without it, what needs one, on one",
    )
    parser.add_argument(
        "--only",
        default="*",
        metavar="PATTERN",
        help="run jobs whose name has this in it (fnmatch)",
    )
    parser.add_argument(
        "--skip", default="", metavar="PATTERN", help="leave out jobs whose name has this in it"
    )
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="pytest's -k for Python files")
    parser.add_argument(
        "--gpu-tests-only",
        action="store_true",
        help="run C++ programs and the Python files that are about GPUs, and no others",
    )
    parser.add_argument(
        "--sanitize",
        action="store_true",
        help="run no tests but the C++ ones of the kernels under compute-sanitizer, or with "
        "--multi-gpu those of several ranks",
    )
    parser.add_argument(
        "--benchmark",
        action="store_true",
        help="run the benchmarks of lookup and update, and of a training step, as well",
    )
    parser.add_argument(
        "--max-ctas",
        default="4,32",
        metavar="N,...",
        help="blocks that the communicator may take in the benchmark",
    )
    parser.add_argument(
        "--crowded-steps",
        type=int,
        default=300,
        metavar="N",
        help="training steps beside XLA's own collectives; many of them are a soak",
    )
    parser.add_argument(
        "--report", type=Path, default=Path("gpu_report"), metavar="DIR", help="where to write"
    )
    parser.add_argument(
        "--file-limit-s", type=float, default=240, help="time limit of each process, in seconds"
    )
    parser.add_argument(
        "--limit-s", type=float, default=3600, help="time limit of it all; the rest is not run"
    )
    parser.add_argument(
        "--jobs", type=int, default=6, help="how many processes may share the GPU at a time"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the jobs")
    return parser.parse_args(arguments)


def find_root() -> Path:
    """The folder that has the package in it: this file's own in a bundle."""
    for folder in Path(__file__).resolve().parents:
        if (folder / "phoenix" / "xrex").is_dir():
            return folder
    raise SystemExit(f"no folder above {__file__} has phoenix/xrex in it")


def environment_of(root: Path, options: argparse.Namespace) -> dict[str, str]:
    """The environment of all jobs: GPUs are JAX's default devices, beside CPU devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    count = f"--xla_force_host_platform_device_count={NUM_CPU_DEVICES}"
    path = [str(root), str(root / "phoenix"), os.environ.get("PYTHONPATH", "")]
    environment = dict(os.environ) | {
        "JAX_PLATFORMS": "cuda,cpu",
        "ASYNC_EMB_CROWDED_STEPS": str(options.crowded_steps),
        "PJRT_NPROC": str(2 * NUM_CPU_DEVICES),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "PYTHONUNBUFFERED": "1",
        "XLA_FLAGS": f"{flags} {count}".strip(),
    }
    environment.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)  # tests look at what XLA does not hold
    if not options.multi_gpu:
        environment["JAX_CUDA_VISIBLE_DEVICES"] = "0"
    return environment


# --- What there is ------------------------------------------------------------------------------


def describe_machine(root: Path, environment: dict[str, str]) -> dict[str, str]:
    """Versions of all that matters, by name."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    found = {"GPUs": output_of(query).replace("\n", "; "), "Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    program = (
        "from xrex.cuda.async_emb import native\n"
        "api = native.load('CUDA')\n"
        "print(api.nccl_version(), api.nccl_library_path())"
    )
    found["NCCL in use"] = output_of([sys.executable, "-c", program], cwd=root, env=environment)
    return found


def count_gpus(root: Path, environment: dict[str, str]) -> int:
    """How many GPUs JAX finds; 0 if it finds none."""
    program = "import jax; print(len(jax.devices('gpu')))"
    env = environment | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    found = output_of([sys.executable, "-c", program], cwd=root, env=env).splitlines()[-1:]
    return int(found[0]) if found and found[0].isdigit() else 0


def output_of(
    command: list[str], cwd: Path | None = None, env: dict[str, str] | None = None
) -> str:
    """What a command prints last, or why it failed."""
    try:
        found = subprocess.run(
            command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({error})"
    lines = (found.stdout if found.returncode == 0 else found.stderr).strip()
    return lines if found.returncode == 0 else f"unknown ({lines.splitlines()[-1:]})"


def find_jobs(root: Path, options: argparse.Namespace) -> list[Job]:
    if options.sanitize:
        jobs = sanitizer_jobs(root, options)
    else:
        jobs = cc_jobs(root, options) + python_jobs(root, options)
    if options.benchmark:
        jobs += benchmark_jobs(options)

    def matches(job: Job, pattern: str) -> bool:
        return fnmatch.fnmatch(job.name, f"*{pattern}*")

    return [
        job
        for job in jobs
        if matches(job, options.only) and not (options.skip and matches(job, options.skip))
    ]


def cc_programs(root: Path) -> list[Path]:
    """The GPU tests in C++: executables, by the names of their sources."""
    return sorted(
        path
        for path in (root / "tests").rglob("*cuda*_test")
        if path.is_file() and os.access(path, os.X_OK)
    )


def needs_several_gpus(program: Path) -> bool:
    return "ranks" in program.name


def cc_jobs(root: Path, options: argparse.Namespace) -> list[Job]:
    return [
        Job(path.name, [str(path)], "cc", alone=True, limit_secs=options.file_limit_s)
        for path in cc_programs(root)
        if options.multi_gpu or not needs_several_gpus(path)
    ]


def sanitizer_jobs(root: Path, options: argparse.Namespace) -> list[Job]:
    sanitizer = shutil.which("compute-sanitizer")
    installed = sorted(glob.glob("/usr/local/cuda*/bin/compute-sanitizer"))
    if sanitizer is None and not installed:
        raise SystemExit("--sanitize needs compute-sanitizer of the CUDA toolkit on PATH")
    program = sanitizer or installed[-1]
    return [
        Job(
            f"{path.name} [{tool}]",
            [
                program,
                f"--tool={tool}",
                f"--error-exitcode={SANITIZER_EXIT}",
                "--report-api-errors=no",  # NCCL asks for what it may have already
                str(path),
                "--gtest_filter=-*Huge*",
            ],
            "cc",
            alone=options.multi_gpu,
            limit_secs=options.file_limit_s,
        )
        for path in cc_programs(root)
        if (needs_several_gpus(path) if options.multi_gpu else "kernel" in path.name)
        for tool in (("memcheck",) if options.multi_gpu else SANITIZER_TOOLS)
    ]


def benchmark_jobs(options: argparse.Namespace) -> list[Job]:
    common = [f"--max_ctas={options.max_ctas}", *([] if options.multi_gpu else ["--devices=1"])]
    return [
        Job(
            name,
            [sys.executable, "-m", name, *arguments, *common],
            "benchmark",
            alone=True,
            limit_secs=options.file_limit_s,
        )
        for name, arguments in BENCHMARKS.items()
    ]


def python_jobs(root: Path, options: argparse.Namespace) -> list[Job]:
    """GPU tests first; with several GPUs only what needs them, and all others on all GPUs."""
    marks = "multi_gpu" if options.multi_gpu else "not multi_gpu"
    jobs = []
    for path in sorted((root / "tests" / "xrex").rglob("*_test.py")):
        name = path.relative_to(root)
        alone = GPU_TESTS in name.parents
        if options.gpu_tests_only and not alone:
            continue
        if alone and not has_cases(path, options.multi_gpu):
            continue
        command = [sys.executable, "-m", "pytest", str(name), "-v", "--tb=short", "-rs"]
        command += ["-p", "no:cacheprovider", "--durations=5", "--durations-min=2"]
        command += ["-o", f"faulthandler_timeout={0.7 * options.file_limit_s:.0f}"]
        command += ["-m", marks] if alone else []
        command += ["-k", options.k] if options.k else []
        jobs.append(Job(str(name), command, "python", alone, options.file_limit_s))
    return sorted(jobs, key=lambda job: not job.alone)


def has_cases(path: Path, multi_gpu: bool) -> bool:
    """Whether the marks leave anything of a file of GPU_TESTS."""
    source = path.read_text()
    if multi_gpu:
        return any(name in source for name in SEVERAL_GPUS)
    return ONLY_SEVERAL_GPUS not in source


# --- Running ------------------------------------------------------------------------------------


def run_jobs(
    jobs: list[Job],
    root: Path,
    report: Path,
    versions: dict[str, str],
    environment: dict[str, str],
    options: argparse.Namespace,
) -> list[Outcome]:
    """Runs all jobs; the report is up to date after each of them, should this process be ended."""
    deadline = time.monotonic() + options.limit_s
    outcomes = {job.name: Outcome(job.name) for job in jobs}
    writing = threading.Lock()

    def run(job: Job, memory_fraction: float) -> None:
        env = environment | {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{memory_fraction:.3f}"}
        outcome = run_job(job, root, report, env, deadline)
        with writing:
            outcomes[job.name] = outcome
            print(line_of(outcome), flush=True)
            write_report(report, versions, list(outcomes.values()))

    for job in jobs:
        if job.alone:
            run(job, 0.4)
    num_sharers = max(1, options.jobs)
    with concurrent.futures.ThreadPoolExecutor(num_sharers) as pool:
        for future in [pool.submit(run, job, 0.6 / num_sharers) for job in jobs if not job.alone]:
            future.result()
    return list(outcomes.values())


def run_job(
    job: Job, root: Path, report: Path, environment: dict[str, str], deadline: float
) -> Outcome:
    outcome = Outcome(job.name)
    left = deadline - time.monotonic()
    if left <= 0:
        return outcome
    stem = "".join(c if c.isalnum() else "_" for c in job.name)
    log, xml = report / f"{stem}.log", report / f"{stem}.xml"
    xml.unlink(missing_ok=True)
    output_option = {
        "python": f"--junitxml={xml}",
        "cc": f"--gtest_output=xml:{xml}",
        "benchmark": f"--out={report / f'{RECORDS}{stem}.json'}",
    }[job.kind]
    if job.kind == "cc":
        environment = environment | {"LD_LIBRARY_PATH": nccl_folder()}
    began = time.monotonic()
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*job.command, output_option],
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            outcome.exit_status = process.wait(min(job.limit_secs, left))
        except subprocess.TimeoutExpired:
            outcome.status = TIMED_OUT
        finally:
            end_group(process)
    outcome.secs = time.monotonic() - began
    if job.kind != "benchmark" and not count_cases(xml, outcome):
        count_lines(log.read_text(errors="replace"), outcome)
    if outcome.status != TIMED_OUT:
        outcome.status = status_of(job, outcome)
    if outcome.status != PASSED:
        lines = log.read_text(errors="replace").splitlines()
        outcome.tail = "\n".join(lines[-TAIL_LINES:])
    return outcome


def nccl_folder() -> str:
    """Where libnccl.so.2 lies, for programs that do not ask Python; after what is set already."""
    folders = [os.environ.get("LD_LIBRARY_PATH", "")]
    with contextlib.suppress(ModuleNotFoundError):
        found = importlib.util.find_spec("nvidia.nccl")
        folders += [f"{path}/lib" for path in (found and found.submodule_search_locations) or []]
    return os.pathsep.join(folder for folder in folders if folder)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a job and all processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def status_of(job: Job, outcome: Outcome) -> str:
    if outcome.exit_status == 0 and outcome.failed == 0:
        ran = outcome.passed > 0 or job.kind == "benchmark"  # which has no cases
        return PASSED if ran else NOT_RUN
    if outcome.exit_status == NO_CASES and job.kind == "python":
        return NOT_RUN
    if outcome.exit_status == 0:
        return FAILED
    known = (1,) if job.kind == "python" else (1, SANITIZER_EXIT)
    return FAILED if outcome.exit_status in known else CRASHED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
