"""Warnings of wasteful pipelines, and that sound ones get none."""

import subprocess
import sys
from typing import Any

import grain
import numpy as np
import pytest

from jaxaccel.data import (
    ArrayStore,
    BatchPlan,
    DataWarning,
    Loader,
    check_pipeline,
)


def load(**columns):
    store = ArrayStore(columns)
    with Loader(store, BatchPlan(len(store), 10)):
        pass


def images(rng, dtype, n=40):
    return rng.integers(0, 256, (n, 8, 8, 3)).astype(dtype)


@pytest.mark.parametrize(("dtype", "factor"), [(np.float32, 4), (np.float64, 8)])
def test_whole_numbers_in_float_images(rng, dtype, factor):
    # 10 * 192 values of 4 or 8 bytes, against one.
    size = f"{10 * 192 * np.dtype(dtype).itemsize / 1e3:.3g} kB"
    words = rf"'image' is {np.dtype(dtype)}.* {size} a batch instead of 1.92 kB, "
    with pytest.warns(DataWarning, match=words + f"{factor}x.*make_normalizer"):
        load(image=images(rng, dtype))


@pytest.mark.parametrize(
    ("label", "words"),
    [
        (np.arange(40, dtype=np.float64), r"float64.*fit uint8.*8x.*astype\(np.uint8"),
        (np.arange(40), "int64.*fit uint8.* 8x"),
        (np.arange(40) - 20, "int64.*fit int8.* 8x"),
        (np.arange(40) * 1000, "int64.*fit uint16.* 4x"),
        (-1000 * np.arange(40), "int64.*fit int32.* 2x"),
    ],
)
def test_wide_labels(label, words):
    with pytest.warns(DataWarning, match=words):
        load(label=label)


def test_sound_columns_pass(rng):
    load(
        image=images(rng, np.uint8),
        normalized=images(rng, np.float32) / np.float32(255),
        negative=images(rng, np.float32) - 1,
        one_hot=np.eye(40, dtype=np.float32),
        broken=np.full((40, 2), np.nan, np.float32),
        target=rng.normal(size=40),
        label=np.arange(40, dtype=np.uint16),
        tokens=np.arange(80).reshape(40, 2),
        stamp=np.arange(40) + 2**40,
    )


def test_each_call_site_warns_once():
    code = (
        "import numpy as np\n"
        "from jaxaccel.data import ArrayStore, BatchPlan, Loader\n"
        "store = ArrayStore({'label': np.arange(8.0)})\n"
        "for _ in range(3):\n"
        "    Loader(store, BatchPlan(8, 4)).close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.count("DataWarning") == 1
    # The place of the user's call, not one in the library.
    assert done.stderr.startswith("<string>:5: DataWarning: column 'label'")


def to_float(image):
    return image.astype(np.float32)


@pytest.mark.parametrize("late", [False, True])
def test_maps_over_single_examples_in_memory(rng, late):
    source = images(rng, np.uint8)
    dataset: Any = grain.MapDataset.source(source)  # type: ignore
    dataset = dataset.shuffle(seed=0)
    if late:
        dataset = dataset.to_iter_dataset(grain.ReadOptions(1, 2))
    dataset = dataset.map(to_float).batch(10)
    words = r"in memory: [\d.]+ us an example, \d+x the .*use a Loader"
    with pytest.warns(DataWarning, match=words):
        assert len(check_pipeline(dataset)) == 1


def test_hundreds_of_batches_ahead():
    zeros = np.zeros((64, 64, 64, 3), np.uint8)
    dataset = grain.MapDataset.source(zeros).batch(64)  # type: ignore
    words = "500 batches of 786 kB are prepared ahead, 393 MB in all, 1.5x what"
    with pytest.warns(DataWarning, match=words):
        check_pipeline(dataset.to_iter_dataset())


class OnDisk:
    """Stands for a source that reads files."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return np.full((8, 8, 3), index, np.uint8)


def test_sound_pipelines_pass(rng):
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    source = images(rng, np.uint8)
    batches = grain.MapDataset.source(source).batch(10)  # type: ignore
    assert check_pipeline(batches.map(to_float).to_iter_dataset(options)) == []
    files = grain.MapDataset.source(OnDisk()).map(to_float).batch(10)
    assert check_pipeline(files) == []
    words = grain.MapDataset.source(["a", "b"]).map(str.upper)
    assert check_pipeline(words) == []


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_grain_data_set():
    with pytest.raises(TypeError, match="grain.MapDataset.*got list"):
        check_pipeline([1])
