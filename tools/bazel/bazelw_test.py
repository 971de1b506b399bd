import os
import pathlib
import shutil
import subprocess

import pytest

# Says which program ran, where, and with what.
ECHO = '#!/bin/bash\necho "{name}|$PWD|$(printf "<%s>" "$@")"\n'
# The same, but tells a version when asked for it.
BAZEL = '#!/bin/bash\n[[ "$*" == --version ]] && {{ echo "{version}"; exit; }}\necho "bazel|$*"\n'


class Workspace:
    """A workspace with the real bazelw and a stand-in for the installer."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.root = folder / "workspace"
        self.path = folder / "path"
        self.prefix = folder / "prefix"
        self.path.mkdir()
        self.root.mkdir()
        shutil.copy(pathlib.Path("bazelw").resolve(), self.root / "bazelw")
        self.add_program(self.prefix / "bin/bazel", ECHO.format(name="prefix"))
        self.add_program(
            self.root / "tools/bazel/install_debian_bazel.sh", ECHO.format(name="install")
        )

    @staticmethod
    def add_program(path: pathlib.Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run(
        self,
        *arguments: str,
        cwd: pathlib.Path | None = None,
        program: pathlib.Path | None = None,
        bazel: str = "",
    ) -> subprocess.CompletedProcess[str]:
        environment = {
            "BAZEL": bazel,
            "BAZELW_PREFIX": str(self.prefix),
            "HOME": str(self.root.parent),
            "PATH": f"{self.path}:/usr/bin:/bin",
        }
        return subprocess.run(
            [str(program or self.root / "bazelw"), *arguments],
            cwd=cwd or self.root,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def workspace(tmp_path: pathlib.Path) -> Workspace:
    return Workspace(tmp_path)


def test_bazel_variable_goes_before_everything_on_path(workspace: Workspace) -> None:
    workspace.add_program(workspace.path / "bazelisk", ECHO.format(name="bazelisk"))
    mine = workspace.root / "my_bazel"
    workspace.add_program(mine, ECHO.format(name="mine"))
    assert workspace.run("info", bazel=str(mine)).stdout.startswith("mine|")


def test_bazel_variable_that_names_no_program_is_an_error(workspace: Workspace) -> None:
    result = workspace.run("info", bazel="/no/such/bazel")
    assert result.returncode == 1
    assert "BAZEL is '/no/such/bazel', which is not a program" in result.stderr


def test_bazelisk_goes_before_bazel(workspace: Workspace) -> None:
    workspace.add_program(workspace.path / "bazelisk", ECHO.format(name="bazelisk"))
    workspace.add_program(workspace.path / "bazel", BAZEL.format(version="bazel 8.0.0"))
    assert workspace.run("info").stdout.startswith("bazelisk|")


@pytest.mark.parametrize("version", ["bazel 7.1.0", "bazel 7.7.1", "bazel 8.0.0", "bazel 10.0.0"])
def test_recent_bazel_on_path_is_used(workspace: Workspace, version: str) -> None:
    workspace.add_program(workspace.path / "bazel", BAZEL.format(version=version))
    assert workspace.run("info", "x").stdout == "bazel|info x\n"


@pytest.mark.parametrize("version", ["bazel 4.2.3", "bazel 7.0.2", "bazel no_version", ""])
def test_old_or_unknown_bazel_on_path_is_passed_over(workspace: Workspace, version: str) -> None:
    workspace.add_program(workspace.path / "bazel", BAZEL.format(version=version))
    result = workspace.run("info")
    assert "prefix|" in result.stdout
    assert f"passing over {workspace.path}/bazel: not a Bazel >= 7.1" in result.stderr


def test_prefix_is_installed_and_used_when_nothing_else_is_there(workspace: Workspace) -> None:
    installed, used = workspace.run("info").stdout.splitlines()
    assert installed == f"install|{workspace.root}|<{workspace.prefix}>"
    assert used == f"prefix|{workspace.root}|<info>"


def test_failed_install_is_an_error_that_names_the_ways_out(workspace: Workspace) -> None:
    installer = workspace.root / "tools/bazel/install_debian_bazel.sh"
    workspace.add_program(installer, "#!/bin/bash\nexit 3\n")
    result = workspace.run("info")
    assert result.returncode == 1
    assert result.stdout == ""
    assert "install bazelisk, or set BAZEL" in result.stderr


def test_arguments_arrive_as_they_were_given(workspace: Workspace) -> None:
    workspace.add_program(workspace.path / "bazelisk", ECHO.format(name="bazelisk"))
    stdout = workspace.run("run", "//a:b", "--", "two words", "", "*").stdout
    assert stdout.endswith("|<run><//a:b><--><two words><><*>\n")


def test_call_from_outside_runs_in_the_workspace(workspace: Workspace) -> None:
    workspace.add_program(workspace.path / "bazelisk", ECHO.format(name="bazelisk"))
    link = workspace.root.parent / "link"
    os.symlink(workspace.root / "bazelw", link)
    stdout = workspace.run("info", cwd=workspace.root.parent, program=link).stdout
    assert stdout == f"bazelisk|{workspace.root}|<info>\n"


def test_call_from_a_folder_inside_stays_there(workspace: Workspace) -> None:
    workspace.add_program(workspace.path / "bazelisk", ECHO.format(name="bazelisk"))
    stdout = workspace.run("info", cwd=workspace.root / "tools/bazel").stdout
    assert stdout == f"bazelisk|{workspace.root}/tools/bazel|<info>\n"
