"""One bound on the decoded chunks of all files that are opened together."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from jaxaccel.data import DataWarning, _chunk_cache, convert, open_store
from jaxaccel.data import _arrow_fields as fields
from jaxaccel.data._chunk_cache import ChunkCache

ROWS, CHUNK, SHARDS = 60, 5, 4


def test_the_newest_are_kept_within_the_bound():
    cache, one, two = ChunkCache(100), object(), object()
    for number, (part, nbytes) in enumerate([(one, 40), (two, 30), (one, 30)]):
        cache.put(part, number, f"chunk {number}", nbytes=nbytes, rows=5)
    assert cache.get(one, 0, 1) == "chunk 0" and cache.nbytes == 100
    # Chunk 1 is the one that was used longest ago.
    cache.put(two, 3, "chunk 3", nbytes=20, rows=5)
    assert [cache.get(p, n, 1) for p, n in [(one, 0), (two, 1), (one, 2)]] == [
        "chunk 0", None, "chunk 2",
    ]  # fmt: skip
    assert cache.get(two, 0, 1) is None and cache.nbytes == 90
    cache.leave(one)
    assert len(cache) == 1 and cache.nbytes == 20
    cache.put(two, 4, "large", nbytes=1000, rows=5)
    assert len(cache) == 1 and cache.get(two, 4, 1) == "large"


def test_waste_is_what_is_decoded_again_and_not_read():
    cache, part = ChunkCache(10), object()
    for _ in range(3):
        # In order, one epoch after the other, nothing is wasted.
        for chunk in range(4):
            for _ in range(5):
                assert cache.get(part, chunk, 20) or True
            cache.put(part, chunk, "x", nbytes=10, rows=100)
    assert not cache.is_wasted
    for chunk in [0, 1, 2, 3] * 40:
        if cache.get(part, chunk, 1) is None:
            cache.put(part, chunk, "x", nbytes=10, rows=100)
    assert cache.is_wasted


@pytest.fixture(params=["arrow", "parquet"])
def shards(request, tmp_path, rng, monkeypatch):
    monkeypatch.setattr(fields, "_CHUNK_BYTES", CHUNK * 48)
    images = rng.integers(0, 256, (ROWS, 4, 4, 3), dtype=np.uint8)
    path = tmp_path / f"x.{request.param}"
    convert({"image": images}, path, compression="zstd", shards=SHARDS, progress=False)
    return tmp_path / f"x-*-of-{SHARDS:05d}.{request.param}", images


def test_memory_does_not_grow_with_the_number_of_files(shards, monkeypatch):
    pattern, images = shards
    bound = 2 * CHUNK * 48 + 100
    monkeypatch.setattr(_chunk_cache, "CACHE_BYTES", bound)
    store: Any = open_store(pattern)
    (cache,) = {part._cache for part in store._stores}
    for _ in store.scan(7):
        assert cache.nbytes <= bound
    assert len(cache) == 2
    copy: Any = pickle.loads(pickle.dumps(store))
    (copied,) = {part._cache for part in copy._stores}
    assert copied is not cache and not len(copied) and copied.max_bytes == bound
    rows = np.random.default_rng(0).permutation(ROWS)
    with pytest.warns(DataWarning, match="random order") as caught:
        np.testing.assert_array_equal(copy.take(rows)["image"], images[rows])
        copy.take(rows)
    # One for all parts.
    assert len(caught) == 1
    assert len(copied) == 2 and copied.nbytes <= bound
    # Another store has its own.
    other: Any = open_store(pattern)
    assert other._stores[0]._cache is not cache
    store._stores[3].close()
    assert not len(cache)


def test_single_rows_of_many_files_are_random_reads_too(shards, monkeypatch):
    pattern, images = shards
    monkeypatch.setattr(_chunk_cache, "CACHE_BYTES", CHUNK * 48 + 100)
    monkeypatch.setattr(_chunk_cache, "_WASTE", 3)
    store = open_store(pattern)
    rows = np.arange(SHARDS) * (ROWS // SHARDS)
    with pytest.warns(DataWarning, match="random order"):
        for _ in range(5):
            np.testing.assert_array_equal(store.take(rows)["image"], images[rows])


def test_threads_share_it(shards, monkeypatch):
    pattern, images = shards
    monkeypatch.setattr(_chunk_cache, "CACHE_BYTES", 3 * CHUNK * 48 + 100)
    store = open_store(pattern)

    def read(start):
        rows = np.arange(start, start + 20)
        return rows, store.take(rows)["image"]

    with ThreadPoolExecutor(4) as pool:
        for rows, batch in pool.map(read, [*range(0, 40, 3)] * 3):
            np.testing.assert_array_equal(batch, images[rows])
