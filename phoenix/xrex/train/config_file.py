"""Settings from a file: a TOML or JSON table of flag names and values."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from absl import flags


class ConfigFileError(ValueError):
    """A file of settings that cannot be used: says which file, which setting, and why."""


def apply_config_file(path: Path, flag_values: flags.FlagValues, settings: Collection[str]) -> None:
    """Gives flags the values of a file. Flags that stand on the command line keep theirs.

    Args:
      path: ends in .toml or .json. Its keys are names of flags. A list is for a flag that takes
        several values.
      flag_values: the parsed flags.
      settings: names of the flags that the file may set.

    Raises:
      ConfigFileError: the file cannot be read, or names an unknown flag, or gives one a value that
        it does not take. No flag is changed in the first two cases.
    """
    values = _read(path)
    for name in values:
        if name not in settings:
            (closest,) = difflib.get_close_matches(name, settings, n=1, cutoff=0.0)
            raise ConfigFileError(
                f"{path}: there is no setting {name!r}; the closest is {closest!r} (--help lists "
                "all)"
            )
    for name, value in values.items():
        flag = flag_values[name]
        text = _as_text(path, flag, value)
        try:
            flag.parser.parse(text)  # of every flag: an overridden value is to be right as well
            if not flag.present:
                flag.parse(text)
        except (flags.Error, ValueError) as error:
            raise ConfigFileError(f"{path}: {name} = {value!r}: {error}") from error


def _read(path: Path) -> Mapping[str, Any]:
    if path.suffix not in (".toml", ".json"):
        raise ConfigFileError(
            f"{path}: its kind is told by its name, which must end in .toml or .json"
        )
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            return tomllib.loads(text)
        values = json.loads(text, object_pairs_hook=_distinct)
    except OSError as error:
        raise ConfigFileError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigFileError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigFileError(f"{path}: holds {type(values).__name__}; it must hold one object")
    return values


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"{sorted(twice)} stand twice; give each setting once")
    return dict(pairs)


def _as_text(path: Path, flag: flags.Flag, value: Any) -> str:
    """The value as it would stand on the command line."""
    takes_list = isinstance(flag.parser, flags.ListParser)
    if isinstance(value, list) and takes_list and all(isinstance(item, str) for item in value):
        return ",".join(value)
    if isinstance(value, bool) and flag.boolean:
        return str(value).lower()
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    wanted = "a list of texts" if takes_list else f"one value, as --{flag.name} does"
    raise ConfigFileError(f"{path}: {flag.name} = {value!r}; it takes {wanted}")
