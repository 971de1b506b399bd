from pathlib import Path

import numpy as np
import pytest

from xrex.train.data_files import DataFileError
from xrex.train.features import PADDING_ROW, ExampleSet, hash_row
from xrex.train.movielens import HISTORY_SLOTS, LAYOUT, age_band, last_items, load_movielens

NUM_ROWS = 100_000
USERS = (
    "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
    "u1\t24\tM\ttechnician\t85711\n"
    "u2\t53\tF\tother\t94043\n"
)
ITEMS = (
    "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
    "i1\tFirst\t1995\tAction Comedy\n"
    "i2\tSecond\t1996\tDrama\n"
    "i3\tThird\t1995\t\n"
)
RATINGS = (
    "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    "u1\ti1\t5\t100\n"
    "u2\ti1\t3\t50\n"
    "u1\ti2\t4\t200\n"
    "u1\ti3\t1\t200\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ml-100k.user").write_text(USERS)
    (tmp_path / "ml-100k.item").write_text(ITEMS)
    (tmp_path / "ml-100k.inter").write_text(RATINGS)
    return tmp_path


def values_of(examples: ExampleSet, example: int, field: str) -> list[int]:
    return examples.rows[example, LAYOUT.slices()[field]].tolist()


def row(field: str, value: str) -> int:
    return hash_row(field, value, NUM_ROWS)


def padded(rows: list[int], slots: int) -> list[int]:
    return rows + [PADDING_ROW] * (slots - len(rows))


def test_an_example_holds_the_features_of_its_user_and_item(folder: Path) -> None:
    examples, _ = load_movielens(folder, NUM_ROWS)
    assert values_of(examples, 0, "user") == [row("user", "u1")]
    assert values_of(examples, 0, "item") == [row("item", "i1")]
    assert values_of(examples, 0, "age_band") == [row("age_band", "20-29")]
    assert values_of(examples, 0, "gender") == [row("gender", "M")]
    assert values_of(examples, 0, "occupation") == [row("occupation", "technician")]
    assert values_of(examples, 0, "release_year") == [row("release_year", "1995")]
    genres = [row("genres", "Action"), row("genres", "Comedy")]
    assert values_of(examples, 0, "genres") == padded(genres, 6)


def test_rating_of_four_is_the_least_positive(folder: Path) -> None:
    examples, _ = load_movielens(folder, NUM_ROWS)
    assert examples.labels.tolist() == [1, 0, 1, 0]


def test_history_holds_only_items_strictly_before_the_event(folder: Path) -> None:
    examples, _ = load_movielens(folder, NUM_ROWS)
    assert values_of(examples, 0, "history") == padded([], HISTORY_SLOTS)
    only_first = padded([row("history", "i1")], HISTORY_SLOTS)
    assert values_of(examples, 2, "history") == only_first
    assert values_of(examples, 3, "history") == only_first


def test_times_are_those_of_the_ratings(folder: Path) -> None:
    _, times = load_movielens(folder, NUM_ROWS)
    assert times.tolist() == [100, 50, 200, 200]


def test_mask_marks_exactly_the_slots_with_a_value(folder: Path) -> None:
    examples, _ = load_movielens(folder, NUM_ROWS)
    assert examples.mask.sum(axis=1).tolist() == [8, 8, 8, 7]
    assert (examples.rows[~examples.mask] == PADDING_ROW).all()


def test_history_is_newest_first_and_cut_to_its_slots() -> None:
    history = last_items([0] * 5, [10, 11, 12, 13, 14], [1, 2, 3, 4, 5], slots=3)
    assert history.tolist() == [
        [-1, -1, -1],
        [10, -1, -1],
        [11, 10, -1],
        [12, 11, 10],
        [13, 12, 11],
    ]


def test_history_does_not_depend_on_the_order_of_the_events() -> None:
    rng = np.random.default_rng(3)
    users, items, times = (rng.integers(0, high, 200) for high in (7, 50, 40))
    expected = last_items(users, items, times, slots=5)
    order = rng.permutation(200)
    shuffled = last_items(users[order], items[order], times[order], slots=5)
    np.testing.assert_array_equal(shuffled, expected[order])


def test_age_bands_are_decades() -> None:
    assert [age_band(age) for age in (0, 9, 10, 73)] == ["0-9", "0-9", "10-19", "70-79"]


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("user", "\t53\t", "\told\t", r"ml-100k.user:3: column 'age': 'old' is not a whole number"),
        ("user", "\t53\t", "\t121\t", r"ml-100k.user:3: column 'age': '121' is not .* 0 to 120"),
        ("user", "u2", "u1", r"ml-100k.user:3: column 'user_id': 'u1' was already given in line 2"),
        (
            "item",
            "Drama",
            "a b c d e f g",
            r"ml-100k.item:3: column 'class': 7 genres, there are 6 slots",
        ),
        ("inter", "u2", "u9", r"ml-100k.inter:3: column 'user_id': 'u9' is not in ml-100k.user"),
        ("inter", "i3", "i9", r"ml-100k.inter:5: column 'item_id': 'i9' is not in ml-100k.item"),
    ],
)
def test_malformed_data_is_refused_with_the_place(
    folder: Path, file: str, old: str, new: str, message: str
) -> None:
    path = folder / f"ml-100k.{file}"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(DataFileError, match=message):
        load_movielens(folder, NUM_ROWS)
