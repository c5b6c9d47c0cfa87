"""Resolvers that read Linen modules and Haiku names; reports of what they found."""

import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxaccel.transforms import (
    KernelDims,
    centralize_gradients,
    describe_dims,
    flax_dims,
    haiku_dims,
    module_dims,
    override_dims,
    torch_dims,
    znorm,
)

KEY = jax.random.key(0)
X = jax.ShapeDtypeStruct((2, 5, 6), jnp.float32)
NOT_MAPPED: Any = {"in_axes": None}


def axes_by_path(resolver, params) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    found = {
        jax.tree_util.keystr(path, simple=True, separator="/"): resolver(path, leaf)
        for path, leaf in leaves
    }
    return {path: dims for path, dims in found.items() if dims is not None}


def read(module, *inputs, **kwargs) -> dict[str, Any]:
    """Returns the axes that module_dims reads, for the module's own parameters."""
    init = jax.eval_shape(lambda key, x: module.init(key, x, **kwargs), KEY, *inputs)
    return axes_by_path(module_dims(module, *inputs, **kwargs), init["params"])


class Block(nn.Module):
    width: int = 6

    @nn.compact
    def __call__(self, x, _=None):
        x = nn.Dense(self.width)(x)
        x = nn.MultiHeadDotProductAttention(num_heads=2)(x)
        x = nn.DenseGeneral((2, 3))(x)
        return nn.DenseGeneral(self.width, axis=(-2, -1))(x), None


BLOCK = {
    "Dense_0/kernel": KernelDims((0,), (1,)),
    "DenseGeneral_0/kernel": KernelDims((0,), (1, 2)),
    "DenseGeneral_1/kernel": KernelDims((0, 1), (2,)),
    "MultiHeadDotProductAttention_0/query/kernel": KernelDims((0,), (1, 2)),
    "MultiHeadDotProductAttention_0/key/kernel": KernelDims((0,), (1, 2)),
    "MultiHeadDotProductAttention_0/value/kernel": KernelDims((0,), (1, 2)),
    "MultiHeadDotProductAttention_0/out/kernel": KernelDims((0, 1), (2,)),
}


def test_layers_of_a_linen_module():
    assert read(Block(), X) == BLOCK


class Stacked(nn.Module):
    """As many layers as features, so that no shape says which axis is stacked."""

    axis: int
    lift: str = "scan"
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block) if self.remat else Block
        options: Any = {
            "variable_axes": {"params": self.axis},
            "split_rngs": {"params": True},
        }
        if self.lift == "scan":
            scanned = nn.scan(block, length=6, **options)
            return scanned(name="layers")(x, None)[0]
        mapped = nn.vmap(block, axis_size=6, **options, **NOT_MAPPED)
        return mapped(name="layers")(x)[0]


@pytest.mark.parametrize("lift", ["scan", "vmap"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_lifted_layers_say_where_they_are_stacked(lift, axis):
    expected = {f"layers/{path}": dims.stacked(axis) for path, dims in BLOCK.items()}
    assert read(Stacked(axis, lift), X) == expected
    dense = expected["layers/Dense_0/kernel"]
    assert dense.batch == (axis % 3,)


def test_lifted_layers_inside_others():
    assert read(Stacked(0, remat=True), X) == read(Stacked(0), X)

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            twice = nn.vmap(
                Stacked,
                axis_size=6,
                variable_axes={"params": 1},
                split_rngs={"params": True},
                **NOT_MAPPED,
            )
            return twice(0, name="outer")(x)

    found = read(Twice(), X)["outer/layers/Dense_0/kernel"]
    assert found == KernelDims((2,), (3,), batch=(0, 1))


def test_stacked_dense_is_centralized_layer_by_layer(rng):
    model = Stacked(0)
    params: Any = model.init(KEY, jnp.ones((2, 5, 6)))
    grads = jax.tree.map(
        lambda p: jnp.asarray(rng.normal(1, 1, p.shape), jnp.float32), params
    )
    tx = centralize_gradients(dims=module_dims(model, X))
    updates: Any = tx.update(grads, tx.init(params))[0]
    kernel = np.asarray(grads["params"]["layers"]["Dense_0"]["kernel"], np.float64)
    actual = updates["params"]["layers"]["Dense_0"]["kernel"]
    expected = kernel - kernel.mean(1, keepdims=True)
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=1e-6)


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(6, (3,), feature_group_count=6)(x)
        x = nn.ConvTranspose(4, (3,))(x)
        x = nn.ConvTranspose(4, (3,), transpose_kernel=True, name="up")(x)
        x = nn.ConvLocal(3, (2,))(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.RNN(nn.OptimizedLSTMCell(4))(x) if train else x


def test_convolutions_and_flags():
    found = read(Convolutions(), X, train=True)
    assert found["OptimizedLSTMCell_0/hf/kernel"] == KernelDims((0,), (1,))
    assert {path: d for path, d in found.items() if "LSTM" not in path} == {
        "Conv_0/kernel": KernelDims((0, 1), (2,)),
        "ConvTranspose_0/kernel": KernelDims((0, 1), (2,)),
        "up/kernel": KernelDims((0, 2), (1,)),
        "ConvLocal_0/kernel": KernelDims((1,), (0, 2)),
    }
    # A flag may be given by position too: it is no array to trace.
    assert module_dims(Convolutions(), X, False)


def test_batch_dims_of_a_general_layer():
    layer = nn.DenseGeneral(4, axis=-1, batch_dims=(0,))
    assert read(layer, X) == {"kernel": KernelDims((1,), (2,), batch=(0,))}


def test_boxes_of_the_model_itself_and_shared_initializers():
    boxed = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
    layer = nn.Dense(4, kernel_init=boxed)
    variables = jax.eval_shape(layer.init, KEY, X)
    resolver = module_dims(layer, X)
    assert list(axes_by_path(resolver, variables).values()) == [KernelDims((0,), (1,))]
    assert layer.kernel_init is boxed


def test_what_a_linen_module_cannot_tell():
    class Product(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Einsum((6, 3), "...a,ab->...b")(x)

    class Own(nn.Module):
        kernel_init: Any = nn.initializers.ones

        @nn.compact
        def __call__(self, x):
            return x * self.param("kernel", self.kernel_init, (2, 5, 6))

    for module, reason in (
        (Product(), r"\['Einsum_0'\].*belongs to a linen.Einsum.*override_dims"),
        (Own(), r"\['kernel'\].*linen Own, which module_dims does not know"),
    ):
        with pytest.raises(ValueError, match=reason):
            read(module, X)
    with pytest.raises(ValueError, match=r"no \['other'\]\['kernel'\]"):
        axes_by_path(module_dims(Block(), X), {"other": {"kernel": jnp.ones((2, 2))}})


HAIKU = [
    ("linear", (4, 5), KernelDims((0,), (1,))),
    ("mlp/~/linear_0", (4, 5), KernelDims((0,), (1,))),
    ("conv1_d", (3, 4, 5), KernelDims((0, 1), (2,))),
    ("net/~/conv2_d_1", (3, 3, 4, 5), KernelDims((0, 1, 2), (3,))),
    ("depthwise_conv2_d", (3, 3, 1, 8), KernelDims((0, 1, 2), (3,))),
    ("conv3_d", (3, 3, 3, 4, 5), KernelDims((0, 1, 2, 3), (4,))),
    ("conv2_d_transpose", (3, 3, 5, 4), KernelDims((0, 1, 3), (2,))),
    (
        "__layer_stack_no_per_layer/linear",
        (6, 4, 5),
        KernelDims((1,), (2,), batch=(0,)),
    ),
    (
        "__layer_stack_no_per_layer/conv2_d",
        (6, 3, 3, 4, 5),
        KernelDims((1, 2, 3), (4,), batch=(0,)),
    ),
]


@pytest.mark.parametrize("module,shape,expected", HAIKU, ids=lambda part: str(part))
def test_haiku_parameters(module, shape, expected):
    params = {
        module: {"w": jnp.zeros(shape), "b": jnp.zeros(shape[-1:])},
        "embed": {"embeddings": jnp.zeros((7, 4))},
        "layer_norm": {"scale": jnp.zeros((2, 4)), "offset": jnp.zeros(4)},
    }
    assert list(axes_by_path(haiku_dims, params).values()) == [expected]


@pytest.mark.parametrize(
    "module,shape", [("linear", (6, 4, 5)), ("conv2_d", (6, 3, 3, 3, 4, 5))]
)
def test_ambiguous_haiku_parameters_are_refused(module, shape):
    with pytest.raises(ValueError, match=rf"\['{module}'\]\['w'\].*override_dims"):
        axes_by_path(haiku_dims, {module: {"w": jnp.zeros(shape)}})


UNNAMED: Any = {"w1": jnp.eye(4), "deep": [jnp.ones((2, 3, 8))], "b": jnp.ones((4, 4))}


@pytest.mark.parametrize("build", [znorm, centralize_gradients])
def test_leaves_that_nothing_speaks_for_are_reported(build):
    with pytest.warns(UserWarning, match="their last axis is taken") as caught:
        build().init(UNNAMED)
    message = str(caught[0].message)
    assert len(caught) == 1
    assert "['w1']" in message and "['deep'][0]" in message and "['b']" not in message
    for remedy in ("override_dims", "haiku_dims", "torch_dims", "describe_dims"):
        assert remedy in message


def test_the_report_is_of_what_would_change_alone():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mask = {"w1": False, "deep": [False], "b": True}
        optax.masked(znorm(), mask).init(UNNAMED)
        said = override_dims({"w1": KernelDims((0,), (1,)), "deep": None})
        znorm(dims=said).init(UNNAMED)
        znorm(dims=torch_dims).init(UNNAMED)
        znorm().init({"Dense_0": {"kernel": jnp.eye(4)}, "tiny": jnp.ones((2, 2))})


def test_unnamed_leaves_take_the_last_axis(rng):
    grads = {"w": jnp.asarray(rng.normal(1, 1, (3, 4, 5)), jnp.float32)}
    updates: Any = centralize_gradients().update(grads, optax.EmptyState())[0]
    exact = np.asarray(grads["w"], np.float64)
    exact -= exact.mean((0, 1))
    np.testing.assert_allclose(np.asarray(updates["w"]), exact, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="no layout"):
        flax_dims(
            tuple(map(jax.tree_util.DictKey, ("ScanBlock_0", "w"))), jnp.ones((3, 4, 5))
        )


def test_stacking_and_unstacking_undo_each_other():
    dims = KernelDims((-2,), (-1,), rule="a")
    for axis in (-3, -1, 0, 1, 2):
        stacked = dims.stacked(axis)
        assert stacked.batch == (axis % 3,) and stacked.rule == "a"
        assert stacked.unstacked(axis) == dims.at_rank(2)
        with pytest.raises(ValueError, match="no batch axis"):
            stacked.unstacked(axis + 1 if axis < 2 else 0)
    with pytest.raises(ValueError, match="no new one can be at 3"):
        dims.stacked(3)


def test_the_table_says_which_rule_each_leaf_got():
    params = {
        "Dense_0": {"kernel": jnp.zeros((3, 4)), "bias": jnp.zeros(4)},
        "blocks": {"kernel": jnp.zeros((6, 6, 6))},
        "mine": jnp.zeros((4, 5)),
        "up": {"kernel": jnp.zeros((3, 3, 4, 5))},
    }
    dims = override_dims({"^up/": KernelDims((0, 1, 3), (2,))})
    rows = {line.split()[0]: line for line in describe_dims(params, dims).splitlines()}
    assert list(rows) == [
        *("leaf", "Dense_0/bias", "Dense_0/kernel"),
        *("blocks/kernel", "mine", "up/kernel"),
    ]
    assert rows["Dense_0/bias"].endswith("-")
    assert rows["Dense_0/kernel"].endswith("dense (in, out)")
    assert "error" in rows["blocks/kernel"]
    assert rows["mine"].endswith("assumed: last axis is output")
    assert rows["up/kernel"].endswith("override '^up/'")
    assert "(0, 1, 3)" in rows["up/kernel"] and "(2,)" in rows["up/kernel"]
    read_off = describe_dims(
        jax.eval_shape(Stacked(0).init, KEY, X)["params"], module_dims(Stacked(0), X)
    )
    assert "linen Dense, stacked" in read_off
