"""Metrics as TensorBoard events."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tensorboardX import SummaryWriter


class TensorBoardLog:
    """Writes the numbers of records as scalars named SPLIT/METRIC, at the records' steps.

    Args:
      folder: where the event files lie; made if it is not there. A resumed run adds a file.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._writer = SummaryWriter(os.fspath(folder), write_to_disk=True)

    def write(self, record: Mapping[str, float | int | str]) -> None:
        """Writes a record, which has a step and a split."""
        step, split = int(record["step"]), record["split"]
        for name, value in record.items():
            if name != "step" and not isinstance(value, str):
                self._writer.add_scalar(f"{split}/{name}", value, step)

    def close(self) -> None:
        """Writes what is left and closes the file."""
        self._writer.close()
