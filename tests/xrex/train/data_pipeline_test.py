import gc
import threading

import jax
import numpy as np
import pytest

from tests.xrex.train import helpers
from xrex.train.batch_stream import BatchStream
from xrex.train.batches import Batch
from xrex.train.data_pipeline import DataPipeline
from xrex.train.features import ExampleSet, FeatureLayout, Field
from xrex.train.prepared_batch import PreparedBatch
from xrex.train.readers import ArrayReader, Block
from xrex.train.staleness import SYNCHRONOUS
from xrex.train.train_step import TrainStep

EXAMPLES = ExampleSet(
    FeatureLayout((Field("only"),)),
    np.arange(1, 11, dtype=np.int32)[:, None],
    np.ones((10, 1), np.bool_),
    np.zeros(10, np.float32),
)


def make_pipeline(
    reader: ArrayReader | None = None, *, num_epochs: int = 2
) -> DataPipeline[list[int]]:
    """Four examples a batch, prepared to the list of their values."""
    stream = BatchStream(reader or ArrayReader(EXAMPLES), 4, num_epochs=num_epochs)
    return DataPipeline(stream, lambda batch: batch.ids[batch.weights > 0, 0].tolist())


def test_batches_come_prepared_with_their_successors() -> None:
    with make_pipeline(num_epochs=1) as data:
        assert [(item.batch, item.next_batch) for item in data] == [
            ([1, 2, 3, 4], [5, 6, 7, 8]),
            ([5, 6, 7, 8], [9, 10]),
            ([9, 10], None),
        ]


def test_last_batch_of_an_epoch_says_so() -> None:
    with make_pipeline() as data:
        assert [item.ends_epoch for item in data] == [False, False, True, False, False, True]


@pytest.mark.parametrize("done", [0, 1, 3, 5, 6])
def test_state_is_after_the_batch_that_came_out_last(done: int) -> None:
    with make_pipeline() as data:
        whole = [item.batch for item in data]
    with make_pipeline() as data:
        for _ in range(done):
            next(data)
        state = data.state()
    with make_pipeline() as data:
        data.restore(state)
        assert data.state() == state
        assert [item.batch for item in data] == whole[done:]


def test_restoring_after_the_first_batch_is_refused() -> None:
    with make_pipeline() as data:
        state = data.state()
        next(data)
        with pytest.raises(RuntimeError, match="restore was called after the first batch"):
            data.restore(state)


def test_error_of_reading_is_raised_when_the_batch_is_looked_ahead_for_and_stays() -> None:
    class Failing(ArrayReader):
        def read(self, block: int) -> Block:
            if block == 1:
                raise OSError("disk is gone")
            return super().read(block)

    with make_pipeline(Failing(EXAMPLES.take(slice(0, 8)), 2)) as data:
        for _ in range(2):
            with pytest.raises(OSError, match="disk is gone"):
                next(data)


def test_closed_pipeline_leaves_no_thread() -> None:
    before = threading.active_count()
    data = make_pipeline()
    next(data)
    data.close()
    data.close()
    assert threading.active_count() == before


def test_forgotten_pipeline_leaves_no_thread() -> None:
    before = threading.active_count()
    data = make_pipeline()
    next(data)
    del data
    gc.collect()
    assert threading.active_count() == before


def test_pipeline_that_never_began_closes() -> None:
    make_pipeline().close()


def test_batches_are_put_on_the_devices_ahead_of_their_step() -> None:
    examples = ExampleSet(
        FeatureLayout((Field("bag", helpers.NUM_TOKENS),)),
        np.ones((16, helpers.NUM_TOKENS), np.int32),
        np.ones((16, helpers.NUM_TOKENS), np.bool_),
        np.zeros(16, np.float32),
    )
    step = TrainStep(helpers.toy_setup(), SYNCHRONOUS)
    stream = BatchStream(ArrayReader(examples), helpers.NUM_EXAMPLES, num_epochs=1)
    pipeline: DataPipeline[PreparedBatch] = DataPipeline(stream, step.prepare)
    with pipeline as data:
        items = list(data)
    assert items[0].next_batch is items[1].batch
    for item in items:
        assert isinstance(item.batch.source, Batch)
        assert len(item.batch.arrays.ids.sharding.device_set) == len(jax.devices())
