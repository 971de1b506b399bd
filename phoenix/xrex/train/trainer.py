"""The training loop of the example: steps, metrics, checkpoints and evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import optax
from jax.sharding import Mesh

from xrex.cuda.async_emb import async_emb
from xrex.optimizers.recsys import RowwiseAdagrad
from xrex.train.batches import look_ahead, sequential_batches, training_batches
from xrex.train.checkpoint import Checkpoints
from xrex.train.features import Splits
from xrex.train.metrics import auc, log_loss
from xrex.train.model import MlpRanker
from xrex.train.phase_timer import PhaseTimer
from xrex.train.pipelined_step import PipelinedTrainStep
from xrex.train.plot import save_curves
from xrex.train.synchronous_step import SynchronousTrainStep
from xrex.train.train_log import TrainLog
from xrex.train.train_state import TrainSetup, TrainState

PIPELINED, SYNCHRONOUS = "pipelined", "synchronous"

TrainStep = PipelinedTrainStep | SynchronousTrainStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a run.

    Attributes:
      dataset: name of the data set, for titles and to tell checkpoints apart.
      mode: PIPELINED, or SYNCHRONOUS for the same training in plain JAX.
      batch_size: examples of the global batch.
      end_step: steps to train, those before a resume included.
      seed: of the initial values and of the order of the examples.
      table_rows: V.
      emb_width: W.
      learning_rate: of the embedding table (rowwise Adagrad).
      dense_learning_rate: of the MLP (Adam).
      crosses: pairs of fields whose product the MLP sees.
      checkpoint_every: steps between two checkpoints, each with an evaluation.
      keep_checkpoints: how many checkpoints to keep.
      log_every: steps between two training records.
    """

    dataset: str
    mode: str
    batch_size: int
    end_step: int
    seed: int
    table_rows: int
    emb_width: int
    learning_rate: float
    dense_learning_rate: float
    crosses: tuple[tuple[str, str], ...]
    checkpoint_every: int
    keep_checkpoints: int
    log_every: int

    def identity(self) -> dict[str, Any]:
        """The settings that a resumed run must share with the run it goes on from."""
        free = {"end_step", "checkpoint_every", "keep_checkpoints", "log_every"}
        fields = dataclasses.asdict(self) | {"crosses": [list(pair) for pair in self.crosses]}
        return {name: value for name, value in fields.items() if name not in free}


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Metrics over a part of the data."""

    auc: float
    log_loss: float
    num_examples: int


@dataclasses.dataclass(frozen=True)
class TrainReport:
    """What a run came to.

    Attributes:
      first_step: steps that had been done before this run, by the run it resumed.
      end_step: steps done.
      valid: metrics over the validation part.
      test: metrics over the test part.
      counters: the engine's counters by rank; empty without the native engine.
      files: what was written: purpose -> path.
    """

    first_step: int
    end_step: int
    valid: Evaluation
    test: Evaluation
    counters: Mapping[int, async_emb.RankStats]
    files: Mapping[str, Path]


class Progress(Protocol):
    """A display of how far a run is, with tqdm's interface."""

    def update(self) -> Any:
        """Counts a step."""

    def set_postfix(self, values: Mapping[str, str], *, refresh: bool) -> Any:
        """Sets the values to show, at once or with the next update."""

    def close(self) -> Any:
        """Ends the display."""


class Trainer:
    """One run.

    Args:
      config: settings.
      splits: the data.
      mesh: devices, along one axis.
      workdir: an existing folder for all that the run writes.
      timer: counts the time of the run's phases.
      make_progress: (steps done, steps in all) -> display.
    """

    def __init__(
        self,
        config: TrainConfig,
        splits: Splits,
        mesh: Mesh,
        workdir: Path,
        timer: PhaseTimer,
        make_progress: Callable[[int, int], Progress],
    ) -> None:
        self._config, self._splits, self._workdir = config, splits, workdir
        self._timer, self._make_progress = timer, make_progress
        self._model = MlpRanker(splits.train.layout, config.emb_width, crosses=config.crosses)
        self._setup = _make_setup(config, splits, mesh, self._model)
        self._valid: list[tuple[int, Evaluation]] = []

    def run(self, *, resume: bool) -> TrainReport:
        """Trains to the last step, evaluates, and writes everything down.

        Args:
          resume: go on from the newest checkpoint in the work folder, if there is one.

        Raises:
          CheckpointConfigError: the checkpoint was made with other settings.
        """
        config, timer = self._config, self._timer
        metrics_path = self._workdir / "metrics.jsonl"
        log = TrainLog(metrics_path, config.log_every)
        checkpoints = Checkpoints(
            self._workdir / "checkpoints",
            config.identity() | {"train_examples": len(self._splits.train)},
            keep=config.keep_checkpoints,
        )
        with log, checkpoints, self._make_step() as step:
            with timer.phase("initial state"):
                state = step.init(self._model.init(config.seed), _initial_table(config))
                if resume and checkpoints.latest_step() is not None:
                    state = checkpoints.restore(state)
                first_step = int(state.step)
            state = self._train(step, state, first_step, log, checkpoints)
            state, valid = self._evaluate(step, state, log, "valid")
            state, test = self._evaluate(step, state, log, "test")
            counters = step.counters()
        with timer.phase("plot"):
            plot = self._plot(log, test)
        files = {"metrics": metrics_path, "plot": plot, "checkpoints": checkpoints.folder}
        return TrainReport(first_step, int(state.step), valid, test, counters, files)

    def _make_step(self) -> TrainStep:
        if self._config.mode == PIPELINED:
            return PipelinedTrainStep(self._setup)
        return SynchronousTrainStep(self._setup)

    def _train(
        self,
        step: TrainStep,
        state: TrainState,
        first_step: int,
        log: TrainLog,
        checkpoints: Checkpoints,
    ) -> TrainState:
        config, timer = self._config, self._timer
        progress = self._make_progress(first_step, config.end_step)
        # One batch more than steps: a last step without a successor would be compiled anew.
        end = config.end_step + 1
        batches = look_ahead(
            training_batches(self._splits.train, config.batch_size, config.seed, first_step, end)
        )
        for number in range(first_step + 1, config.end_step + 1):
            with timer.phase("data"):
                batch, next_batch = next(batches)
            # Most of the first step is compilation.
            with timer.phase("first step" if number == first_step + 1 else "steps"):
                state, metrics = step.step(state, batch, next_batch)
                log.add(number, batch, metrics)
            shown = {name: f"{value:.4f}" for name, value in log.latest().items()}
            speed = f"{self._speed(number - first_step):.0f}"
            progress.set_postfix(shown | {"examples/s": speed}, refresh=False)
            progress.update()
            if number % config.checkpoint_every == 0 or number == config.end_step:
                state = self._rest(step, state, number, log, checkpoints)
        progress.close()
        return state

    def _rest(
        self,
        step: TrainStep,
        state: TrainState,
        number: int,
        log: TrainLog,
        checkpoints: Checkpoints,
    ) -> TrainState:
        """Brings the pipeline to rest, saves, and evaluates unless the run ends here anyway."""
        with self._timer.phase("steps"):
            log.read_all()
        with self._timer.phase("checkpoint"):
            state = checkpoints.save(step, state)
        if number < self._config.end_step:
            state, _ = self._evaluate(step, state, log, "valid")
        return state

    def _speed(self, num_steps: int) -> float:
        """Examples per second over the steps of this run but its first."""
        seconds = self._timer.report()
        spent = seconds["data"] + seconds.get("steps", 0.0)
        return (num_steps - 1) * self._config.batch_size / max(spent, 1e-9)

    def _evaluate(
        self, step: TrainStep, state: TrainState, log: TrainLog, part: str
    ) -> tuple[TrainState, Evaluation]:
        examples = self._splits.valid if part == "valid" else self._splits.test
        with self._timer.phase("evaluation"):
            logits = []
            for batch in sequential_batches(examples, self._config.batch_size):
                state, _, batch_logits = step.evaluate(state, batch)
                logits.append(batch_logits)
            scores = np.concatenate([np.asarray(x) for x in logits])[: len(examples)]
            result = Evaluation(
                auc(examples.labels, scores), log_loss(examples.labels, scores), len(examples)
            )
        number = int(state.step)
        if part == "valid":
            self._valid.append((number, result))
        log.write({"step": number, "split": part, "auc": result.auc, "log_loss": result.log_loss})
        return state, result

    def _plot(self, log: TrainLog, test: Evaluation) -> Path:
        path = self._workdir / "training.png"
        config = self._config
        save_curves(
            path,
            f"{config.dataset}, {config.mode}, batch {config.batch_size}, seed {config.seed}: "
            f"test AUC {test.auc:.4f}",
            loss={
                "train": log.loss_curve,
                "validation": [(step, part.log_loss) for step, part in self._valid],
                "test": [(config.end_step, test.log_loss)],
            },
            auc={
                "train (latest examples)": log.auc_curve,
                "validation": [(step, part.auc) for step, part in self._valid],
                "test": [(config.end_step, test.auc)],
            },
        )
        return path


def _make_setup(config: TrainConfig, splits: Splits, mesh: Mesh, model: MlpRanker) -> TrainSetup:
    num_tokens = config.batch_size * splits.train.layout.num_slots
    (axis,) = mesh.axis_names
    ctx = async_emb.make_context_handle(
        mesh,
        axis,
        data_axis=axis,
        tokens_per_batch=num_tokens,
        emb_width=config.emb_width,
        num_unique=min(num_tokens, splits.num_distinct_rows()),
        num_devices_per_node=mesh.size,
    )
    return TrainSetup(
        ctx=ctx,
        vocab_rows=config.table_rows,
        loss_fn=model.loss,
        dense_optimizer=optax.adam(config.dense_learning_rate),
        embedding_optimizer=RowwiseAdagrad(initial_accumulator=0.01, eps=1e-8, decay_factor=1.0),
        learning_rate=config.learning_rate,
    )


def _initial_table(config: TrainConfig) -> np.ndarray:
    """Small random rows, bf16 [V, W]: products of fields need values other than zero to learn."""
    rng = np.random.Generator(np.random.PCG64([config.seed, 1]))
    table = rng.standard_normal((config.table_rows, config.emb_width), np.float32)
    return (0.01 * table).astype(ml_dtypes.bfloat16)
