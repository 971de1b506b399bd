from pathlib import Path

import pytest
from absl import flags

from xrex.train.config_file import ConfigFileError, apply_config_file


def parsed_flags(*arguments: str) -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_integer("steps", 5, "", lower_bound=1, flag_values=values)
    flags.DEFINE_float("learning_rate", 0.5, "", flag_values=values)
    flags.DEFINE_bool("resume", False, "", flag_values=values)
    flags.DEFINE_string("workdir", None, "", flag_values=values)
    flags.DEFINE_enum("mode", "fast", ["fast", "slow"], "", flag_values=values)
    flags.DEFINE_list("files", [], "", flag_values=values)
    flags.DEFINE_string("secret", "", "", flag_values=values)
    values(["program", *arguments])
    return values


SETTINGS = ("steps", "learning_rate", "resume", "workdir", "mode", "files")


def apply(folder: Path, text: str, *arguments: str, name: str = "run.toml") -> flags.FlagValues:
    path = folder / name
    path.write_text(text)
    values = parsed_flags(*arguments)
    apply_config_file(path, values, SETTINGS)
    return values


TOML = """
steps = 7
learning_rate = 1e-3
resume = true
workdir = "runs/a"
mode = "slow"
files = ["a.tsv", "b.tsv"]
"""
JSON = """{"steps": 7, "learning_rate": 0.001, "resume": true, "workdir": "runs/a",
           "mode": "slow", "files": ["a.tsv", "b.tsv"]}"""


@pytest.mark.parametrize(("name", "text"), [("run.toml", TOML), ("run.json", JSON)])
def test_flags_get_the_values_of_the_file(tmp_path: Path, name: str, text: str) -> None:
    values = apply(tmp_path, text, name=name)
    assert (values.steps, values.learning_rate, values.resume) == (7, 1e-3, True)
    assert (values.workdir, values.mode, values.files) == ("runs/a", "slow", ["a.tsv", "b.tsv"])


def test_what_the_file_leaves_out_keeps_its_default(tmp_path: Path) -> None:
    values = apply(tmp_path, "steps = 7")
    assert (values.learning_rate, values.mode) == (0.5, "fast")


def test_command_line_wins_even_with_the_default(tmp_path: Path) -> None:
    values = apply(tmp_path, TOML, "--steps=5", "--noresume", "--files=c.tsv")
    assert (values.steps, values.resume, values.files) == (5, False, ["c.tsv"])
    assert values.mode == "slow"


@pytest.mark.parametrize(
    ("key", "closest"), [("lerning_rate", "learning_rate"), ("step", "steps"), ("secret", "steps")]
)
def test_unknown_key_is_named_with_the_closest_and_changes_nothing(
    tmp_path: Path, key: str, closest: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"steps = 7\n{key} = 1\n")
    values = parsed_flags()
    message = f"run.toml: there is no setting '{key}'; the closest is '{closest}'"
    with pytest.raises(ConfigFileError, match=message):
        apply_config_file(path, values, SETTINGS)
    assert values.steps == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = 0", r"steps = 0: .*must be an integer >= 1|steps = 0: .*positive"),
        ("steps = 1.5", "steps = 1.5: "),
        ("mode = 'medium'", "mode = 'medium': .*fast"),
        ("steps = true", "steps = True; it takes one value, as --steps does"),
        ("resume = 'maybe'", "resume = 'maybe': "),
        ("steps = [1]", r"steps = \[1\]; it takes one value"),
        ("files = [1]", r"files = \[1\]; it takes a list of texts"),
        ("[steps]\nx = 1", "steps = {'x': 1}; it takes one value"),
        ("steps = 1979-05-27", "steps = .*; it takes one value"),
    ],
)
@pytest.mark.parametrize("arguments", [(), ("--steps=3", "--mode=slow", "--resume", "--files=")])
def test_value_that_a_flag_does_not_take_is_refused_though_it_be_overridden(
    tmp_path: Path, text: str, message: str, arguments: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigFileError, match=message):
        apply(tmp_path, text, *arguments)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.yaml", "steps: 1", "must end in .toml or .json"),
        ("run.toml", "steps =\nresume = true", "run.toml: .*line 1"),
        ("run.toml", "steps = 1\nsteps = 2\n", "run.toml: .*line 2"),
        ("run.json", "{", "run.json: .*line 1"),
        ("run.json", '{"steps": 1, "steps": 2}', r"\['steps'\] stand twice"),
        ("run.json", "[]", "holds list; it must hold one object"),
    ],
)
def test_malformed_file_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigFileError, match=message):
        apply(tmp_path, text, name=name)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match=r"absent.toml: cannot be read: No such file"):
        apply_config_file(tmp_path / "absent.toml", parsed_flags(), SETTINGS)
