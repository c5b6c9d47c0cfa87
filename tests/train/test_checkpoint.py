"""Checkpoints: what comes back, what is kept, what is refused."""

import json
import os
import shutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxaccel import data, train


class Steps(NamedTuple):
    """The smallest state."""

    step: jax.Array


def make_state(step=0, seed=0, features=3, **tree):
    params = {"w": jnp.full((2, features), 1.5, jnp.bfloat16), "b": jnp.ones(features)}
    state = train.TrainState.create(
        {**params, **tree}, optax.adam(0.1), key=jax.random.key(seed)
    )
    return state.replace(step=jnp.int32(step))


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


class Part:
    """Anything with a state."""

    def __init__(self, state):
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def test_every_kind_of_leaf_comes_back_bit_for_bit(tmp_path, rng):
    bits = rng.integers(0, 256, 64, np.uint8)
    tree = {
        "a/b.c": {"": jnp.asarray(bits.view(np.float32))},  # NaNs with payloads
        "bfloat16": [jnp.asarray(bits).view(jnp.bfloat16), None],
        "half": (jnp.asarray(bits).view(jnp.float16),),
        "float8": jnp.asarray(bits[:5]).view(jnp.float8_e4m3fn),
        "bool": jnp.array([True, False]),
        "empty": jnp.zeros((0, 3)),
        "key": jax.random.key(7),
        "rbg": jax.random.key(7, impl="rbg"),
        "keys": jax.random.split(jax.random.key(1), 3),
        "int": jnp.int8(-3),
        "numpy": np.arange(3),
        "nothing": {},
        "optax": optax.EmptyState(),
    }
    train.save(tmp_path / "all", tree)
    got = train.restore(tmp_path / "all", jax.tree.map(lambda x: x, tree))
    assert_same(got, tree)
    abstract = jax.eval_shape(lambda: {k: v for k, v in tree.items() if k != "numpy"})
    want = {k: v for k, v in tree.items() if k != "numpy"}
    train.save(tmp_path / "abstract", want)
    assert_same(train.restore(tmp_path / "abstract", abstract), want)


def test_numbers_come_back_as_numbers(tmp_path):
    tree = {"n": 3, "x": 0.1, "flag": True}
    train.save(tmp_path / "numbers", tree)
    got = train.restore(tmp_path / "numbers", {"n": 0, "x": 0.0, "flag": False})
    assert got == tree and [type(got[k]) for k in sorted(got)] == [bool, int, float]


def test_arrays_go_where_those_of_the_state_are(tmp_path):
    mesh = jax.make_mesh((8,), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    like = {
        "rows": jax.device_put(jnp.zeros((8, 2)), rows),
        "key": jax.device_put(jax.random.key(3), everywhere),
        "free": jnp.arange(3),
        "fixed": jax.device_put(jnp.zeros(2), jax.devices()[1]),
    }
    train.save(tmp_path / "x", {**like, "rows": jnp.arange(16.0).reshape(8, 2)})
    got = train.restore(tmp_path / "x", like)
    for name in ("rows", "key", "fixed"):
        assert got[name].sharding == like[name].sharding and got[name].committed
    # Like fresh arrays: a step may take them to any device.
    assert not got["free"].committed
    np.testing.assert_array_equal(got["rows"], np.arange(16.0).reshape(8, 2))


def test_a_donated_state_is_saved_as_it_was_and_can_be_the_pattern(tmp_path):
    """Donation reuses the memory while a thread still writes."""
    big = jnp.arange(1 << 20, dtype=jnp.float32)
    state = make_state(1, big=big)
    zero = jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)
    with train.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        # While the memory is still being read, it must not be reused.
        rest = zero(zero((state.params, state.opt_state)))
        restored = checkpoints.restore(state)
        assert not rest[0]["big"].any()
    assert_same(restored, make_state(1, big=big))


def test_the_last_and_the_best_stay(tmp_path):
    losses = {1: 5.0, 2: 1.0, 3: np.nan, 4: 0.5, 5: 3.0, 6: 1.0, 7: 2.0}
    with train.Checkpoints(tmp_path, keep_best=2, best="loss") as checkpoints:
        for step, loss in losses.items():
            assert checkpoints.save(Steps(jnp.int32(step)), metrics={"loss": loss})
        assert not checkpoints.save(Steps(jnp.int32(7)))
    # Best: 4, and 2, which was first with its figure. Last: 6 and 7.
    assert sorted(os.listdir(tmp_path)) == ["run.json"] + [
        f"step_{n:08d}" for n in (2, 4, 6, 7)
    ]
    # Another process ranks what it finds.
    with train.Checkpoints(tmp_path, keep_last=1, best="loss") as checkpoints:
        assert (checkpoints.best_step, checkpoints.latest_step) == (4, 7)
        state = checkpoints.resume(Steps(jnp.int32(0)))
        checkpoints.save(Steps(state.step + 1), metrics={"loss": 0.0})
        checkpoints.wait()
        assert checkpoints.steps == [8] and checkpoints.best_step == 8
    with train.Checkpoints(tmp_path, best="loss", mode="max") as checkpoints:
        assert checkpoints.best_step == 8


def test_parts_continue_where_they_were(tmp_path):
    store = data.ArrayStore({"x": np.arange(12, dtype=np.uint8)})

    def batches(seed=0):
        plan = data.BatchPlan(12, 4, seed=seed, epochs=2)
        return data.to_device(data.Loader(store, plan))

    with batches() as loader, train.Checkpoints(tmp_path / "a") as checkpoints:
        next(loader)
        # Two more batches are under way, and do not count.
        checkpoints.save(make_state(1), loader=loader, meter=Part({"steps": (1, 2)}))
        rest = [batch["x"].tolist() for batch in loader]
    meter = Part(None)
    with batches() as loader:
        state = train.restore(tmp_path / "a", make_state(), loader=loader, meter=meter)
        assert [batch["x"].tolist() for batch in loader] == rest
    assert state.step == 1 and meter.state == {"steps": [1, 2]}
    with batches(seed=1) as loader, pytest.raises(ValueError, match="saved 0, now 1"):
        train.restore(tmp_path / "a", make_state(), loader=loader)
    with pytest.raises(ValueError, match=r"no state of \['ema'\].*\['loader', 'meter"):
        train.restore(tmp_path / "a", make_state(), ema=meter)
    with batches() as loader, train.Checkpoints(tmp_path / "b") as checkpoints:
        with pytest.raises(ValueError, match="handed out 0 batches, .* done 1 steps"):
            checkpoints.save(make_state(1), loader=loader)
        with pytest.raises(TypeError, match="list_iterator, which has no get_state"):
            checkpoints.save(make_state(1), loader=iter([]))
        with pytest.raises(TypeError, match="state of odd must be JSON-able"):
            checkpoints.save(make_state(1), odd=Part(make_state))
        assert checkpoints.steps == []


def test_another_tree_is_refused_by_the_names_of_what_differs(tmp_path):
    train.save(tmp_path / "x", make_state(extra=jnp.ones(4)))
    other = make_state(features=5, new=jnp.ones(2))
    other = other.replace(key=jax.random.key(0, impl="rbg"))
    with pytest.raises(ValueError) as error:
        train.restore(tmp_path / "x", other)
    lines = str(error.value).splitlines()
    assert "does not fit this state" in lines[0]
    for line in (
        "  only saved: .params['extra']: float32[4]",
        "  only now: .params['new']: float32[2]",
        "  changed: .params['w']: saved bfloat16[2,3], now bfloat16[2,5]",
        "  changed: .key: saved key<fry>[], now key<rbg>[]",
    ):
        assert line in lines
    wide = make_state(extra=jnp.ones(4, jnp.float16))
    with pytest.raises(ValueError, match="saved float32.4., now float16.4."):
        train.restore(tmp_path / "x", wide)
    many: dict = {f"p{i}": jnp.ones(()) for i in range(20)}
    with pytest.raises(ValueError, match="only now: 52 more"):
        train.restore(tmp_path / "x", make_state(extra=jnp.ones(4), **many))


def test_a_folder_belongs_to_one_run(tmp_path):
    settings = {"seed": 1, "widths": (16, 32)}
    with train.Checkpoints(tmp_path, run=settings) as checkpoints:
        checkpoints.save(make_state(5))
        checkpoints.save(make_state(6))
    with pytest.raises(
        ValueError, match=r"another run:\n  changed: run\['seed'\]: saved 1, now 2\n"
    ):
        train.Checkpoints(tmp_path, run={**settings, "seed": 2})
    with train.Checkpoints(tmp_path, run=settings) as checkpoints:
        for step in (1, 7):
            with pytest.raises(ValueError, match=r"\[5, 6\] of an earlier run"):
                checkpoints.save(make_state(step))
        checkpoints.restore(make_state(), step=5)
        with pytest.raises(ValueError, match="up to step 6, and this is step 6.*mixed"):
            checkpoints.save(make_state(6))
        checkpoints.restore(make_state())
        assert checkpoints.save(make_state(7))
    (tmp_path / "run.json").unlink()
    with pytest.raises(ValueError, match="jaxaccel has not written them"):
        train.Checkpoints(tmp_path)
    with pytest.raises(TypeError, match="run must be JSON-able"):
        train.Checkpoints(tmp_path / "new", run={"key": jax.random.key(0)})


def test_what_a_dead_process_left_is_cleared_by_the_next_save(tmp_path):
    with train.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make_state(1))
    left = "step_00000002.orbax-checkpoint-tmp", "step_00000000.removing", ".run-ab"
    for name in left:
        (tmp_path / name).mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert train.restore(tmp_path, make_state()).step == 1
    with train.Checkpoints(tmp_path) as checkpoints:
        # Others may only read, while the run goes on.
        assert checkpoints.resume(make_state()).step == 1
        assert set(left) < set(os.listdir(tmp_path))
        checkpoints.save(make_state(2))
        checkpoints.wait()
        assert not set(left) & set(os.listdir(tmp_path))
    assert (tmp_path / "notes.txt").exists()


def test_errors_of_writing_are_raised_and_leave_the_last_one(tmp_path, monkeypatch):
    with train.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make_state(1))
        checkpoints.wait()
        checkpoints.save(make_state(2))
        real = checkpoints._checkpointer.wait_until_finished

        def fail():
            real()
            shutil.rmtree(tmp_path / "step_00000002")
            raise OSError("No space left on device")

        monkeypatch.setattr(checkpoints._checkpointer, "wait_until_finished", fail)
        with pytest.raises(ValueError, match="step 2 could not be .*No space left"):
            checkpoints.save(make_state(3))
        monkeypatch.undo()
        assert checkpoints.steps == [1] and checkpoints.current_step == 1
        assert checkpoints.save(make_state(3))


def test_a_damaged_checkpoint_is_named(tmp_path):
    with train.Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(Steps(jnp.int32(step)))
    for folder, _, files in os.walk(tmp_path / "step_00000002" / "state"):
        for file in files:
            if os.path.basename(folder) == "d":
                os.truncate(os.path.join(folder, file), 10)
    with pytest.raises(ValueError, match="step_00000002 cannot be read.*another step"):
        train.restore(tmp_path, Steps(jnp.int32(0)))
    with train.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(Steps(jnp.int32(0)), step=1).step == 1
    train.save(tmp_path / "x", {"w": jnp.ones(2)})
    host = tmp_path / "x" / "host" / "metadata"
    host.write_text(json.dumps({"format": 99}))
    with pytest.raises(ValueError, match="no checkpoint of this version"):
        train.restore(tmp_path / "x", {"w": jnp.ones(2)})
    host.write_text("{")
    with pytest.raises(ValueError, match="x cannot be read"):
        train.restore(tmp_path / "x", {"w": jnp.ones(2)})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_last": 0}, "keep_last must be at least 1 .* got 0 and 1"),
        ({"keep_best": -1}, "keep_best at least 0; got 2 and -1"),
        ({"mode": "least"}, "'min' or 'max'; got 'least'"),
        ({"folder": "file/checkpoints"}, "cannot be written .*choose another"),
    ],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)),
)
def test_mistakes(tmp_path, options, message):
    (tmp_path / "file").write_text("")
    folder = tmp_path / options.pop("folder", "ok")
    with pytest.raises(ValueError, match=message):
        train.Checkpoints(folder, **options)


def test_mistakes_of_use(tmp_path):
    with train.Checkpoints(tmp_path, best="loss") as checkpoints:
        with pytest.raises(ValueError, match="no checkpoint in .*it has none"):
            checkpoints.restore(make_state())
        state = make_state()
        assert checkpoints.resume(state) is state
        with pytest.raises(ValueError, match=r"lack 'loss'.*they are \['accuracy'\]"):
            checkpoints.save(make_state(1), metrics={"accuracy": 0.5})
        with pytest.raises(TypeError, match="flat dict of scalars"):
            checkpoints.save(make_state(1), metrics={"loss": jnp.ones(2)})
        checkpoints.save(make_state(1))
        assert checkpoints.best_step is None
        with pytest.raises(ValueError, match="checkpoint of step 2 .*it has .1."):
            checkpoints.restore(make_state(), step=2)
    with pytest.raises(ValueError, match="is there already"):
        train.save(tmp_path, make_state())
    with pytest.raises(TypeError, match=r"state\['f'\] is function is no array"):
        train.save(tmp_path / "x", {"f": make_state})
    with pytest.raises(ValueError, match="no arrays"):
        train.save(tmp_path / "x", {"f": {}})
    assert not (tmp_path / "x").exists()
