"""Quantizes what image_classifier.py trained, and runs it outside of JAX.

    python examples/trainers/image_classifier.py       # or: make train
    python examples/trainers/quantize_classifier.py

The network's weights are read, and made into an integer network in two ways:

    PTQ   batch normalization is folded into the kernels, 512 training images tell the
          ranges of the activations, and everything is rounded: no training
    QAT   the same train step, a few epochs more, with the rounding inside the step;
          the scales it was trained with are those of the integer network

Each integer network is written as ONNX and as C. Both run on all test images, and
must give the integer codes of the reference in JAX. One table at the end: accuracy,
bytes of the parameters and of the file (for C, of the compiled object's code and
constants), time for an image against float32 in ONNX Runtime on one thread, and how
many of the output's codes are those of the reference.

Of Fashion-MNIST after three epochs of the main job: 89.10 % in float32, 89.02 % after
PTQ, 89.17 % after two epochs of QAT; 3.9 times fewer bytes of parameters, a file 3.4
times smaller. The C code gives every code of the reference.
"""

import argparse
import dataclasses
import datetime
import pathlib
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from image_classifier import WEIGHTS, ConvNet, load, number

from jaxaccel import data, quant, train

CALIBRATION_IMAGES = 512
BATCH_SIZE = 128
EVAL_BATCH_SIZE = 1000
TRAIN_RATE, QAT_RATE = 3e-3, 5e-4
CRASH_COURSE = {"fashion_mnist": 3, "cifar10": 5, "digits": 30}
QAT_EPOCHS = {"fashion_mnist": 2, "cifar10": 3, "digits": 10}
TIMED_CALLS, TIMED_ROUNDS = 200, 5
GCC_FLAGS = "-std=c99 -pedantic -Wall -Wextra -Werror -O3".split()


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dataset",
        choices=["fashion_mnist", "digits", "cifar10"],
        help="that of the weights; default: fashion_mnist, or digits where that "
        "cannot be fetched",
    )
    parser.add_argument(
        "--checkpoint",
        type=pathlib.Path,
        help=f"a folder {WEIGHTS!r} of image_classifier.py; default: the newest below "
        "logs/image_classifier; without one, and with --epochs, weights are trained",
    )
    parser.add_argument(
        "--epochs",
        type=number(int, least=1),
        help="train the weights here, for so many epochs",
    )
    parser.add_argument(
        "--qat-epochs", type=number(int, least=1), help="default: 2; 10 for digits"
    )
    parser.add_argument(
        "--bits", type=int, choices=range(2, 9), default=8, help="of the kernels"
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        help="default: logs/quantize_classifier/DATE-TIME",
    )
    parser.add_argument("--seed", type=number(int, least=0), default=0)
    return parser.parse_args(argv)


# ---------------------------------------------------------------------- the weights


def trained_model(args: argparse.Namespace, dataset: data.NamedDataset) -> ConvNet:
    """The network with the weights of a checkpoint, or trained here."""
    shape, classes = dataset.train.spec["image"].shape, len(dataset.classes)
    model = ConvNet(shape, classes, rngs=nnx.Rngs(args.seed))
    path = args.checkpoint or newest_checkpoint()
    if path is None or (args.epochs and not args.checkpoint):
        epochs = args.epochs or CRASH_COURSE[dataset.name]
        print(f"no checkpoint is used: training for {epochs} epochs")
        return fit(model, args, dataset, epochs, TRAIN_RATE)
    task = train.from_nnx(model, train.classification_loss)
    params, model_state = task.init()
    like = {"params": params, "model_state": model_state}
    try:
        weights = train.restore(path, like)
    except ValueError as error:
        raise SystemExit(
            f"{path} holds no weights for {dataset.name}; name them with --checkpoint "
            f"and --dataset, or train some with --epochs. The reason: {error}"
        ) from error
    print(f"weights: {path}")
    return task.merge(weights["params"], weights["model_state"])


def newest_checkpoint() -> pathlib.Path | None:
    found = pathlib.Path("logs/image_classifier").glob(f"*/*/{WEIGHTS}")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def fit(
    model: Any,
    args: argparse.Namespace,
    dataset: data.NamedDataset,
    epochs: int,
    learning_rate: float,
) -> Any:
    """Trains a network, quantized or not: step and loss are the same."""
    normalize = data.make_normalizer(dataset.mean, dataset.std)
    batch_size = min(BATCH_SIZE, len(dataset.train) // 20)
    plan = data.BatchPlan(len(dataset.train), batch_size, seed=args.seed, epochs=epochs)
    tx = optax.adam(optax.cosine_decay_schedule(learning_rate, len(plan)))

    def preprocess(batch: dict, key: jax.Array) -> dict:
        images = data.random_crop_flip(key, batch["image"], pad=1)
        return {**batch, "image": normalize(images)}

    task = train.from_nnx(model, train.classification_loss)
    params, model_state = task.init()
    key = jax.random.key(args.seed)
    state = train.TrainState.create(params, tx, key=key, model_state=model_state)
    step = train.make_train_step(task.train_loss, tx, preprocess=preprocess)
    with data.DeviceDataset(dataset.train).batches(plan) as batches:
        for rows in batches:
            state, _ = step(state, rows)
    return task.merge(state.params, state.model_state)


# ------------------------------------------------------------------- quantized twice


def layer_rule(args: argparse.Namespace) -> quant.LayerRule:
    """Symmetric kernels with a scale a channel; activations of 8 bits."""
    weight = quant.QuantSpec(
        bits=args.bits, symmetric=True, narrow_range=args.bits > 2, channel_axis=-1
    )
    return quant.LayerRule(weight=weight)


def fold(model: ConvNet) -> Any:
    pairs = [(f"convs/{i}", f"norms/{i}") for i in range(len(model.convs))]
    return quant.fold_batch_norms(model, pairs)


def post_training(
    model: ConvNet, args: argparse.Namespace, calibration: np.ndarray, normalize: Any
) -> Any:
    attached = quant.attach(fold(model), layer_rule(args))
    return quant.calibrate(attached, [normalize(calibration)])


def quantization_aware(
    model: ConvNet, args: argparse.Namespace, dataset: data.NamedDataset
) -> Any:
    # Not folded: batch normalization goes on learning. Its factor of each channel
    # moves into that channel's scale when the network is lowered.
    epochs = args.qat_epochs or QAT_EPOCHS[dataset.name]
    return fit(quant.attach(model, layer_rule(args)), args, dataset, epochs, QAT_RATE)


# ----------------------------------------------------------------------- running it


@dataclasses.dataclass
class Row:
    """A line of the table."""

    scheme: str
    accuracy: float
    parameter_bytes: int
    file_bytes: int | None = None
    seconds: float | None = None
    agreement: float | None = None


def run_integer_network(
    scheme: str,
    model: Any,
    images: np.ndarray,
    labels: np.ndarray,
    calibration: np.ndarray,
    normalize: Callable[[Any], Any],
    folder: pathlib.Path,
) -> list[Row]:
    """Lowers a quantized model, exports it, and runs all of it on the test images."""
    graph = quant.lower_integer(
        lambda x: model(normalize(x)), images[:1], calibration=[calibration]
    )
    codes = in_batches(lambda x: np.asarray(quant.integer_apply(graph, x)), images)

    def row(where: str, found: np.ndarray, size: int | None, seconds: float | None):
        return Row(
            f"{scheme}, {where}",
            float((found.argmax(-1) == labels).mean()),
            graph.nbytes,
            size,
            seconds,
            float((found == codes).mean()),
        )

    rows = [row("integers in JAX", codes, None, None)]
    folder.mkdir(parents=True)
    onnx_path = folder / "network.onnx"
    onnx_path.write_bytes(quant.to_onnx_qdq(graph).SerializeToString())
    found, seconds = run_onnx(onnx_path, images)
    rows.append(row("ONNX Runtime", found, onnx_path.stat().st_size, seconds))
    quant.to_c(graph, folder / "c")
    if shutil.which("gcc"):
        found, size, seconds = run_c(folder / "c", images)
        rows.append(row("C", found, size, seconds))
    else:
        print(f"{folder / 'c'} is not run: there is no gcc")
    return rows


def in_batches(function: Callable[[Any], np.ndarray], images: np.ndarray) -> np.ndarray:
    starts = range(0, len(images), EVAL_BATCH_SIZE)
    parts = [function(images[i : i + EVAL_BATCH_SIZE]) for i in starts]
    return np.concatenate(parts)


def run_onnx(path: pathlib.Path, images: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns outputs, and the seconds that one image takes on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        str(path), options, providers=["CPUExecutionProvider"]
    )
    name = session.get_inputs()[0].name
    found = in_batches(lambda x: np.asarray(session.run(None, {name: x})[0]), images)
    rounds = []
    for _ in range(TIMED_ROUNDS):
        start = time.perf_counter()
        for _ in range(TIMED_CALLS):
            session.run(None, {name: images[:1]})
        rounds.append((time.perf_counter() - start) / TIMED_CALLS)
    return found, min(rounds)


def run_c(folder: pathlib.Path, images: np.ndarray) -> tuple[np.ndarray, int, float]:
    """Compiles and runs it; returns codes, bytes of code and constants, and seconds."""
    program, target = folder / "net", folder / "net.o"
    source, main = folder / "net.c", folder / "main.c"
    subprocess.run(["gcc", *GCC_FLAGS, "-c", source, "-o", target], check=True)
    subprocess.run(["gcc", *GCC_FLAGS, target, main, "-o", program], check=True)
    sizes = subprocess.run(["size", target], capture_output=True, text=True, check=True)
    rounds = []
    for _ in range(TIMED_ROUNDS):
        start = time.perf_counter()
        done = subprocess.run(
            [program], input=images.tobytes(), capture_output=True, check=True
        )
        rounds.append((time.perf_counter() - start) / len(images))
    codes = np.array(done.stdout.split(), np.int64).reshape(len(images), -1)
    return codes, int(sizes.stdout.splitlines()[1].split()[0]), min(rounds)


def run_float(
    model: ConvNet,
    images: np.ndarray,
    labels: np.ndarray,
    normalize: Callable[[Any], Any],
    folder: pathlib.Path,
) -> Row:
    """The same network in float32, folded, in ONNX Runtime."""
    path = folder / "float32.onnx"
    path.write_bytes(float_onnx(model, images.shape[1:]))
    found, seconds = run_onnx(
        path, in_batches(lambda x: np.asarray(normalize(x)), images)
    )
    accuracy = float((found.argmax(-1) == labels).mean())
    kernels = [layer.kernel[...] for layer in (*model.convs, model.head)]
    entries = sum(kernel.size + kernel.shape[-1] for kernel in kernels)
    size = path.stat().st_size
    return Row("float32, ONNX Runtime", accuracy, 4 * entries, size, seconds)


def float_onnx(model: ConvNet, shape: tuple[int, ...]) -> bytes:
    """A floating ONNX model of the network, for comparison."""
    from onnx import TensorProto, helper, numpy_helper

    folded = fold(model)
    nodes, weights = [], []

    def add(kind: str, x: str, *arrays: Any, **attributes: Any) -> str:
        names = [f"w{len(weights) + i}" for i in range(len(arrays))]
        for name, array in zip(names, arrays, strict=True):
            array = np.ascontiguousarray(array, np.float32)
            weights.append(numpy_helper.from_array(array, name))
        output = f"t{len(nodes)}"
        nodes.append(helper.make_node(kind, [x, *names], [output], **attributes))
        return output

    x = add("Transpose", "input", perm=[0, 3, 1, 2])  # ONNX has channels first
    for conv, norm in zip(folded.convs, folded.norms, strict=True):
        kernel = np.asarray(conv.kernel[...]).transpose(3, 2, 0, 1)
        x = add(
            "Conv", x, kernel, norm.bias[...], strides=[2, 2], auto_pad="SAME_UPPER"
        )
        x = add("Relu", x)
    x = add("Flatten", add("Transpose", x, perm=[0, 2, 3, 1]))
    x = add("Gemm", x, folded.head.kernel[...], folded.head.bias[...])
    graph = helper.make_graph(
        nodes,
        "float32",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["n", *shape])],
        [helper.make_tensor_value_info(x, TensorProto.FLOAT, ["n", None])],
        weights,
    )
    opset = [helper.make_opsetid("", 19)]
    model_proto = helper.make_model(graph, opset_imports=opset, ir_version=9)
    return model_proto.SerializeToString()


# ----------------------------------------------------------------------------- main


def print_table(rows: list[Row]) -> None:
    base = rows[0].seconds or 1.0
    cells = [("scheme", "accuracy", "parameters", "file", "faster", "same codes")]
    for row in rows:
        cells.append(
            (
                row.scheme,
                f"{row.accuracy:.2%}",
                f"{row.parameter_bytes:,} B",
                "" if row.file_bytes is None else f"{row.file_bytes:,} B",
                "" if row.seconds is None else f"{base / row.seconds:.2f}x",
                "" if row.agreement is None else f"{row.agreement:.3%}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        first, *rest = (
            text.ljust(w) if i == 0 else text.rjust(w)
            for i, (text, w) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([first, *rest]))


def main(argv: list[str] | None = None) -> list[Row]:
    args = parse_arguments(argv)
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    out = args.out or pathlib.Path("logs/quantize_classifier") / stamp
    dataset = load(args.dataset)
    normalize = data.make_normalizer(dataset.mean, dataset.std)
    test = dataset.test.take(np.arange(len(dataset.test)))
    images, labels = test["image"], test["label"]
    calibration = dataset.train.take(np.arange(CALIBRATION_IMAGES))["image"]
    model = trained_model(args, dataset)
    out.mkdir(parents=True, exist_ok=True)
    rows = [run_float(model, images, labels, normalize, out)]
    schemes = {
        "PTQ": lambda: post_training(model, args, calibration, normalize),
        "QAT": lambda: quantization_aware(model, args, dataset),
    }
    for scheme, make in schemes.items():
        name = f"{scheme} W{args.bits}A8"
        rows += run_integer_network(
            name, make(), images, labels, calibration, normalize, out / scheme.lower()
        )
    print_table(rows)
    print(f"networks: {out}")
    return rows


if __name__ == "__main__":
    main()
