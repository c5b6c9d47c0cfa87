"""Claim: int8 is four times smaller, loses nothing that counts, and runs outside JAX.

    python benchmarks/quantization.py                       all parts, one table each
    python benchmarks/quantization.py --part accuracy --record

Parts, each with a record of its own:

  accuracy  W8A8 after training (PTQ) on two networks, five seeds each, against float
  twin      The same function with channels rescaled by 2^U(-4, 4), which is where one
            scale a kernel fails; scales a channel and equalization repair it
  qat       Low bits on digits, after training and trained with (min-max, LSQ)
  size      Bytes of parameters, ONNX files and compiled C against float32
  agree     The integer network against its float twin, compiled C and ONNX Runtime,
            on all test images
  step      A step of quantization-aware training against the float step, in turns
  latency   ONNX Runtime's int8 against its float, one thread, in turns
  peers     Qwix on accuracy, size, step and compile time. Left out of `all` where it
            is not installed: pip install qwix.

Networks are trained once, and read from --cache afterwards. The agreement, latency
and size of exports need the extra `onnx`, onnxruntime and gcc.
"""

import argparse
import functools
import importlib.metadata
import importlib.util
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import quantization_exports as exports
import quantization_networks as networks
from flax import nnx

from jaxaccel import quant, train
from jaxaccel.records import Headline, Record, interleave, paired_ratio

RESULTS = pathlib.Path(__file__).parent / "results"
CACHE = pathlib.Path("logs") / "quantization"
QAT_EPOCHS, QAT_RATE = 8, 1e-3
# Largest difference, and codes that may differ, in %. ONNX Runtime rescales with
# float32 multipliers: a number within 2**-24 of the middle may round to the other code.
AGREEMENT = {"float twin": (1, 6), "ONNX Runtime": (1, 0.01), "C": (0, 0)}
Figures = dict[str, str | int | float]


def main(arguments: list[str] | None = None) -> list[Record]:
    options = parse(arguments)
    records = []
    for part in all_parts() if options.part == "all" else [options.part]:
        record = PARTS[part](options)
        print(record.to_json() if options.json else record.table(), flush=True)
        records.append(record)
        if options.record:
            record.write(RESULTS)
    return records


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="quantization")
    parser.add_argument("--part", choices=["all", *PARTS], default="all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cache", type=pathlib.Path, default=CACHE)
    parser.add_argument("--json", action="store_true", help="print the records")
    parser.add_argument("--record", action="store_true", help="write to results/")
    parser.add_argument(
        "--networks", nargs="+", choices=networks.PROBLEMS, default=[*networks.PROBLEMS]
    )
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error("--rounds must be at least 2")
    if options.seeds < 1:
        parser.error("--seeds must be at least 1")
    return options


def all_parts() -> list[str]:
    installed = importlib.util.find_spec("qwix") is not None
    return [part for part in PARTS if part != "peers" or installed]


# ------------------------------------------------------------------------- schemes


def rule(bits: int, activation: int = 8, per_channel: bool = True, **options: Any):
    """`W<bits>A<activation>`, symmetric weights."""
    weight = quant.QuantSpec(
        bits=bits,
        symmetric=True,
        narrow_range=bits > 2,
        channel_axis=-1 if per_channel else None,
    )
    return quant.LayerRule(weight, quant.QuantSpec(bits=activation), **options)


def after_training(folded: Any, name: str, layer_rule: quant.LayerRule) -> Any:
    """Post-training quantization: ranges of 512 training images, then frozen."""
    attached = quant.attach(folded, layer_rule)
    return quant.calibrate(attached, [networks.calibration(name)])


def with_training(model: Any, name: str, seed: int, layer_rule: quant.LayerRule):
    """Quantization-aware training, from the trained weights."""
    attached = quant.attach(model, layer_rule)
    batch = networks.PROBLEMS[name].batch_size
    return networks.fit(attached, name, QAT_EPOCHS, QAT_RATE, batch, seed)


def accuracy_of(model: Any, name: str) -> float:
    return networks.accuracy(networks.logits(model, name), name)


MINMAX = functools.partial(rule, observer=quant.minmax)


# ------------------------------------------------------------------------ accuracy


def accuracy(options: argparse.Namespace) -> Record:
    figures: Figures = {}
    drops: dict[str, list[float]] = {}
    for name in options.networks:
        found: dict[str, list[float]] = {"float32": [], "W8A8": [], "per tensor": []}
        for seed in range(options.seeds):
            folded = networks.fold(networks.trained(name, seed, options.cache))
            found["float32"].append(accuracy_of(folded, name))
            for scheme, per_channel in (("W8A8", True), ("per tensor", False)):
                made = MINMAX(8, per_channel=per_channel)
                quantized = after_training(folded, name, made)
                found[scheme].append(accuracy_of(quantized, name))
        for scheme, values in found.items():
            figures[f"{name}, {scheme}: test accuracy, %"] = rounded(np.mean(values))
        drops[name] = list(np.subtract(found["float32"], found["W8A8"]))
        figures[f"{name}: mean drop, points"] = rounded(np.mean(drops[name]))
        figures[f"{name}: worst drop, points"] = rounded(max(drops[name]))
    held = all(np.mean(d) <= 0.2 and max(d) <= 0.75 for d in drops.values())
    worst = max(np.mean(d) for d in drops.values())
    figures["largest mean drop, points"] = rounded(worst)
    return Record.create(
        "quantization_accuracy",
        "8-bit weights (a scale for each output channel) and activations lose at most "
        "0.2 points of accuracy in the mean over seeds, 0.75 at worst",
        verdict="helps" if held else "no evidence",
        parameters={
            "seeds": options.seeds,
            "networks": options.networks,
            "calibration images": networks.CALIBRATION,
        },
        figures=figures,
        headline=[
            Headline(
                "Points of accuracy lost by W8A8 after training, mean of "
                f"{options.seeds} seeds",
                "float32",
                "largest mean drop, points",
            )
        ],
    )


def rounded(value: Any) -> float:
    # Adding 0 makes -0.0 a plain zero.
    return round(float(value), 2) + 0.0


def twin(options: argparse.Namespace) -> Record:
    found: dict[str, list[float]] = {
        "float32": [],
        "one scale a kernel": [],
        "a scale a channel": [],
        "equalized, one scale a kernel": [],
    }
    for seed in range(options.seeds):
        folded = networks.fold(networks.trained("digits", seed, options.cache))
        model = networks.rescaled(folded, seed)
        found["float32"].append(accuracy_of(model, "digits"))
        for scheme, candidate, per_channel in (
            ("one scale a kernel", model, False),
            ("a scale a channel", model, True),
            ("equalized, one scale a kernel", networks.equalized(model), False),
        ):
            made = MINMAX(8, per_channel=per_channel)
            quantized = after_training(candidate, "digits", made)
            found[scheme].append(accuracy_of(quantized, "digits"))
    means = {scheme: float(np.mean(values)) for scheme, values in found.items()}
    floating, tensor, channel, even = means.values()
    held = (
        tensor < 0.9 * floating and channel >= floating - 2 and even >= floating - 0.5
    )
    return Record.create(
        "quantization_twin",
        "Where channels differ in range, one scale a kernel loses more than a tenth "
        "of the accuracy; a scale a channel stays within 2 points, equalization with "
        "one scale a kernel within 0.5",
        verdict="helps" if held else "no evidence",
        parameters={"seeds": options.seeds, "network": "digits, rescaled"},
        figures={
            f"{scheme}: test accuracy, %": rounded(x) for scheme, x in means.items()
        },
    )


# ----------------------------------------------------------------------------- qat


def qat(options: argparse.Namespace) -> Record:
    schemes = {"W4A4": (4, 4), "W3A8": (3, 8), "W2A8": (2, 8)}
    found: dict[str, list[float]] = {"float32": []}
    seeds = min(options.seeds, 2)
    for seed in range(seeds):
        model = networks.trained("digits", seed, options.cache)
        folded = networks.fold(model)
        found["float32"].append(accuracy_of(folded, "digits"))
        for scheme, bits in schemes.items():
            variants = {
                "PTQ": after_training(folded, "digits", MINMAX(*bits)),
                "QAT": with_training(model, "digits", seed, rule(*bits)),
                "QAT, LSQ": with_training(
                    model, "digits", seed, rule(*bits, learned=True)
                ),
            }
            for variant, made in variants.items():
                value = accuracy_of(made, "digits")
                found.setdefault(f"{scheme}, {variant}", []).append(value)
    means = {key: float(np.mean(values)) for key, values in found.items()}
    held = (
        means["W2A8, PTQ"] < 85
        and means["W2A8, QAT"] >= 95
        and means["W4A4, QAT"] >= means["float32"] - 1
    )
    figures: Figures = {
        f"{key}: test accuracy, %": rounded(x) for key, x in means.items()
    }
    return Record.create(
        "quantization_qat",
        "Trained with, 2-bit weights keep 95 % where quantization after training is "
        "below 85 %, and W4A4 stays within a point of float",
        verdict="helps" if held else "no evidence",
        parameters={
            "seeds": seeds,
            "epochs": QAT_EPOCHS,
            "learning rate": QAT_RATE,
            "network": "digits",
        },
        figures=figures,
        headline=[
            Headline(
                "Test accuracy of 2-bit weights, trained with, digits, %",
                f"{rounded(means['W2A8, PTQ'])} after training alone",
                "W2A8, QAT: test accuracy, %",
            )
        ],
    )


# -------------------------------------------------------------------- size, latency


@functools.cache
def large() -> Any:
    """A network of 2.2 million parameters for 32x32 images; it need not be trained."""
    model = networks.ConvNet(
        (32, 32, 3),
        10,
        (32, 64, 128),
        (1, 1, 1),
        (True, True, True),
        (1024,),
        rngs=nnx.Rngs(0),
    )
    model.eval()
    return networks.fold(model)


@functools.cache
def large_images(count: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (count, 32, 32, 3), np.uint8)


@functools.cache
def large_graph() -> quant.IntGraph:
    images = large_images(64)
    floats = images.astype(np.float32) / 255
    model = quant.calibrate(quant.attach(large(), MINMAX(8)), [floats])
    return networks.lower(model, images, lambda x: x.astype(np.float32) / 255)


def size(options: argparse.Namespace) -> Record:
    del options
    figures: Figures = {}
    model = large()
    params = nnx.state(model, nnx.Param)
    # The identities that folding leaves are no parameters of the network.
    kernels, biases = networks.chain(model)
    tree = {
        f"{i}": {"kernel": kernel[...], "bias": bias[...]}
        for i, (kernel, bias) in enumerate(zip(kernels, biases, strict=True))
    }
    del params
    int8 = quant.size_report(quant.quantize_params(tree))
    int4 = quant.size_report(quant.quantize_params(tree, {"kernel": quant.INT4_WEIGHT}))
    count = int8.float32_nbytes // 4
    figures["parameters"] = count
    figures["float32: parameter bytes"] = int8.float32_nbytes
    figures["int8: parameter bytes"] = int8.nbytes
    figures["int4: parameter bytes"] = int4.nbytes
    figures["parameters, int8: ratio"] = f"{int8.ratio:.2f}x"
    figures["parameters, int4: ratio"] = f"{int4.ratio:.2f}x"
    graph = large_graph()
    floating = exports.float_onnx(model, (32, 32, 3)).ByteSize()
    onnx_bytes = quant.to_onnx_qdq(graph).ByteSize()
    figures["float32: ONNX bytes"] = floating
    figures["int8: ONNX bytes"] = onnx_bytes
    figures["ONNX file: ratio"] = f"{floating / onnx_bytes:.2f}x"
    held = int8.ratio >= 3.8 and int4.ratio >= 7 and floating / onnx_bytes >= 3.9
    if exports.has_gcc():
        with tempfile.TemporaryDirectory() as folder:
            text = exports.text_bytes(quant.to_c(graph, folder))
        # Generous to float: its code counts nothing.
        figures["float32: constants alone, bytes"] = int8.float32_nbytes
        figures["int8: C object, text bytes"] = text
        figures["C object: ratio"] = f"{int8.float32_nbytes / text:.2f}x"
        held = held and int8.float32_nbytes / text >= 3.5
    return Record.create(
        "quantization_size",
        "Parameters are at least 3.8 times smaller in int8 and 7 times in packed "
        "int4, an ONNX file 3.9 times, the object of the C code 3.5 times",
        verdict="helps" if held else "no evidence",
        parameters={"image": [32, 32, 3], "parameters": count},
        figures=figures,
        headline=[
            Headline(
                f"Smaller ONNX file in int8, {count / 1e6:.1f} million parameters",
                "the float32 file",
                "ONNX file: ratio",
            )
        ],
    )


def latency(options: argparse.Namespace) -> Record:
    images = {1: large_images(1), 8: large_images(8)}
    floating = exports.session(exports.float_onnx(large(), (32, 32, 3)))
    integer = exports.session(quant.to_onnx_qdq(large_graph()))
    contenders: dict[str, Callable[[], Any]] = {}
    for batch, pixels in images.items():
        floats = pixels.astype(np.float32) / 255
        for kind, runner, x in (
            ("float32", floating, floats),
            ("int8", integer, pixels),
        ):
            name = runner.get_inputs()[0].name
            feed = {name: x}
            repeats = max(1, 64 // batch)
            contenders[f"{kind}, batch {batch}"] = functools.partial(
                repeat, functools.partial(runner.run, None, feed), repeats
            )
    times = interleave(contenders, rounds=options.rounds)
    rounds = {
        key: [1e3 * t / max(1, 64 // int(key.split()[-1])) for t in values]
        for key, values in times.items()
    }
    ratio = paired_ratio(rounds["float32, batch 1"], rounds["int8, batch 1"])
    return Record.create(
        "quantization_latency",
        "ONNX Runtime runs the int8 network of 2 million parameters at least 1.5 "
        "times faster than the floating one, on one thread",
        verdict="helps" if ratio.low > 1 else "no evidence",
        parameters={"rounds": options.rounds, "image": [32, 32, 3], "threads": 1},
        unit="ms a call",
        rounds=rounds,
        ratios=[f"float32, batch {b} / int8, batch {b}" for b in images],
        headline=[
            Headline(
                "Less time of the exported int8 network in ONNX Runtime, one thread",
                "its float32 network",
                "float32, batch 1 / int8, batch 1",
            )
        ],
    )


def repeat(function: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        function()


# ------------------------------------------------------------------------ agreement


def agree(options: argparse.Namespace) -> Record:
    figures: Figures = {}
    held = True
    for name in options.networks:
        folded = networks.fold(networks.trained(name, 0, options.cache))
        quantized = after_training(folded, name, MINMAX(8))
        graph = networks.lower_trained(quantized, name)
        images = networks.split(name, "test")[0]
        codes = in_batches(functools.partial(quant.integer_apply, graph), images)
        fake = in_batches(functools.partial(quant.simulate, graph), images)
        compared = {"float twin": fake, "ONNX Runtime": None, "C": None}
        compared["ONNX Runtime"] = exports.run_onnx(quant.to_onnx_qdq(graph), images)
        if exports.has_gcc():
            with tempfile.TemporaryDirectory() as folder:
                program = exports.compile_c(quant.to_c(graph, folder))
                compared["C"] = exports.run_c(program, images)
        figures[f"{name}: images"] = len(images)
        figures[f"{name}: integer network, test accuracy, %"] = rounded(
            networks.accuracy(codes, name)
        )
        for other, found in compared.items():
            if found is None:
                continue
            off = np.abs(found.astype(np.int64) - codes)
            same = 100 * float((found.argmax(-1) == codes.argmax(-1)).mean())
            share = 100 * float((off > 0).mean())
            figures[f"{name}, {other}: largest difference, LSB"] = int(off.max())
            figures[f"{name}, {other}: codes that differ, %"] = round(share, 3)
            figures[f"{name}, {other}: same class, %"] = round(same, 2)
            largest, most = AGREEMENT[other]
            held &= off.max() <= largest and share <= most and same >= 99.9
    return Record.create(
        "quantization_agree",
        "Compiled C gives the integer network's codes, every one; ONNX Runtime too, "
        "but for ties, 1 off in 0.01 % at most; the float twin is within 1, and off in "
        "6 % at most; the class is the same for 99.9 %",
        verdict="helps" if held else "no evidence",
        parameters={"networks": options.networks, "scheme": "W8A8"},
        figures=figures,
        headline=[
            Headline(
                "Largest difference of the compiled C network's output, in codes",
                f"the integer reference in JAX, {figures[f'{name}: images']:,} images",
                f"{name}, C: largest difference, LSB",
            )
        ]
        if f"{name}, C: largest difference, LSB" in figures
        else (),
    )


def in_batches(function: Callable[[Any], Any], images: np.ndarray) -> np.ndarray:
    size = networks.EVAL_BATCH
    parts = [
        np.asarray(function(images[i : i + size])) for i in range(0, len(images), size)
    ]
    return np.concatenate(parts).astype(np.int64)


# ----------------------------------------------------------------------- step, peers


def step(options: argparse.Namespace) -> Record:
    models, batches = step_setting(options)
    contenders, compiles = timed_steps(models, batches)
    times = interleave(contenders, rounds=options.rounds)
    rounds = {key: [1e3 * t / len(batches) for t in v] for key, v in times.items()}
    ratio = paired_ratio(rounds["quantized"], rounds["float32"])
    return Record.create(
        "quantization_step",
        "A step of quantization-aware training takes at most 1.6 times the float step",
        verdict="trade-off" if ratio.median <= 1.6 else "no evidence",
        parameters={"rounds": options.rounds, "batch": 128, "network": "fashion_mnist"},
        unit="ms a step",
        rounds=rounds,
        ratios=["quantized / float32", "quantized, LSQ / float32"],
        figures={f"{key}: compile, s": round(t, 2) for key, t in compiles.items()},
        headline=[
            Headline(
                "Time of a step of quantization-aware training (1 is ideal)",
                "the float step",
                "quantized / float32",
            )
        ],
    )


def step_setting(options: argparse.Namespace) -> tuple[dict[str, Any], list[Any]]:
    name = "fashion_mnist" if "fashion_mnist" in options.networks else "digits"
    model = networks.create(name, 0)
    models = {
        "float32": model,
        "quantized": quant.attach(model, rule(8)),
        "quantized, LSQ": quant.attach(model, rule(8, learned=True)),
    }
    images, labels = networks.split(name, "train")
    normalize = networks.normalizer(name)
    batches = [
        {
            "image": jax.device_put(normalize(images[i : i + 128])),
            "label": jax.device_put(labels[i : i + 128].astype(np.int32)),
        }
        for i in range(0, 8 * 128, 128)
    ]
    return models, batches


def timed_steps(models: dict[str, Any], batches: list[Any]):
    contenders: dict[str, Callable[[], Any]] = {}
    compiles: dict[str, float] = {}
    for key, model in models.items():
        task = train.from_nnx(model, train.classification_loss)
        tx = optax.adam(1e-4)
        params, model_state = task.init()
        state = [
            train.TrainState.create(
                params, tx, key=jax.random.key(0), model_state=model_state
            )
        ]
        update = train.make_train_step(task.train_loss, tx)

        def run(update=update, state=state) -> None:
            current = state[0]
            for batch in batches:
                current, _ = update(current, batch)
            state[0] = jax.block_until_ready(current)

        start = time.perf_counter()
        run()
        compiles[key] = time.perf_counter() - start
        contenders[key] = run
    return contenders, compiles


def peers(options: argparse.Namespace) -> Record:
    try:
        import qwix  # type: ignore[import-not-found]
    except ImportError as error:
        raise ImportError("the part needs Qwix: pip install qwix") from error
    name = "digits"
    figures: Figures = {}
    found: dict[str, list[float]] = {"float32": [], "ours": [], "Qwix": []}
    every = [
        qwix.QuantizationRule(module_path=".*", weight_qtype="int8", act_qtype="int8")
    ]
    sample = networks.calibration(name)[:1]
    for seed in range(options.seeds):
        folded = networks.fold(networks.trained(name, seed, options.cache))
        found["float32"].append(accuracy_of(folded, name))
        ours = after_training(folded, name, MINMAX(8))
        found["ours"].append(accuracy_of(ours, name))
        theirs = qwix.quantize_model(folded, qwix.PtqProvider(every), sample)
        found["Qwix"].append(accuracy_of(theirs, name))
    for key, values in found.items():
        figures[f"{key}: test accuracy, %"] = rounded(np.mean(values))
    figures["Qwix: parameter bytes"] = bytes_of(nnx.state(theirs))  # of the last seed
    kernels, biases = networks.chain(folded)
    tree = [
        {"kernel": kernel[...], "bias": bias[...]}
        for kernel, bias in zip(kernels, biases, strict=True)
    ]
    figures["ours: parameter bytes"] = quant.size_report(
        quant.quantize_params(tree)
    ).nbytes
    models, batches = step_setting(options)
    del models["quantized, LSQ"]
    models["ours"] = models.pop("quantized")
    models["Qwix"] = qwix.quantize_model(
        models["float32"], qwix.QtProvider(every), batches[0]["image"][:1]
    )
    contenders, compiles = timed_steps(models, batches)
    for key, seconds in compiles.items():
        figures[f"{key}: compile, s"] = round(seconds, 2)
    times = interleave(contenders, rounds=options.rounds)
    rounds = {key: [1e3 * t / len(batches) for t in v] for key, v in times.items()}
    level = np.mean(found["ours"]) >= np.mean(found["Qwix"]) - 0.2
    faster = paired_ratio(rounds["Qwix"], rounds["ours"]).low > 1
    return Record.create(
        "quantization_peers",
        "After training, W8A8 is as accurate as with Qwix, and a step of training with "
        "it takes less time",
        verdict="helps" if level and faster else "no evidence",
        parameters={
            "seeds": options.seeds,
            "rounds": options.rounds,
            "qwix": importlib.metadata.version("qwix"),
        },
        unit="ms a step",
        rounds=rounds,
        ratios=["ours / float32", "Qwix / float32", "Qwix / ours"],
        figures=figures,
    )


def bytes_of(state: Any) -> int:
    """Of all but the identities that folding leaves of the normalizations."""
    sizes = [
        leaf.nbytes
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if "norms" not in (name := jax.tree_util.keystr(path)) or "bias" in name
    ]
    return sum(sizes)


PARTS: dict[str, Callable[[argparse.Namespace], Record]] = {
    "accuracy": accuracy,
    "twin": twin,
    "qat": qat,
    "size": size,
    "agree": agree,
    "step": step,
    "latency": latency,
    "peers": peers,
}

if __name__ == "__main__":
    main()
