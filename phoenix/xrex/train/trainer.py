"""The training loop of the example: steps, metrics, checkpoints and evaluation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import ml_dtypes
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xrex.cuda.async_emb import async_emb
from xrex.optimizers.recsys import RowwiseAdagrad
from xrex.train.batch_stream import BatchStream
from xrex.train.checkpoint import Checkpoints
from xrex.train.data_pipeline import DataPipeline, StepInput
from xrex.train.datasets import Dataset
from xrex.train.engines import PlainEngine, select_engine
from xrex.train.exact_schedule import SharedCounts
from xrex.train.metrics import MetricsFile, auc, log_loss
from xrex.train.model import MlpRanker
from xrex.train.phase_timer import PhaseTimer
from xrex.train.plot import save_curves
from xrex.train.prepared_batch import PreparedBatch, prepare_batch
from xrex.train.process_group import ProcessGroup
from xrex.train.staleness import SharedCapacity
from xrex.train.train_log import MetricsWriter, TrainLog
from xrex.train.train_state import TrainSetup, TrainState
from xrex.train.train_step import TrainStep

AUTO_ENGINE, PLAIN_ENGINE = "auto", "plain"
ENGINES = (AUTO_ENGINE, PLAIN_ENGINE)
CONSTANT, COSINE = "constant", "cosine"
LEARNING_RATE_SCHEDULES = (CONSTANT, COSINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a run.

    Attributes:
      dataset: name of the data set, for titles and to tell checkpoints apart.
      staleness: name of a mode; see `TrainStep`.
      engine: AUTO_ENGINE, or PLAIN_ENGINE for the same training in plain JAX.
      shared: capacity of the mode EXACT; None for its default, and in other modes.
      batch_size: examples of the global batch.
      num_epochs: passes over the training data, those before a resume included; None for no end.
      end_step: steps to train, those before a resume included; None to end with the epochs.
      seed: of the initial values and of the order of the examples.
      table_rows: V.
      emb_width: W.
      learning_rate: of the embedding table (rowwise Adagrad).
      dense_learning_rate: of the MLP (Adam).
      learning_rate_schedule: CONSTANT, or COSINE: both rates fall to zero along a cosine.
      warmup_steps: steps over which both rates first rise from zero.
      decay_steps: steps of COSINE in all, those of the warm-up included.
      max_grad_norm: see `TrainSetup`.
      skip_nonfinite: see `TrainSetup`.
      deterministic: sum sparse gradients in the fixed order; see `AsyncEmbOptions`.
      shuffle_examples: training examples that are shuffled among each other, at least.
      prefetch_batches: batches that are made ready ahead.
      prefetch_workers: threads that make them ready.
      checkpoint_every: steps between two checkpoints, each with an evaluation; None for one at the
        end of every epoch.
      keep_checkpoints: how many checkpoints to keep.
      log_every: steps between two training records.
      tensorboard: whether to write TensorBoard events, too.
    """

    dataset: str
    staleness: str
    engine: str
    shared: SharedCapacity | None
    batch_size: int
    num_epochs: int | None
    end_step: int | None
    seed: int
    table_rows: int
    emb_width: int
    learning_rate: float
    dense_learning_rate: float
    learning_rate_schedule: str
    warmup_steps: int
    decay_steps: int | None
    max_grad_norm: float | None
    skip_nonfinite: bool
    deterministic: bool
    shuffle_examples: int
    prefetch_batches: int
    prefetch_workers: int
    checkpoint_every: int | None
    keep_checkpoints: int
    log_every: int
    tensorboard: bool

    def __post_init__(self) -> None:
        if self.num_epochs is None and self.end_step is None:
            raise ValueError("neither num_epochs nor end_step is given; a run needs one to end")
        if self.learning_rate_schedule == COSINE and (self.decay_steps or 0) <= self.warmup_steps:
            raise ValueError(
                f"decay_steps={self.decay_steps} and warmup_steps={self.warmup_steps}; a cosine "
                "schedule needs to know its steps in all, more than those of the warm-up"
            )

    def identity(self) -> dict[str, Any]:
        """The settings that a resumed run must share with the run it goes on from."""
        free = {
            "num_epochs",
            "end_step",
            "prefetch_batches",
            "prefetch_workers",
            "shared",
            "checkpoint_every",
            "keep_checkpoints",
            "log_every",
            "tensorboard",
        }
        fields = dataclasses.asdict(self)
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
      stopped: it was asked to stop, and has saved a checkpoint and evaluated nothing.
      valid: metrics over the validation part; None if stopped.
      test: metrics over the test part; None if stopped.
      dropped_rows: malformed rows that were left out of the training data.
      counters: the engine's counters by rank; empty without the native engine.
      shared: what the steps of the mode EXACT shared; None in other modes.
      files: what was written: purpose -> path.
    """

    first_step: int
    end_step: int
    stopped: bool
    valid: Evaluation | None
    test: Evaluation | None
    dropped_rows: int
    counters: Mapping[int, async_emb.RankStats]
    shared: SharedCounts | None
    files: Mapping[str, Path]


class Progress(Protocol):
    """A display of how far a run is, with tqdm's interface."""

    def update(self) -> Any:
        """Counts a step."""

    def set_postfix(self, ordered_dict: Mapping[str, str], *, refresh: bool) -> Any:
        """Sets the values to show, at once or with the next update."""

    def close(self) -> Any:
        """Ends the display."""


class _Run(NamedTuple):
    """What a run keeps open."""

    step: TrainStep
    data: DataPipeline[PreparedBatch]
    log: TrainLog
    checkpoints: Checkpoints


class Trainer:
    """One run.

    Args:
      config: settings.
      dataset: the data.
      mesh: devices, along one axis.
      workdir: an existing folder for all that the run writes.
      timer: counts the time of the run's phases.
      make_progress: (steps done, steps in all or None if unknown) -> display.
      processes: this process among those that run this together. All share the work folder.
      stop_requested: asked after every step; a yes of any process saves and ends the run.
    """

    def __init__(
        self,
        config: TrainConfig,
        dataset: Dataset,
        mesh: Mesh,
        workdir: Path,
        timer: PhaseTimer,
        make_progress: Callable[[int, int | None], Progress],
        *,
        processes: ProcessGroup | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self._config, self._dataset, self._workdir = config, dataset, workdir
        self._timer, self._make_progress = timer, make_progress
        self._processes = processes or ProcessGroup()
        self._stop_requested = stop_requested
        layout = dataset.train.layout
        self._model = MlpRanker(layout, config.emb_width, crosses=dataset.crosses)
        self._setup = _make_setup(config, dataset, mesh, self._model)
        self._valid: list[tuple[int, Evaluation]] = []
        self._dropped_rows = 0

    def run(self, *, resume: bool) -> TrainReport:
        """Trains to the last step, evaluates, and writes everything down.

        Args:
          resume: go on from the newest checkpoint in the work folder, if there is one.

        Raises:
          CheckpointConfigError: the checkpoint was made with other settings.
          DataFileError: a data file is malformed.
        """
        config, timer = self._config, self._timer
        files = {"checkpoints": self._workdir / "checkpoints"}
        checkpoints = Checkpoints(
            files["checkpoints"],
            config.identity() | {"train_examples": self._dataset.train.num_examples},
            keep=config.keep_checkpoints,
        )
        log = self._make_log(files)
        with log, checkpoints, self._make_step() as step, self._make_pipeline(step) as data:
            log.exposed_secs = step.exposed_secs
            run = _Run(step, data, log, checkpoints)
            with timer.phase("initial state"):
                state = step.init(self._model.init(config.seed), _initial_table(config))
                if resume and checkpoints.latest_step() is not None:
                    state = checkpoints.restore(state)
                    data.restore(checkpoints.data_position() or data.state())
                first_step = int(state.step)
            state, stopped = self._train(run, state)
            valid = test = None
            if not stopped:
                state, valid = self._evaluate(run, state, "valid")
                state, test = self._evaluate(run, state, "test")
            counters, shared = step.counters(), step.shared_counts()
        end_step = int(state.step)
        if test is not None and self._processes.is_first:
            files["plot"] = self._workdir / "training.png"
            with timer.phase("plot"):
                self._plot(files["plot"], log, end_step, test)
        return TrainReport(
            first_step, end_step, stopped, valid, test, self._dropped_rows, counters, shared, files
        )

    def _make_log(self, files: dict[str, Path]) -> TrainLog:
        """The log, which only the first process writes to files; notes these in `files`."""
        writers: list[MetricsWriter] = []
        if self._processes.is_first:
            files["metrics"] = self._workdir / "metrics.jsonl"
            writers.append(MetricsFile(files["metrics"]))
            if self._config.tensorboard:
                from xrex.train.tensorboard_log import TensorBoardLog  # not wanted by every run

                files["tensorboard"] = self._workdir / "tensorboard"
                writers.append(TensorBoardLog(files["tensorboard"]))
        return TrainLog(
            writers,
            self._config.log_every,
            vocab_rows=self._config.table_rows,
            train_secs=self._train_secs,
        )

    def _train_secs(self) -> float:
        """Seconds spent on the steps of this run but its first, and on waiting for data."""
        seconds = self._timer.report()
        return seconds.get("data", 0.0) + seconds.get("steps", 0.0)

    def _make_step(self) -> TrainStep:
        config = self._config
        return TrainStep(
            self._setup,
            config.staleness,
            shared=config.shared,
            make_engine=PlainEngine if config.engine == PLAIN_ENGINE else select_engine,
        )

    def _make_pipeline(self, step: TrainStep) -> DataPipeline[PreparedBatch]:
        config = self._config
        stream = BatchStream(
            self._dataset.train,
            config.batch_size,
            seed=config.seed,
            shuffle_examples=config.shuffle_examples,
            num_epochs=config.num_epochs,
            exchange=self._processes.exchange("train"),
            stop_requested=self._stop_requested,
        )
        return DataPipeline(
            stream,
            step.prepare,
            depth=config.prefetch_batches,
            workers=config.prefetch_workers,
        )

    def _num_steps(self) -> int | None:
        """Steps in all, as far as that is known beforehand."""
        config, num_examples = self._config, self._dataset.train.num_examples
        if config.end_step is not None or num_examples is None or config.num_epochs is None:
            return config.end_step
        return config.num_epochs * -(-num_examples // config.batch_size)

    def _train(self, run: _Run, state: TrainState) -> tuple[TrainState, bool]:
        """Trains to the end or until asked to stop, and saves; True if it was asked."""
        config, timer = self._config, self._timer
        first_step = number = int(state.step)
        stopped = False
        progress = self._make_progress(first_step, self._num_steps())
        while not stopped and (config.end_step is None or number < config.end_step):
            with timer.phase("data"):
                item = next(run.data, None)
            if item is None:
                break
            number += 1
            # Most of the first step is compilation. A last step without a successor would be
            # compiled anew; any batch may stand in, since the flush drops its lookup.
            with timer.phase("first step" if number == first_step + 1 else "steps"):
                state, metrics = run.step.step(state, item.batch, item.next_batch or item.batch)
                run.log.add(number, item.host.batch, metrics, item.host.dropped_rows)
            self._dropped_rows = item.host.dropped_rows
            progress.set_postfix(run.log.latest(), refresh=False)
            progress.update()
            stopped = self._is_stopped(item)
            if item.next_batch is None:
                break
            if self._is_due(number, item) and not stopped:
                state = self._save(run, state)
                state, _ = self._evaluate(run, state, "valid")
        progress.close()
        return self._save(run, state), stopped

    def _is_stopped(self, item: StepInput[PreparedBatch]) -> bool:
        """Whether to stop after this step; several processes agree on it by their batches."""
        alone = self._processes.num_processes == 1
        return item.host.stop or (alone and self._stop_requested())

    def _is_due(self, number: int, item: StepInput[PreparedBatch]) -> bool:
        """Whether a checkpoint and an evaluation come after this step, other than the last ones."""
        if number == self._config.end_step:
            return False
        every = self._config.checkpoint_every
        return item.ends_epoch if every is None else number % every == 0

    def _save(self, run: _Run, state: TrainState) -> TrainState:
        """Brings the pipeline to rest and saves."""
        with self._timer.phase("steps"):
            run.log.read_all()
        with self._timer.phase("checkpoint"):
            return run.checkpoints.save(run.step, state, run.data.state())

    def _evaluate(self, run: _Run, state: TrainState, part: str) -> tuple[TrainState, Evaluation]:
        reader = self._dataset.valid if part == "valid" else self._dataset.test
        config, number = self._config, int(state.step)
        labels: list[np.ndarray] = []
        logits: list[np.ndarray] = []
        exchange = self._processes.exchange(f"{part}-{number}")
        stream = BatchStream(reader, config.batch_size, num_epochs=1, exchange=exchange)
        with (
            self._timer.phase("evaluation"),
            DataPipeline(
                stream,
                functools.partial(prepare_batch, self._setup),
                depth=config.prefetch_batches,
                workers=config.prefetch_workers,
            ) as data,
        ):
            for item in data:
                state, _, batch_logits = run.step.evaluate(state, item.batch)
                real = item.host.batch.weights > 0
                labels.append(item.host.batch.labels[real])
                logits.append(np.asarray(batch_logits)[real])
            all_labels, scores = np.concatenate(labels), np.concatenate(logits)
            result = Evaluation(
                auc(all_labels, scores), log_loss(all_labels, scores), len(all_labels)
            )
        if part == "valid":
            self._valid.append((number, result))
        run.log.write(
            {"step": number, "split": part, "auc": result.auc, "log_loss": result.log_loss}
        )
        return state, result

    def _plot(self, path: Path, log: TrainLog, end_step: int, test: Evaluation) -> None:
        config = self._config
        save_curves(
            path,
            f"{config.dataset}, {config.staleness}, batch {config.batch_size}, seed {config.seed}: "
            f"test AUC {test.auc:.4f}",
            loss={
                "train": log.loss_curve,
                "validation": [(step, part.log_loss) for step, part in self._valid],
                "test": [(end_step, test.log_loss)],
            },
            auc={
                "train (latest examples)": log.auc_curve,
                "validation": [(step, part.auc) for step, part in self._valid],
                "test": [(end_step, test.auc)],
            },
        )


def _make_setup(config: TrainConfig, dataset: Dataset, mesh: Mesh, model: MlpRanker) -> TrainSetup:
    num_tokens = config.batch_size * dataset.train.layout.num_slots
    (axis,) = mesh.axis_names
    everywhere = NamedSharding(mesh, PartitionSpec())

    def loss_fn(params: Any, embeddings: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
        """The model's loss, and its logits where every process can read them all."""
        loss, logits = model.loss(params, embeddings, batch)
        return loss, jax.lax.with_sharding_constraint(logits, everywhere)

    ctx = async_emb.make_context_handle(
        mesh,
        axis,
        data_axis=axis,
        tokens_per_batch=num_tokens,
        emb_width=config.emb_width,
        num_unique=min(num_tokens, dataset.max_distinct_rows),
        num_devices_per_node=len(mesh.local_devices),
        options=async_emb.AsyncEmbOptions(deterministic=config.deterministic),
    )
    return TrainSetup(
        ctx=ctx,
        vocab_rows=config.table_rows,
        loss_fn=loss_fn,
        dense_optimizer=optax.adam(_schedule(config, config.dense_learning_rate)),
        embedding_optimizer=RowwiseAdagrad(initial_accumulator=0.01, eps=1e-8, decay_factor=1.0),
        learning_rate=_schedule(config, config.learning_rate),
        max_grad_norm=config.max_grad_norm,
        skip_nonfinite=config.skip_nonfinite,
    )


def _schedule(config: TrainConfig, peak: float) -> optax.Schedule:
    """The learning rate by step, with `peak` as its highest value."""
    if config.learning_rate_schedule == COSINE:
        assert config.decay_steps is not None  # checked with the settings
        return optax.warmup_cosine_decay_schedule(
            0.0 if config.warmup_steps else peak, peak, config.warmup_steps, config.decay_steps
        )
    if config.warmup_steps:
        return optax.linear_schedule(0.0, peak, config.warmup_steps)
    return optax.constant_schedule(peak)


def _initial_table(config: TrainConfig) -> np.ndarray:
    """Small random rows, bf16 [V, W]: products of fields need values other than zero to learn."""
    rng = np.random.Generator(np.random.PCG64([config.seed, 1]))
    table = rng.standard_normal((config.table_rows, config.emb_width), np.float32)
    return (0.01 * table).astype(ml_dtypes.bfloat16)
