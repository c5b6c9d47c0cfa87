import dataclasses
import getpass
import importlib.util
import json
import pathlib
import subprocess

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel.records import Headline, Ratio, Record, interleave, paired_ratio


def _record(**changes):
    arguments = {
        "verdict": "helps",
        "parameters": {"rounds": 3, "size": (2, 3)},
        "unit": "ms",
        "rounds": {"slow": [3.0, 6.3, 9.0], "fast": [1.0, 2.0, 3.0]},
        "ratios": ["slow / fast"],
        "figures": {"bytes": 12, "note": "exact", "share": 0.25},
        "headline": [Headline("fast", "slow", "slow / fast")],
    } | changes
    return Record.create("sample", "fast is three times as fast", **arguments)


def test_record_survives_json_and_files(tmp_path):
    record = _record()
    assert Record.from_json(record.to_json()) == record
    path = record.write(tmp_path / "new")
    assert path.name == "sample.json"
    assert Record.read(path) == record
    assert record.ratios["slow / fast"] == Ratio(3.0, 3.0, 3.15)
    assert record.parameters == {"rounds": 3, "size": [2, 3]}


def test_json_fields_are_the_schema():
    fields = json.loads(_record().to_json())
    assert set(fields) == {
        "name",
        "claim",
        "verdict",
        "date",
        "commit",
        "versions",
        "hardware",
        "parameters",
        "unit",
        "rounds",
        "ratios",
        "figures",
        "headline",
    }
    assert set(fields["versions"]) == {
        "python",
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "grain",
        "numpy",
    }
    assert fields["hardware"]["platform"] in {"cpu", "gpu", "tpu"}
    assert fields["hardware"]["cores"] >= 1


@hypothesis.settings(max_examples=8)
@hypothesis.given(
    st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=6),
    st.dictionaries(st.text(max_size=5), st.integers() | st.booleans() | st.none()),
)
def test_any_measurement_survives_json(values, parameters):
    rounds = {"a": values, "b": values[::-1]}
    record = Record.create(
        "any",
        "claim",
        verdict="no evidence",
        parameters=parameters,
        rounds=rounds,
        ratios=["a / b"],
    )
    assert Record.from_json(record.to_json()) == record
    np.testing.assert_allclose(record.rounds["a"], values, rtol=1e-5)


def test_record_names_neither_user_nor_place(tmp_path):
    text = _record().to_json()
    home, here = pathlib.Path.home(), pathlib.Path(__file__).parents[1]
    assert str(here) not in text
    assert str(home) not in text
    assert f'"{getpass.getuser()}"' not in text
    with pytest.raises(ValueError, match="path"):
        _record(parameters={"out": str(tmp_path)})
    with pytest.raises(ValueError, match="path"):
        _record(figures={"note": "read from ~/data"})


def _change(path, value):
    fields = json.loads(_record().to_json())
    inner = fields
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["claim"], None, r"missing fields \['claim'\]"),
        (["speed"], 3, r"unknown fields \['speed'\]"),
        (["ratios", "slow / fast", "high"], None, r"missing fields \['high'\]"),
        (["ratios", "slow / fast", "low"], 4.0, "low <= median"),
        (
            ["ratios", "slow / none"],
            dict.fromkeys(["median", "low", "high"], 1.0),
            "contenders",
        ),
        (["headline", 0, "colour"], "red", r"unknown fields \['colour'\]"),
        (["headline", 0, "figure"], "speed", "no ratio or figure 'speed'"),
        (["rounds", "fast"], [1.0], "same rounds"),
        (["rounds", "fast"], [], "same rounds"),
        (["verdict"], "great", "verdict must be one of"),
        (["name"], "../up", "name must be"),
        (["date"], "yesterday", "YYYY-MM-DD"),
    ],
)
def test_damaged_records_are_refused(tmp_path, path, value, message):
    file = tmp_path / "sample.json"
    file.write_text(_change(path, value))
    with pytest.raises(ValueError, match=message) as caught:
        Record.read(file)
    assert "sample.json" in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", "3", ""])
def test_text_that_is_no_record(tmp_path, text):
    file = tmp_path / "sample.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="sample.json is no valid record"):
        Record.read(file)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["claim"], 3, "claim must be str"),
        (["ratios"], [], "ratios must be dict"),
        (["headline"], "row", "headline must be tuple"),
        (["rounds", "fast"], [1.0, "2", 3.0], "finite numbers"),
        (["rounds", "fast"], [1.0, float("nan"), 3.0], "finite numbers"),
        (["figures", "bytes"], True, "finite number or text"),
    ],
)
def test_wrong_types_are_refused(unchecked, path, value, message):
    with pytest.raises(TypeError, match=message):
        Record.from_json(_change(path, value))


def test_parameters_must_fit_into_json():
    with pytest.raises(TypeError, match="parameters must be"):
        _record(parameters={"x": np.zeros(2)})
    with pytest.raises(TypeError, match="parameters must be"):
        _record(parameters={"x": float("inf")})


def test_table_shows_every_number():
    text = _record().table()
    assert "3.00x (3.00 to 3.15)" in text
    assert "6.30  (rounds 3.00 to 9.00)" in text
    assert "bytes" in text and "12" in text and "0.250" in text
    assert text.endswith("verdict: helps")


def test_commit_is_told_inside_a_repository_only(tmp_path):
    root = pathlib.Path(__file__).parents[1]
    package = tmp_path / "repo" / "jaxaccel"
    package.mkdir(parents=True)
    module = package / "_environment.py"
    module.write_text((root / "jaxaccel" / "_environment.py").read_text())

    def told():
        spec = importlib.util.spec_from_file_location("copied", module)
        assert spec is not None and spec.loader is not None
        copied = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(copied)
        return copied.commit()

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(
            ["git", *identity, *arguments],
            cwd=package.parent,
            check=True,
            capture_output=True,
        )

    git("init")
    (package.parent / ".gitignore").write_text("__pycache__\n")
    assert told() is None  # Not tracked, as a package installed there is not.
    git("add", ".")
    git("commit", "-m", "first")
    clean = told()
    assert len(clean) == 40
    (package.parent / "benchmarks" / "results").mkdir(parents=True)
    (package.parent / "benchmarks" / "results" / "a.json").write_text("{}")
    assert told() == clean
    (package / "new.py").write_text("")
    assert told() == clean + "+changes"


def test_ratio_agrees_with_numpy(rng):
    a, b = rng.uniform(2, 3, 15), rng.uniform(1, 2, 15)
    ratio = paired_ratio(a.tolist(), b.tolist())
    assert ratio.median == pytest.approx(np.median(a / b), rel=1e-12)
    # Ranks 4 and 12 of 15 hold the median with at least 95 %, distribution free;
    # the bootstrap must land near them.
    ordered = np.sort(a / b)
    assert ordered[2] <= ratio.low <= ordered[5]
    assert ordered[9] <= ratio.high <= ordered[12]
    assert paired_ratio(a.tolist(), b.tolist()) == ratio


def test_ratio_interval_covers_the_truth():
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        load = rng.lognormal(0, 0.5, 15)
        a, b = load * 3 * rng.lognormal(0, 0.1, 15), load * rng.lognormal(0, 0.1, 15)
        ratio = paired_ratio(a.tolist(), b.tolist())
        covered += ratio.low <= 3 <= ratio.high
    assert 0.88 <= covered / 200 <= 0.995


def test_a_shared_load_cancels():
    load = np.geomspace(1, 100, 9)
    assert paired_ratio((4 * load).tolist(), load.tolist()) == Ratio(4.0, 4.0, 4.0)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([1.0], [1.0], "at least 2"),
        ([1.0, 2.0], [1.0, 2.0, 3.0], "same rounds"),
        ([1.0, 0.0], [1.0, 1.0], "positive"),
        ([1.0, 1.0], [1.0, float("nan")], "positive and finite"),
    ],
)
def test_ratios_of_nothing_are_refused(a, b, message):
    with pytest.raises(ValueError, match=message):
        paired_ratio(a, b)


def test_contenders_take_turns():
    calls = []
    contenders = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = interleave(contenders, rounds=4, warmup=1)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab" + "abc"
    assert {name: len(values) for name, values in times.items()} == dict.fromkeys(
        "abc", 4
    )


def test_times_are_the_clock_s_and_wait_for_the_device():
    now = 0.0

    def work(seconds):
        nonlocal now
        now += seconds
        return {"x": jnp.ones(3), "host": "text"}

    times = interleave(
        {"a": lambda: work(2.0), "b": lambda: work(0.5)}, rounds=3, clock=lambda: now
    )
    assert times == {"a": [2.0] * 3, "b": [0.5] * 3}


@pytest.mark.parametrize(
    ("contenders", "arguments", "message"),
    [
        ({}, {"rounds": 1}, "nothing to measure"),
        ({"a": int}, {"rounds": 0}, "rounds must be at least 1"),
        ({"a": int}, {"rounds": 1, "warmup": -1}, "warmup at least 0"),
    ],
)
def test_nothing_to_interleave(contenders, arguments, message):
    with pytest.raises(ValueError, match=message):
        interleave(contenders, **arguments)


def test_contender_must_be_callable(unchecked):
    with pytest.raises(TypeError, match="contender 'a'"):
        interleave({"a": 3}, rounds=1)  # type: ignore[dict-item]


def test_records_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        _record().name = "other"  # type: ignore[misc]
