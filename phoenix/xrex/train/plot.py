"""The picture of a training run: loss and AUC over the steps."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Points = Sequence[tuple[int, float]]


def _draw(axes: Axes, curves: Mapping[str, Points], ylabel: str) -> None:
    for label, points in curves.items():
        steps = [step for step, _ in points]
        values = [value for _, value in points]
        axes.plot(steps, values, label=label, marker="o" if len(points) < 20 else None)
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.3)
    axes.legend()


def save_curves(
    path: str | os.PathLike[str],
    title: str,
    loss: Mapping[str, Points],
    auc: Mapping[str, Points],
) -> None:
    """Writes a PNG with two panels. Each curve is a label and its (step, value) points."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    _draw(upper, loss, "loss (nats per example)")
    _draw(lower, auc, "AUC")
    lower.set_xlabel("step")
    upper.set_title(title)
    figure.savefig(path, format="png", dpi=110)
