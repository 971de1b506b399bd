from pathlib import Path

import matplotlib.image
import numpy as np

from xrex.train.plot import save_curves


def test_curves_are_drawn_into_a_png(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    points = [(step, 1.0 / step) for step in range(1, 50)]
    save_curves(path, "a run", {"train": points}, {"train": points, "valid": points[::20]})
    image = matplotlib.image.imread(path)
    assert image.shape[0] > 500
    assert len(np.unique(image[..., 0])) > 20
