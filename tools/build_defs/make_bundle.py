"""Packs files into a .tar.gz that is the same for the same files.

usage: make_bundle --output ARCHIVE --root FOLDER --strip PROGRAM NAME=FILE ...

Every FILE lies at FOLDER/NAME in the archive, without its time and owner; programs and
shared libraries without their symbols. An argument @FILE stands for the lines of FILE.
"""

import argparse
import gzip
import io
import pathlib
import subprocess
import tarfile
import tempfile

_ELF_MAGIC = b"\x7fELF"
_PROGRAM_MODE = 0o755
_FILE_MODE = 0o644


def stripped(content: bytes, strip: str) -> bytes:
    """Returns a program or shared library without what only a debugger and a linker read."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "object")
        path.write_bytes(content)
        subprocess.run([strip, "--strip-unneeded", str(path)], check=True)
        return path.read_bytes()


def pack(files: dict[str, pathlib.Path], root: str, strip: str) -> bytes:
    """Returns the archive.

    Args:
        files: what is packed, by the name in the archive below `root`.
        root: the one folder at the top of the archive.
        strip: the program that removes symbols.
    """
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", fileobj=packed, mode="wb", mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for name, file in sorted(files.items()):
            content = file.read_bytes()
            is_object = content.startswith(_ELF_MAGIC)
            if is_object:
                content = stripped(content, strip)
            entry = tarfile.TarInfo(f"{root}/{name}")
            entry.size = len(content)
            entry.mode = _PROGRAM_MODE if is_object else _FILE_MODE
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def _name_and_file(argument: str) -> tuple[str, pathlib.Path]:
    name, separator, file = argument.partition("=")
    if not (name and separator and file):
        raise argparse.ArgumentTypeError(f"'{argument}' is not NAME=FILE")
    return name, pathlib.Path(file)


def main() -> None:
    """Writes the archive that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, fromfile_prefix_chars="@")
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--root", required=True)
    parser.add_argument("--strip", required=True)
    parser.add_argument("files", nargs="+", type=_name_and_file)
    arguments = parser.parse_args()
    archive = pack(dict(arguments.files), arguments.root, arguments.strip)
    arguments.output.write_bytes(archive)


if __name__ == "__main__":
    main()
