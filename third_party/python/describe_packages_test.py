import pathlib

import pytest

from third_party.python import describe_packages


def install(site: pathlib.Path, name: str, files: list[str], requires: list[str]) -> None:
    """Writes what pip leaves behind for a distribution."""
    metadata = site / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    lines = [f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {r}" for r in requires)]
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")
    records = [*files, f"{metadata.name}/METADATA"]
    (metadata / "RECORD").write_text("".join(f"{file},,\n" for file in records))
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).touch()


@pytest.mark.parametrize(
    ("name", "target"),
    [("NumPy", "numpy"), ("orbax-checkpoint", "orbax_checkpoint"), ("a.b", "a_b")],
)
def test_target_name_is_lower_case_with_underscores(name: str, target: str) -> None:
    assert describe_packages.target_name(name) == target


def test_requirements_of_extras_are_left_out() -> None:
    requirements = ["numpy>=2", "ml-dtypes (>=0.5)", 'cuda ; extra == "gpu"', "scipy; os_name=='x'"]
    assert describe_packages.required_names(requirements) == {"numpy", "ml_dtypes", "scipy"}


def test_package_is_described_by_what_it_installed(tmp_path: pathlib.Path) -> None:
    files = ["six.py", "lib/__init__.py", "../bin/tool", "bin/other", "lib/native.so"]
    install(tmp_path, "My-Lib", files, requires=["other-lib", "not-installed"])
    install(tmp_path, "other-lib", ["other/__init__.py"], requires=[])
    assert describe_packages.describe(str(tmp_path)) == {
        "my_lib": {
            "folders": ["My_Lib-1.0.dist-info", "lib"],
            "modules": ["six.py"],
            "deps": ["other_lib"],
        },
        "other_lib": {
            "folders": ["other", "other_lib-1.0.dist-info"],
            "modules": [],
            "deps": [],
        },
    }


def test_bazel_files_of_wheels_are_deleted_and_no_others(tmp_path: pathlib.Path) -> None:
    install(tmp_path, "a", ["a/BUILD", "a/b/MODULE.bazel", "a/BUILD.py", "a/build"], requires=[])
    describe_packages.delete_bazel_files(str(tmp_path))
    assert sorted(p.name for p in (tmp_path / "a").rglob("*") if p.is_file()) == [
        "BUILD.py",
        "build",
    ]
