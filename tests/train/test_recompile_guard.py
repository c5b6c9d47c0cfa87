"""Why a step compiled again, and programs that are kept on disk."""

import functools
import json
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxaccel import train


def make_step():
    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch, scale=1.0):
        total = sum(jnp.sum(x, dtype=jnp.float32) for x in batch.values())
        return {"w": state["w"] + total * scale}

    return step


def state_of():
    return {"w": jnp.zeros(8)}


def batch_of(n=4, dtype: Any = np.uint8):
    return {"image": np.zeros((n, 2), dtype), "label": np.zeros(4, np.int32)}


def changed_placement():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = NamedSharding(mesh, PartitionSpec("d"))
    return {"w": jax.device_put(jnp.zeros(8), spread)}, batch_of()


CHANGES = {
    "shape": (
        lambda: (state_of(), batch_of(3)),
        "batch['image'] changed its shape from uint8[4,2] to uint8[3,2]",
    ),
    "dtype": (
        lambda: (state_of(), batch_of(dtype=np.float32)),
        "batch['image'] changed its dtype from uint8[4,2] to float32[4,2]",
    ),
    "sharding": (changed_placement, "state['w'] changed its sharding from uncommitted"),
    "new key": (
        lambda: (state_of(), {**batch_of(), "mask": np.ones(4, bool)}),
        "batch['mask'] is new",
    ),
    "argument": (
        lambda: (state_of(), batch_of(), jnp.float32(2)),
        "scale is new",
    ),
    "weak type": (
        lambda: ({"w": jax.lax.full((8,), 0.0)}, batch_of()),
        "state['w'] changed its weak type from False to True",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_argument_that_changed_is_named(name):
    guard = train.RecompileGuard(make_step(), action="record")
    for _ in range(3):
        guard(state_of(), batch_of())
    assert (guard.calls, guard.compilations, guard.recompilations) == (3, 1, [])
    build, expected = CHANGES[name]
    guard(*build())
    [report] = guard.recompilations
    assert len(report.changes) == 1 and report.changes[0].startswith(expected)
    assert report.call == 4 and report.seconds > 0
    assert str(report).startswith("step compiled again at call 4 (")
    guard(*build())
    guard(state_of(), batch_of())
    assert len(guard.recompilations) == 1


def test_raising_leaves_the_donated_state_alone():
    guard = train.RecompileGuard(make_step(), action="raise")
    state = guard(state_of(), batch_of())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"batch\['image'\] changed its shape"):
            guard(state, batch_of(3))
    assert not state["w"].is_deleted()
    assert guard(state, batch_of())["w"].shape == (8,)
    assert state["w"].is_deleted()


def test_warning_and_allowed_compilations():
    guard = train.RecompileGuard(make_step(), allowed=2)
    guard(state_of(), batch_of(4))
    guard(state_of(), batch_of(3))
    with pytest.warns(UserWarning, match=r"uint8\[3,2\] to uint8\[2,2\]"):
        guard(state_of(), batch_of(2))


def test_a_cleared_cache_is_told_apart_and_others_do_not_count():
    step: Any = make_step()
    guard = train.RecompileGuard(step, action="record")
    guard(state_of(), batch_of())
    step.clear_cache()

    @jax.jit
    def other(x):
        return x * 2

    other(jnp.ones(77))
    guard(state_of(), batch_of())
    [report] = guard.recompilations
    assert report.changes == () and "a cleared cache did it" in str(report)


def test_the_guard_is_the_function_otherwise():
    guard = train.RecompileGuard(make_step())
    lowered = guard.lower(state_of(), batch_of())
    assert "step" in lowered.as_text()
    assert train.count_flops(guard, state_of(), batch_of()) > 0


@pytest.mark.usefixtures("unchecked")
def test_arguments_are_checked():
    with pytest.raises(TypeError, match="jitted.*got function"):
        train.RecompileGuard(lambda x: x)
    with pytest.raises(ValueError, match="at least 1.*got 0"):
        train.RecompileGuard(make_step(), allowed=0)
    with pytest.raises(ValueError, match="'record'; got 'print'"):
        train.RecompileGuard(make_step(), action="print")  # type: ignore[arg-type]


# In processes of their own: the cache is a setting of the whole process.
PROGRAM = """
import json, sys
import jax, jax.numpy as jnp
from jaxaccel import train
jax.jit(lambda x: x - 1)(jnp.ones(3))  # jax has looked for a cache already
folder = train.enable_compilation_cache(sys.argv[1])
step = jax.jit(lambda x: (x @ x).sum())
with train.CompileCounter() as compiles:
    value = float(step(jnp.ones((5, 5))))
print(json.dumps([str(folder), value, compiles.cache_hits, compiles.totals()[0]]))
"""


def test_second_process_reads_what_the_first_compiled(tmp_path):
    folder = tmp_path / "cache"
    results = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(folder)],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout))
    assert [result[:2] for result in results] == [[str(folder), 125.0]] * 2
    (*_, hits, compiled), (*_, hits_later, compiled_later) = results
    assert hits == 0 and compiled > 0
    assert hits_later == compiled and compiled_later == 0


def test_cache_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="cannot be written"):
        train.enable_compilation_cache(tmp_path / "file" / "cache")
    assert jax.config.jax_compilation_cache_dir == before  # type: ignore[attr-defined]
