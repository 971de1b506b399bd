import math
import struct
from pathlib import Path

import pytest

# There under Bazel; a machine that runs the bundle may be without it.
pytest.importorskip("tensorboardX")

from tensorboardX.proto.event_pb2 import Event

from xrex.train.tensorboard_log import TensorBoardLog


def scalars(folder: Path) -> list[tuple[str, int, float]]:
    """(name, step, value) of all event files of a folder.

    A file is a sequence of: length (uint64), checksum (uint32), event, checksum (uint32).
    """
    found = []
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack_from("<Q", content)
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return found


def test_numbers_of_a_record_become_scalars_of_its_split(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path / "events")
    log.write({"step": 10, "split": "train", "auc": 0.75, "skipped_steps": 2})
    log.write({"step": 20, "split": "valid", "auc": 0.5})
    log.close()
    assert scalars(tmp_path / "events") == [
        ("train/auc", 10, 0.75),
        ("train/skipped_steps", 10, 2.0),
        ("valid/auc", 20, 0.5),
    ]


def test_value_that_is_not_a_number_is_kept_as_such(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path)
    log.write({"step": 1, "split": "train", "auc": math.nan})
    log.close()
    ((name, step, value),) = scalars(tmp_path)
    assert (name, step) == ("train/auc", 1)
    assert math.isnan(value)
