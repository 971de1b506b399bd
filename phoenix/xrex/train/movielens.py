"""MovieLens-100K as id features, read from `ml-100k.inter`, `.user` and `.item`.

An example is one rating. Its label is 1 when the rating is at least `POSITIVE_RATING`. Its history
holds the user's last items rated strictly before it; ratings of the same second do not see each
other.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from xrex.train.atomic_files import AtomicTable, read_atomic_file
from xrex.train.features import (
    PADDING_ROW,
    ExampleSet,
    FeatureLayout,
    Field,
    hash_rows,
    pad_rows,
)

POSITIVE_RATING = 4.0
GENRE_SLOTS = 6
HISTORY_SLOTS = 20
MAX_AGE = 120

LAYOUT = FeatureLayout(
    (
        Field("user"),
        Field("item"),
        Field("age_band"),
        Field("gender"),
        Field("occupation"),
        Field("release_year"),
        Field("genres", GENRE_SLOTS),
        Field("history", HISTORY_SLOTS),
    )
)


@dataclasses.dataclass(frozen=True)
class _Side:
    """Hashed features of all users or all items: the position of each key, and its rows."""

    position: Mapping[str, int]
    rows: Mapping[str, np.ndarray]


def age_band(age: int) -> str:
    """The decade that an age falls into, such as "20-29"."""
    start = age // 10 * 10
    return f"{start}-{start + 9}"


def _positions(table: AtomicTable, column: str) -> dict[str, int]:
    result: dict[str, int] = {}
    for row, key in enumerate(table.tokens(column)):
        if key in result:
            first = table.lines[result[key]]
            raise table.error(row, column, f"{key!r} was already given in line {first}")
        result[key] = row
    return result


def _age_bands(table: AtomicTable) -> list[str]:
    bands = []
    for row, text in enumerate(table.tokens("age")):
        if not (text.isascii() and text.isdigit()) or int(text) > MAX_AGE:
            raise table.error(row, "age", f"{text!r} is not a whole number from 0 to {MAX_AGE}")
        bands.append(age_band(int(text)))
    return bands


def _read_users(path: Path, num_rows: int) -> _Side:
    columns = dict.fromkeys(("user_id", "age", "gender", "occupation"), "token")
    table = read_atomic_file(path, columns)
    values = {
        "user": table.tokens("user_id"),
        "age_band": _age_bands(table),
        "gender": table.tokens("gender"),
        "occupation": table.tokens("occupation"),
    }
    rows = {name: hash_rows(name, column, num_rows) for name, column in values.items()}
    return _Side(_positions(table, "user_id"), rows)


def _read_items(path: Path, num_rows: int) -> _Side:
    table = read_atomic_file(
        path, {"item_id": "token", "release_year": "token", "class": "token_seq"}
    )
    genres = table.token_lists("class")
    for row, names in enumerate(genres):
        if len(names) > GENRE_SLOTS:
            raise table.error(row, "class", f"{len(names)} genres, there are {GENRE_SLOTS} slots")
    keys = table.tokens("item_id")
    genre_rows = (hash_rows("genres", names, num_rows).tolist() for names in genres)
    rows = {
        "item": hash_rows("item", keys, num_rows),
        "history": hash_rows("history", keys, num_rows),
        "release_year": hash_rows("release_year", table.tokens("release_year"), num_rows),
        "genres": pad_rows(genre_rows, GENRE_SLOTS),
    }
    return _Side(_positions(table, "item_id"), rows)


def _look_up(table: AtomicTable, column: str, side: Mapping[str, int], file: Path) -> np.ndarray:
    keys = table.tokens(column)
    result = np.empty(len(keys), np.int64)
    for row, key in enumerate(keys):
        if key not in side:
            raise table.error(row, column, f"{key!r} is not in {file.name}")
        result[row] = side[key]
    return result


def last_items(
    users: Sequence[int] | np.ndarray,
    items: Sequence[int] | np.ndarray,
    times: Sequence[int] | np.ndarray,
    slots: int,
) -> np.ndarray:
    """Each event's history: int64 [n, slots], the user's items before its time, newest first.

    Only events with a time strictly less than the event's own count. Empty slots hold -1. Items of
    one time are ordered by item, so that the order of the file does not matter.
    """
    users, items, times = (np.asarray(values, np.int64) for values in (users, items, times))
    result = np.full((len(users), slots), -1, np.int64)
    order = np.lexsort((items, times, users))
    new_user = 1 + np.flatnonzero(np.diff(users[order]))
    for events in np.split(order, new_user):
        event_times = times[events]
        earlier = np.searchsorted(event_times, event_times, side="left")
        position = earlier[:, None] - 1 - np.arange(slots)
        taken = items[events][np.maximum(position, 0)]
        result[events] = np.where(position >= 0, taken, -1)
    return result


def load_movielens(folder: str | os.PathLike[str], num_rows: int) -> tuple[ExampleSet, np.ndarray]:
    """Reads the data set. `folder` holds the three files; `num_rows` is V, the table's rows.

    Returns:
      The examples, and when each of them was rated: int64, in seconds.

    Raises:
      DataFileError: a file is missing or malformed, or a rating names an unknown user or item.
    """
    folder = Path(folder)
    user_file, item_file = folder / "ml-100k.user", folder / "ml-100k.item"
    users = _read_users(user_file, num_rows)
    items = _read_items(item_file, num_rows)
    ratings = read_atomic_file(
        folder / "ml-100k.inter",
        {"user_id": "token", "item_id": "token", "rating": "float", "timestamp": "float"},
    )
    user_of = _look_up(ratings, "user_id", users.position, user_file)
    item_of = _look_up(ratings, "item_id", items.position, item_file)
    times = np.asarray(ratings.floats("timestamp")).astype(np.int64)
    history = last_items(user_of, item_of, times, HISTORY_SLOTS)
    history_rows = np.where(history >= 0, items.rows["history"][history], PADDING_ROW)
    by_field = {name: column[user_of] for name, column in users.rows.items()}
    by_field |= {name: column[item_of] for name, column in items.rows.items()}
    by_field["history"] = history_rows
    rows = np.concatenate(
        [by_field[field.name].reshape(len(times), field.slots) for field in LAYOUT.fields], axis=1
    ).astype(np.int32)
    labels = (np.asarray(ratings.floats("rating")) >= POSITIVE_RATING).astype(np.float32)
    return ExampleSet(LAYOUT, rows, rows != PADDING_ROW, labels), times
