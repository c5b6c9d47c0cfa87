"""Claim: a step and a loop of ours cost nothing over the tightest ones by hand.

    python benchmarks/step_overhead.py                    all parts, one table each
    python benchmarks/step_overhead.py --part overhead --rounds 30 --record --plot

Parts, each with a record of its own:

  overhead  A loop of steps over batches that are on the device already, for a dense
            net whose step takes some 0.2 ms (`--part overhead`) and a convolutional
            one of more than 5 ms (`overhead_conv`):
              by hand       jitted flax + optax, state donated, losses left on the
                            device and read once at the end
              plain optax   the same without donation, the loss read every 50 steps
              our step      make_train_step in a bare `for`
              our loop      train.run with Meter and MetricBuffer
  keras     The dense net again, against Keras 3 on jax: `train_on_batch` and `fit`.
            Left out of `all` where it is not installed: pip install keras.
  calls     steps_per_call=16 against 1, on the dense net
  memory    compiled temporary bytes of accumulation and rematerialization, exact
  guard     compiled bytes of a guarded step over those of an unguarded one, exact

Times are of whole loops, in turns; ratios are medians over rounds.
"""

import argparse
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxaccel import train
from jaxaccel.records import Headline, Record, interleave, paired_ratio

RESULTS = Path(__file__).parent / "results"
BOUNDS = {"dense": 1.3, "conv": 1.03}
CALLS_BOUND, GUARD_BOUND = 2.0, 1.15
STEPS_A_CALL = 16
READ_EVERY = 50


def main(arguments: list[str] | None = None) -> list[Record]:
    options = parse(arguments)
    records = []
    for part in all_parts() if options.part == "all" else [options.part]:
        record = PARTS[part](options)
        print(record.to_json() if options.json else record.table(), flush=True)
        records.append(record)
        if options.record:
            record.write(RESULTS)
        if options.plot and record.rounds:
            draw(record, RESULTS / f"{record.name}.png")
    return records


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="overhead of step and loop")
    parser.add_argument("--part", choices=["all", *PARTS], default="all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, help="steps in a round")
    parser.add_argument("--json", action="store_true", help="print the records")
    parser.add_argument("--record", action="store_true", help="write to results/")
    parser.add_argument("--plot", action="store_true", help="PNG beside the record")
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error("--rounds must be at least 2")
    if options.steps is not None and options.steps < 1:
        parser.error("--steps must be at least 1")
    return options


def all_parts() -> list[str]:
    installed = importlib.util.find_spec("keras") is not None
    return [part for part in PARTS if part != "keras" or installed]


# ------------------------------------------------------------------------ networks


class Dense(nn.Module):
    """A small dense net, whose step is bound by its dispatch."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits."""
        x = nn.relu(nn.Dense(128)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


class Conv(nn.Module):
    """Three convolutions and a linear head."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits."""
        for features in (16, 32, 64):
            x = nn.relu(nn.Conv(features, (3, 3), strides=2)(x))
        return nn.Dense(10)(x.reshape(len(x), -1))


NETWORKS: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {
    # The module, the shape of a batch, steps in a round.
    "dense": (Dense(), (256, 8, 8, 1), 500),
    "conv": (Conv(), (128, 28, 28, 1), 150),
}


def make_batches(shape: tuple[int, ...], count: int = 8) -> list[dict[str, jax.Array]]:
    rng = np.random.default_rng(0)
    return [
        jax.device_put(
            {
                "image": rng.normal(size=shape).astype(np.float32),
                "label": rng.integers(10, size=shape[0], dtype=np.int32),
            }
        )
        for _ in range(count)
    ]


def cycle(batches: list[Any], steps: int) -> Iterator[Any]:
    return (batches[i % len(batches)] for i in range(steps))


def loss_by(module: nn.Module) -> Callable[..., Any]:
    """The loss by hand, of parameters and a batch."""

    def loss_fn(params, batch):
        logits: Any = module.apply({"params": params}, batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean()

    return loss_fn


def make_tx() -> optax.GradientTransformation:
    return optax.sgd(1e-3, momentum=0.9)


# ---------------------------------------------------------------- step and loop


def overhead(options: argparse.Namespace, network: str) -> Record:
    module, shape, steps = NETWORKS[network]
    steps = options.steps or steps
    batches = make_batches(shape)
    contenders = {
        "by hand": by_hand(module, batches, steps, donate=True, read_every=None),
        "plain optax": by_hand(
            module, batches, steps, donate=False, read_every=READ_EVERY
        ),
        "our step": our_step(module, batches, steps),
        "our loop": our_loop(module, batches, steps),
    }
    times = interleave(contenders, rounds=options.rounds)
    rounds = {k: [1e3 * t / steps for t in v] for k, v in times.items()}
    bound = BOUNDS[network]
    ratios = [f"{name} / by hand" for name in contenders if name != "by hand"]
    ours = paired_ratio(rounds["our loop"], rounds["by hand"])
    return Record.create(
        "step_overhead" if network == "dense" else f"step_overhead_{network}",
        f"Our step in our loop, with meter and metrics, takes at most {bound:g} times "
        "as long as the tightest loop by hand",
        verdict="helps" if ours.median <= bound else "trade-off",
        parameters={"rounds": options.rounds, "steps": steps, "batch": list(shape)},
        unit="ms a step",
        rounds=rounds,
        ratios=ratios,
        headline=[
            Headline(
                "Time of `train.run` with meter and metrics, step of "
                f"{np.median(rounds['by hand']):.2g} ms (1 is ideal)",
                "the tightest loop by hand",
                "our loop / by hand",
            )
        ],
    )


def by_hand(module, batches, steps, *, donate, read_every) -> Callable[[], Any]:
    loss_fn, tx = loss_by(module), make_tx()

    def step(params, opt_state, batch):
        loss, gradient = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    jitted = jax.jit(step, donate_argnums=(0, 1) if donate else ())
    params = initial(module, batches)
    state = [params, tx.init(params)]

    def run():
        losses = []
        params, opt_state = state
        for i, batch in enumerate(cycle(batches, steps), 1):
            params, opt_state, loss = jitted(params, opt_state, batch)
            losses.append(loss)
            if read_every and i % read_every == 0:
                float(loss)
        state[:] = params, opt_state
        jax.block_until_ready(params)
        return jax.device_get(losses)

    return run


def initial(module: nn.Module, batches: list[Any]) -> Any:
    return module.init(jax.random.key(0), batches[0]["image"])["params"]


def our_task(module: nn.Module) -> Callable[..., Any]:
    loss_fn = loss_by(module)
    return lambda params, model_state, batch, key: (
        loss_fn(params, batch),
        (model_state, {}),
    )


def our_state(module: nn.Module, batches: list[Any], **options: Any) -> Any:
    return train.TrainState.create(
        initial(module, batches), make_tx(), key=jax.random.key(0), **options
    )


def our_step(module, batches, steps, *, stacks=None) -> Callable[[], Any]:
    """With `stacks` of batches as calls of several steps."""
    calls = STEPS_A_CALL if stacks else 1
    step = train.make_train_step(our_task(module), make_tx(), steps_per_call=calls)
    state = [our_state(module, batches)]

    def run():
        losses, current = [], state[0]
        for batch in cycle(stacks or batches, steps // calls):
            current, metrics = step(current, batch)
            losses.append(metrics["loss"])
        state[0] = current
        jax.block_until_ready(current.params)
        return jax.device_get(losses)

    return run


def our_loop(module, batches, steps) -> Callable[[], Any]:
    step = train.make_train_step(our_task(module), make_tx())
    state = [our_state(module, batches)]

    def run():
        with train.Meter() as meter, train.MetricBuffer(every=READ_EVERY) as buffer:
            source = cycle(batches, steps)
            loop = train.run(step, state[0], source, meter=meter, buffer=buffer)
            for _, current, _ in loop:
                state[0] = current
        return jax.block_until_ready(state[0].params)

    return run


def against_keras(options: argparse.Namespace) -> Record:
    module, shape, steps = NETWORKS["dense"]
    steps = options.steps or steps
    batches = make_batches(shape)
    contenders = {
        "by hand": by_hand(module, batches, steps, donate=True, read_every=None),
        "our loop": our_loop(module, batches, steps),
        **in_keras(batches, steps),
    }
    times = interleave(contenders, rounds=options.rounds)
    rounds = {k: [1e3 * t / steps for t in v] for k, v in times.items()}
    ratio = paired_ratio(rounds["keras, fit"], rounds["our loop"])
    return Record.create(
        "step_overhead_keras",
        "Our loop takes less time than that of Keras 3 on jax, on a short step",
        verdict="helps" if ratio.low > 1 else "no evidence",
        parameters={
            "rounds": options.rounds,
            "steps": steps,
            "batch": list(shape),
            "keras": importlib.metadata.version("keras"),
        },
        unit="ms a step",
        rounds=rounds,
        ratios=[
            "our loop / by hand",
            "keras, fit / our loop",
            "keras, train_on_batch / our loop",
        ],
        headline=[
            Headline(
                "Less time of `train.run` with meter and metrics, step of "
                f"{np.median(rounds['by hand']):.2g} ms",
                "`fit` of Keras 3 on jax",
                "keras, fit / our loop",
            )
        ],
    )


def in_keras(batches: list[Any], steps: int) -> dict[str, Callable[[], Any]]:
    """The dense net in both loops of Keras, over the same arrays on the device."""
    os.environ["KERAS_BACKEND"] = "jax"
    try:
        import keras  # type: ignore[import-not-found]
    except ImportError as error:
        raise ImportError("the part needs Keras 3: pip install keras") from error

    def make_model() -> Any:
        model = keras.Sequential(
            [
                keras.Input(batches[0]["image"].shape[1:]),
                keras.layers.Flatten(),
                keras.layers.Dense(128, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            keras.optimizers.SGD(1e-3, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model

    arrays = [(batch["image"], batch["label"]) for batch in batches]
    fitted, stepped = make_model(), make_model()

    def fit():
        source = cycle(arrays, steps)
        fitted.fit(source, steps_per_epoch=steps, shuffle=False, verbose=0)

    def train_on_batch():
        for images, labels in cycle(arrays, steps):
            stepped.train_on_batch(images, labels)

    return {"keras, fit": fit, "keras, train_on_batch": train_on_batch}


# ------------------------------------------------------------------------- calls


def calls(options: argparse.Namespace) -> Record:
    module, _, steps = NETWORKS["dense"]
    shape = (16, 8, 8, 1)
    steps = -(-(options.steps or steps) // STEPS_A_CALL) * STEPS_A_CALL
    batches = make_batches(shape, STEPS_A_CALL)
    stacks = [jax.tree.map(lambda *x: jnp.stack(x), *batches)]
    many = f"{STEPS_A_CALL} steps a call"
    contenders = {
        "one step a call": our_step(module, batches, steps),
        many: our_step(module, batches, steps, stacks=stacks),
    }
    times = interleave(contenders, rounds=options.rounds)
    rounds = {k: [1e3 * t / steps for t in v] for k, v in times.items()}
    name = f"one step a call / {many}"
    ratio = paired_ratio(rounds["one step a call"], rounds[many])
    return Record.create(
        "steps_per_call",
        f"{STEPS_A_CALL} steps in one call take at most 1/{CALLS_BOUND:g} of the time "
        "of single calls, on a step bound by its dispatch",
        verdict="helps" if ratio.median >= CALLS_BOUND else "no evidence",
        parameters={"rounds": options.rounds, "steps": steps, "batch": list(shape)},
        unit="ms a step",
        rounds=rounds,
        ratios=[name],
        headline=[
            Headline(
                f"Less time a step, {np.median(rounds['one step a call']):.2g} ms: "
                f"`steps_per_call={STEPS_A_CALL}`",
                "one step a call",
                name,
            )
        ],
    )


# ------------------------------------------------------------------------ memory


class Deep(nn.Module):
    """Twelve residual blocks: the backward pass needs most of the memory."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits."""
        x = x.reshape(len(x), -1)
        for _ in range(12):
            x = x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(x)))
        return nn.Dense(10)(x)


def memory(options: argparse.Namespace) -> Record:
    del options
    module, batch = Deep(), make_batches((512, 8, 8, 1), 1)[0]
    variants: dict[str, dict[str, Any]] = {
        "as it is": {},
        "accumulate=2": {"accumulate": 2},
        "accumulate=4": {"accumulate": 4},
        "accumulate=8": {"accumulate": 8},
        "rematerialize='dots_saveable'": {"rematerialize": "dots_saveable"},
        "rematerialize='nothing_saveable'": {"rematerialize": "nothing_saveable"},
    }
    figures: dict[str, str | int | float] = {}
    analyses = {
        name: compiled_step(module, batch, **settings).memory_analysis()
        for name, settings in variants.items()
    }
    for name, analysis in analyses.items():
        figures[f"{name}: temporary MB"] = round(analysis.temp_size_in_bytes / 1e6, 2)
    for policy in ("everything_saveable", "dots_saveable", "nothing_saveable"):
        figures[f"kept for the backward pass, {policy}: MB"] = round(
            kept_bytes(module, batch, policy) / 1e6, 2
        )
    state = our_state(module, [batch])
    figures["aliased by donation, bytes"] = int(
        analyses["as it is"].alias_size_in_bytes
    )
    held = jax.tree.leaves((state.params, state.opt_state))
    figures["parameters and optimizer state, bytes"] = sum(x.nbytes for x in held)
    base = float(figures["as it is: temporary MB"])
    for name in list(variants)[1:]:
        kept = float(figures[f"{name}: temporary MB"])
        figures[f"{name}: memory saved"] = f"{base / kept:.3g}x"
    return Record.create(
        "step_memory",
        "Accumulation and rematerialization lower the memory of a step",
        verdict="trade-off",
        parameters={"batch": [512, 64], "layers": 24},
        figures=figures,
    )


def kept_bytes(module: nn.Module, batch: Any, policy: str) -> int:
    """Bytes that the backward pass gets, parameters and batch left out."""
    checkpointed = jax.checkpoint(
        loss_by(module), policy=getattr(jax.checkpoint_policies, policy)
    )
    params = initial(module, [batch])
    # The function that does the backward pass is a tree of what it keeps.
    backward = jax.eval_shape(lambda p: jax.vjp(checkpointed, p, batch)[1], params)
    given = {x.shape for x in jax.tree.leaves((params, batch))}
    kept = [x for x in jax.tree.leaves(backward) if x.shape not in given]
    return sum(x.size * x.dtype.itemsize for x in kept)


def compiled_step(module: nn.Module, batch: Any, **settings: Any) -> Any:
    step = train.make_train_step(our_task(module), make_tx(), **settings)
    kept = {k: v for k, v in settings.items() if k in ("finite_guard", "ema")}
    state = our_state(module, [batch], **kept)
    return step.lower(state, batch).compile()


def guard(options: argparse.Namespace) -> Record:
    del options
    figures: dict[str, str | int | float] = {}
    worst = 0.0
    for name, (module, shape, _) in NETWORKS.items():
        batch = make_batches(shape, 1)[0]
        counts = [
            accessed(compiled_step(module, batch, finite_guard=guarded))
            for guarded in (False, True)
        ]
        figures[f"{name}: bytes accessed"] = int(counts[0])
        figures[f"{name}: bytes accessed, guarded"] = int(counts[1])
        figures[f"{name}: ratio"] = f"{counts[1] / counts[0]:.3f}x"
        worst = max(worst, counts[1] / counts[0])
    version = "_".join(jax.__version__.split(".")[:2])
    return Record.create(
        f"finite_guard_jax_{version}",
        f"A guarded step accesses at most {GUARD_BOUND:g} times the bytes",
        verdict="helps" if worst <= GUARD_BOUND else "trade-off",
        parameters={name: list(shape) for name, (_, shape, _) in NETWORKS.items()},
        figures=figures,
    )


def accessed(compiled: Any) -> float:
    analysis = compiled.cost_analysis()
    return float(
        (analysis[0] if isinstance(analysis, list) else analysis)["bytes accessed"]
    )


PARTS: dict[str, Callable[[argparse.Namespace], Record]] = {
    "overhead": lambda options: overhead(options, "dense"),
    "overhead_conv": lambda options: overhead(options, "conv"),
    "keras": against_keras,
    "calls": calls,
    "memory": memory,
    "guard": guard,
}


def draw(record: Record, path: Path) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "the plot needs matplotlib: pip install 'jaxaccel[examples]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    names = list(record.rounds)
    values = [record.rounds[name] for name in names]
    axes.boxplot(values, orientation="horizontal", showfliers=False)
    axes.set_yticks(range(1, len(names) + 1), names)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{record.unit}, {record.parameters['rounds']} rounds")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=140)
    plt.close(figure)


if __name__ == "__main__":
    main()
