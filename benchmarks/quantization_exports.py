"""What runs the exported networks: ONNX Runtime on one thread, and compiled C."""

import pathlib
import shutil
import subprocess
from typing import Any

import numpy as np
from quantization_networks import ConvNet, chain


def float_onnx(folded: ConvNet, image_shape: tuple[int, ...]) -> Any:
    """The folded network as a floating ONNX model, for what int8 is compared with."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    kernels, biases = chain(folded)
    nodes, weights = [], []

    def store(name: str, value: Any) -> str:
        array = np.asarray(value, np.float32)
        weights.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def node(kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"t{len(nodes)}"
        nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    # ONNX computes channels first; dense kernels expect them last.
    x = node("Transpose", "input", perm=[0, 3, 1, 2])
    convs = list(folded.convs)
    for i, conv in enumerate(convs):
        kernel = np.asarray(kernels[i][...]).transpose(3, 2, 0, 1)
        strides = np.broadcast_to(conv.strides, 2).tolist()
        x = node(
            "Conv",
            x,
            store(f"k{i}", kernel),
            store(f"b{i}", biases[i][...]),
            strides=strides,
            auto_pad="SAME_UPPER",
        )
        x = node("Relu", x)
        if folded.pooled[i]:
            x = node("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = node("Flatten", node("Transpose", x, perm=[0, 2, 3, 1]))
    for i in range(len(convs), len(kernels)):
        if i > len(convs):
            x = node("Relu", x)
        x = node("Gemm", x, store(f"k{i}", kernels[i][...]), store(f"b{i}", biases[i]))
    classes = kernels[-1].shape[-1]
    graph = helper.make_graph(
        nodes,
        "network",
        [
            helper.make_tensor_value_info(
                "input", TensorProto.FLOAT, ["n", *image_shape]
            )
        ],
        [helper.make_tensor_value_info(x, TensorProto.FLOAT, ["n", classes])],
        weights,
    )
    opset = [helper.make_opsetid("", 19)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=9)
    onnx.checker.check_model(model)
    return model


def session(model: Any) -> Any:
    """An ONNX Runtime session on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run_onnx(model: Any, images: np.ndarray, batch: int = 500) -> np.ndarray:
    runner = session(model)
    name = runner.get_inputs()[0].name
    parts = [
        runner.run(None, {name: images[i : i + batch]})[0]
        for i in range(0, len(images), batch)
    ]
    return np.concatenate(parts)


def has_gcc() -> bool:
    return shutil.which("gcc") is not None


def compile_c(folder: pathlib.Path) -> pathlib.Path:
    """Compiles the three files of `to_c`, warnings being errors."""
    program = folder / "net"
    flags = "-std=c99 -pedantic -Wall -Wextra -Werror -O3".split()
    sources = [folder / "net.c", folder / "main.c"]
    subprocess.run(["gcc", *flags, *map(str, sources), "-o", str(program)], check=True)
    return program


def run_c(program: pathlib.Path, codes: np.ndarray) -> np.ndarray:
    """Output codes of images from the standard input, a line each."""
    done = subprocess.run(
        [str(program)], input=codes.tobytes(), capture_output=True, check=True
    )
    flat = np.array(done.stdout.split(), np.int64)
    return flat.reshape(len(codes), -1)


def text_bytes(folder: pathlib.Path) -> int:
    """Code and constants of the compiled network, without its `main`."""
    target = folder / "net.o"
    subprocess.run(
        ["gcc", "-std=c99", "-Os", "-c", str(folder / "net.c"), "-o", str(target)],
        check=True,
    )
    done = subprocess.run(
        ["size", str(target)], capture_output=True, text=True, check=True
    )
    return int(done.stdout.splitlines()[1].split()[0])
