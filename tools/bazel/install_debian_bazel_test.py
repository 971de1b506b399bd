import os
import pathlib
import subprocess
import tempfile
from collections.abc import Iterator

import pytest

SCRIPT = pathlib.Path("tools/bazel/install_debian_bazel.sh").resolve()

# What the installer asks the host for. Each is a stand-in, so that no test needs a
# Debian host or a mirror.
TOOLS = {
    "apt-cache": "exit 0",
    "apt-get": "exit 100",
    "basename": 'exec /usr/bin/basename "$@"',
    "dirname": 'exec /usr/bin/dirname "$@"',
    "dpkg": "echo ${FAKE_ARCH:-amd64}",
    "dpkg-deb": "exit 1",
    "flock": "exit 0",
    "uname": "echo ${FAKE_SYSTEM:-Linux}",
}
FROM_HOST = ["cat", "chmod", "head", "mkdir", "mktemp", "readlink", "rm", "sed", "sort", "tail"]


def install(
    folder: pathlib.Path, prefix: str, *, without: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs the installer with nothing on PATH but the stand-ins."""
    tools = folder / "tools"
    tools.mkdir()
    for name, body in TOOLS.items():
        if name != without:
            (tools / name).write_text(f"#!/bin/bash\n{body}\n")
            (tools / name).chmod(0o755)
    for name in FROM_HOST:
        for parent in ("/usr/bin", "/bin"):
            if pathlib.Path(parent, name).exists():
                (tools / name).symlink_to(pathlib.Path(parent, name))
                break
    return subprocess.run(
        ["/bin/bash", str(SCRIPT), prefix],
        cwd=folder,
        env={"PATH": str(tools), "HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    """A folder that is not below /tmp, which the installer refuses."""
    parent = os.environ.get("TEST_TMPDIR", pathlib.Path.home())
    with tempfile.TemporaryDirectory(dir=parent) as path:
        yield pathlib.Path(path)


@pytest.mark.parametrize("missing", ["apt-get", "apt-cache", "dpkg-deb", "flock"])
def test_host_without_apt_is_told_what_is_missing(folder: pathlib.Path, missing: str) -> None:
    result = install(folder, "prefix", without=missing)
    assert result.returncode == 1
    assert f"'{missing}' is missing" in result.stderr
    assert "install bazelisk" in result.stderr


@pytest.mark.parametrize(
    ("prefix", "rule"),
    [("/tmp/bazel", "must not lie under /tmp"), ("two words", "must not hold white space")],
)
def test_prefix_that_cannot_work_is_refused(folder: pathlib.Path, prefix: str, rule: str) -> None:
    result = install(folder, prefix)
    assert result.returncode == 1
    assert prefix in result.stderr
    assert rule in result.stderr


def test_other_system_is_refused(folder: pathlib.Path) -> None:
    result = install(folder, "prefix", FAKE_SYSTEM="Darwin")
    assert result.returncode == 1
    assert "for Linux" in result.stderr


def test_unknown_architecture_is_refused(folder: pathlib.Path) -> None:
    result = install(folder, "prefix", FAKE_ARCH="riscv64")
    assert result.returncode == 1
    assert "architecture 'riscv64'" in result.stderr


def test_unreachable_mirror_leaves_nothing_behind(folder: pathlib.Path) -> None:
    result = install(folder, "prefix", BAZELW_MIRROR="file:///nowhere")
    assert result.returncode == 1
    assert "set BAZELW_MIRROR or BAZELW_SUITE" in result.stderr
    assert sorted(p.name for p in folder.glob("prefix*")) == ["prefix.lock"]


def test_installed_prefix_is_left_alone(folder: pathlib.Path) -> None:
    launcher = folder / "prefix/bin/bazel"
    launcher.parent.mkdir(parents=True)
    launcher.write_text("#!/bin/bash\n")
    launcher.chmod(0o755)
    (folder / "prefix/.installed").write_text("layout 4, forky, amd64\nbazel-bootstrap 7\n")
    result = install(folder, "prefix")
    assert result.returncode == 0
    assert result.stderr == ""
    assert launcher.exists()


def test_prefix_without_a_launcher_is_not_taken_for_installed(folder: pathlib.Path) -> None:
    (folder / "prefix").mkdir()
    (folder / "prefix/.installed").write_text("layout 4, forky, amd64\nbazel-bootstrap 7\n")
    assert install(folder, "prefix").returncode == 1
