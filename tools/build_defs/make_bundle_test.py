import io
import os
import pathlib
import sys
import tarfile

import pytest

from tools.build_defs import make_bundle

STRIP = "a program that no plain file needs"


@pytest.fixture
def script(tmp_path: pathlib.Path) -> pathlib.Path:
    file = tmp_path / "script.py"
    file.write_text("print('hello')\n")
    return file


def entries(archive: bytes) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        return opened.getmembers()


def test_files_lie_below_the_root_by_their_names(script: pathlib.Path) -> None:
    archive = make_bundle.pack({"b/c.py": script, "a.py": script}, "top", STRIP)
    assert [entry.name for entry in entries(archive)] == ["top/a.py", "top/b/c.py"]


def test_contents_are_kept(script: pathlib.Path) -> None:
    archive = make_bundle.pack({"a.py": script}, "top", STRIP)
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        (member,) = opened.getmembers()
        packed = opened.extractfile(member)
        assert packed is not None
        assert packed.read() == script.read_bytes()


def test_archive_does_not_depend_on_times_and_permissions(script: pathlib.Path) -> None:
    first = make_bundle.pack({"a.py": script}, "top", STRIP)
    os.utime(script, (1, 1))
    script.chmod(0o700)
    assert make_bundle.pack({"a.py": script}, "top", STRIP) == first


def test_programs_are_stripped_and_executable(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF and symbols")
    strip = tmp_path / "strip"
    strip.write_text(f"#!{sys.executable}\nimport sys\nopen(sys.argv[-1], 'w').write('less')\n")
    strip.chmod(0o755)
    (entry,) = entries(make_bundle.pack({"program": program}, "top", str(strip)))
    assert entry.mode == 0o755
    assert entry.size == len("less")


@pytest.mark.parametrize("argument", ["name", "=file", "name="])
def test_argument_without_name_or_file_is_refused(
    argument: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--output=o", "--root=top", "--strip=s"]
    monkeypatch.setattr("sys.argv", ["make_bundle", *options, argument])
    with pytest.raises(SystemExit):
        make_bundle.main()
    assert f"'{argument}' is not NAME=FILE" in capsys.readouterr().err
