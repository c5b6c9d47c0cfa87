"""Which axes the resolvers find in the parameters of real models."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jaxaccel.transforms import (
    KernelDims,
    centralize_gradients,
    flax_dims,
    module_dims,
    override_dims,
    torch_dims,
    znorm,
)

DENSE = KernelDims((0,), (1,))
CONV = KernelDims((0, 1, 2), (3,))
HEADS_OUT = KernelDims((0,), (1, 2))
HEADS_IN = KernelDims((0, 1), (2,))


def resolved(resolver, params) -> dict[str, Any]:
    """Returns the axes found, by path written with slashes; None is left out."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    found = {
        jax.tree_util.keystr(path, simple=True, separator="/"): resolver(path, leaf)
        for path, leaf in leaves
    }
    return {path: dims for path, dims in found.items() if dims is not None}


def leaf(*shape) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, images, tokens):
        x = nn.Conv(8, (3, 3), name="stem")(images)
        x = nn.Conv(8, (3, 3), feature_group_count=8)(x)
        x = nn.BatchNorm(use_running_average=True)(x)
        x = nn.ConvTranspose(6, (2, 2))(x)
        y = nn.Embed(11, 8)(tokens)
        y = nn.Conv(8, (3,))(y)
        y = nn.MultiHeadDotProductAttention(num_heads=2)(y)
        y = nn.LayerNorm()(y)
        y = nn.RNN(nn.OptimizedLSTMCell(4))(y)
        return nn.Dense(3)(y), x


def test_linen_parameters():
    images, tokens = jnp.zeros((1, 6, 6, 3)), jnp.zeros((1, 5), jnp.int32)
    variables = jax.eval_shape(LinenModel().init, jax.random.key(0), images, tokens)
    found = resolved(flax_dims, variables["params"])
    gates = [
        f"OptimizedLSTMCell_0/{gate}/kernel"
        for gate in ("hf", "hg", "hi", "ho", "if", "ig", "ii", "io")
    ]
    assert found == {
        "stem/kernel": CONV,
        "Conv_0/kernel": CONV,
        "ConvTranspose_0/kernel": CONV,
        "Conv_1/kernel": KernelDims((0, 1), (2,)),
        "MultiHeadDotProductAttention_0/query/kernel": HEADS_OUT,
        "MultiHeadDotProductAttention_0/key/kernel": HEADS_OUT,
        "MultiHeadDotProductAttention_0/value/kernel": HEADS_OUT,
        "MultiHeadDotProductAttention_0/out/kernel": HEADS_IN,
        "Dense_0/kernel": DENSE,
        **dict.fromkeys(gates, DENSE),
    }
    with_collection = resolved(flax_dims, {"params": variables["params"]})
    assert with_collection == {f"params/{path}": dims for path, dims in found.items()}


def test_linen_metadata_boxes_are_looked_through():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
    variables = jax.eval_shape(
        nn.Dense(4, kernel_init=init).init, jax.random.key(0), jnp.ones((1, 3))
    )
    assert list(resolved(flax_dims, variables).values()) == [DENSE]


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.up = nnx.ConvTranspose(8, 4, (3, 3), transpose_kernel=True, rngs=rngs)
        self.convs = nnx.List([nnx.Conv(8, 8, (3,), rngs=rngs)])
        self.layers = nnx.List([nnx.Linear(4, 5, rngs=rngs)])
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.embed = nnx.Embed(7, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.adapter = nnx.LoRA(8, 2, 8, rngs=rngs)
        self.cell = nnx.GRUCell(4, 6, rngs=rngs)
        self.shared = self.layers[0]


NNX_FOUND = {
    "conv/kernel": CONV,
    "up/kernel": CONV,
    "convs/0/kernel": KernelDims((0, 1), (2,)),
    "layers/0/kernel": DENSE,
    "attention/query/kernel": HEADS_OUT,
    "attention/key/kernel": HEADS_OUT,
    "attention/value/kernel": HEADS_OUT,
    "attention/out/kernel": HEADS_IN,
    "cell/dense_i/kernel": DENSE,
    "cell/dense_h/kernel": DENSE,
}


@pytest.fixture(scope="module")
def nnx_model():
    return nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0)))


def test_nnx_states_and_pure_dicts(nnx_model):
    state = nnx.state(nnx_model, nnx.Param)
    boxed = {f"{path}/value": dims for path, dims in NNX_FOUND.items()}
    assert resolved(flax_dims, state) == boxed
    assert resolved(flax_dims, nnx.to_pure_dict(state)) == NNX_FOUND


def test_module_dims_reads_the_transposed_kernel(nnx_model):
    state = nnx.state(nnx_model, nnx.Param)
    expected = NNX_FOUND | {"up/kernel": KernelDims((0, 1, 3), (2,))}
    resolver = module_dims(nnx_model)
    boxed = {f"{path}/value": dims for path, dims in expected.items()}
    assert resolved(resolver, state) == boxed
    assert resolved(resolver, nnx.to_pure_dict(state)) == expected


def test_module_dims_of_general_layers():
    rngs = nnx.Rngs(0)
    general = nnx.LinearGeneral((2, 3), (4, 5), axis=(-2, -1), rngs=rngs)
    batched = nnx.LinearGeneral(4, 5, batch_axis={0: 3}, rngs=rngs)
    for layer, expected in (
        (general, KernelDims((0, 1), (2, 3))),
        (batched, KernelDims((1,), (2,), batch=(0,))),
    ):
        params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
        assert resolved(module_dims(layer), params)["kernel"] == expected


def stacked_linear(inputs, outputs):
    build = nnx.vmap(lambda rngs: nnx.Linear(inputs, outputs, rngs=rngs))
    return build(nnx.Rngs(0).split(3))


def test_module_dims_finds_the_stacked_axis():
    layer = stacked_linear(4, 5)
    params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    expected = KernelDims((1,), (2,), batch=(0,))
    assert resolved(module_dims(layer), params) == {"kernel": expected}
    with pytest.raises(ValueError, match="which axis is stacked is not evident"):
        module_dims(stacked_linear(3, 3))


def test_module_dims_refuses_what_it_does_not_know(nnx_model):
    with pytest.raises(TypeError, match=r"module_dims\(Dense\(...\), \*inputs\)"):
        module_dims(nn.Dense(3))
    with pytest.raises(TypeError, match="nnx.Module or a linen.Module, got dict"):
        module_dims({})
    with pytest.raises(TypeError, match="nothing but the module"):
        module_dims(nnx_model, jnp.ones(3))
    params = {"model": nnx.to_pure_dict(nnx.state(nnx_model, nnx.Param))}
    with pytest.raises(ValueError, match=r"no \['model'\]"):
        resolved(module_dims(nnx_model), params)
    einsum = nnx.Einsum("ab,bc->ac", (3, 4), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="belongs to an nnx.Einsum"):
        resolved(module_dims(einsum), nnx.to_pure_dict(nnx.state(einsum, nnx.Param)))


def test_optimizer_over_an_nnx_model():
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    tx = optax.chain(centralize_gradients(), optax.sgd(1.0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    before = model.kernel[...].sum(0)
    grads = nnx.grad(lambda m: (m(jnp.arange(8.0)) ** 2).sum())(model)
    optimizer.update(model, grads)
    assert jnp.abs(model.kernel[...].sum(0) - before).max() < 1e-4
    assert model.bias is not None and jnp.abs(model.bias[...]).max() > 0.1


AMBIGUOUS = [
    (("fc", "kernel"), (3, 6, 6)),
    (("Dense_0", "kernel"), (3, 6, 6)),
    (("Dense_0", "kernel"), (2, 3, 4, 5)),
    (("linear1", "kernel"), (2, 3, 4, 5)),
    (("query", "kernel"), (2, 16, 4, 4)),
    (("out", "kernel"), (2, 4, 4, 16)),
    (("projection", "kernel"), (12, 64, 4, 16)),
    (("ScanBlock_0", "Conv_0", "kernel"), (3, 3, 4, 8)),
    (("VmapDense_0", "kernel"), (2, 3, 4)),
    (("Einsum_0", "kernel"), (3, 4)),
    (("conv", "kernel"), (2, 3, 3, 3, 4, 8)),
    (("kernel",), (3, 4, 5)),
]


@pytest.mark.parametrize("names,shape", AMBIGUOUS)
def test_ambiguous_kernels_are_refused(names, shape):
    params = leaf(*shape)
    for name in reversed(names):
        params = {name: params}
    with pytest.raises(ValueError) as caught:
        resolved(flax_dims, params)
    message = str(caught.value)
    assert str(shape) in message and f"['{names[-1]}']" in message
    assert "KernelDims(" in message and "override_dims" in message
    for transform in (znorm(), znorm(scope="unit"), centralize_gradients()):
        with pytest.raises(ValueError, match="no layout"):
            transform.init(params)


@pytest.mark.parametrize(
    "names,shape,expected",
    [
        (("Conv_0", "kernel"), (3, 4, 8), KernelDims((0, 1), (2,))),
        (("conv1", "kernel"), (3, 4, 8), KernelDims((0, 1), (2,))),
        (("stem_CONV", "kernel"), (3, 4, 8), KernelDims((0, 1), (2,))),
        (("patches", "kernel"), (32, 32, 3, 8), CONV),
        (("layer", "kernel"), (3, 3, 3, 4, 8), KernelDims((0, 1, 2, 3), (4,))),
        (("query", "bias"), (4, 16), None),
        (("Embed_0", "embedding"), (40, 16), None),
        (("w",), (4, 16), DENSE),
        (("w",), (3, 4, 16), KernelDims((0, 1), (2,))),
        (("cls_token",), (2, 4, 16), None),
        (("adapter", "lora_a"), (4, 16), None),
        (("Dense_0", "kernel"), (4,), None),
        (("ScanBlock_0", "Dense_0", "kernel"), (4, 16), DENSE),
    ],
)
def test_paths_and_ranks_that_decide(names, shape, expected):
    path = tuple(jax.tree_util.DictKey(name) for name in names)
    assert flax_dims(path, leaf(*shape)) == expected


def test_torch_dims_reads_the_rank_alone():
    params = {"weight": leaf(8, 3, 5, 5), "bias": leaf(8), "scalar": leaf()}
    assert resolved(torch_dims, params) == {"weight": KernelDims((1, 2, 3), (0,))}


def test_override_rules_come_first_in_order():
    params = {
        "a": {"kernel": leaf(3, 4)},
        "ab": {"kernel": leaf(3, 4)},
        "c": {"kernel": leaf(3, 4)},
    }
    swapped = KernelDims((1,), (0,))
    dims = override_dims({"^a/": None, "a": swapped})
    assert resolved(dims, params) == {"ab/kernel": swapped, "c/kernel": DENSE}


def test_override_rules_that_find_nothing_are_refused():
    params = {"Dense_0": {"kernel": jnp.ones((4, 4))}}
    inner = override_dims({"misspelt": None})
    for dims in (inner, override_dims({"Dense": DENSE}, inner)):
        with pytest.raises(ValueError, match=r"\['misspelt'\].*Dense_0"):
            znorm(dims=dims).init(params)
    part = {"Dense_0": params["Dense_0"], "Dense_1": optax.MaskedNode()}
    znorm(dims=inner).init(part)


def test_override_rules_are_checked_when_built():
    with pytest.raises(TypeError):
        override_dims({"kernel": ((0,), (1,))})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="not a regular expression"):
        override_dims({"kernel(": None})


def test_kernel_dims_are_checked_when_built():
    with pytest.raises(TypeError):
        KernelDims(0, (1,))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError):
        KernelDims((0,), (1.0,))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="no reduction axis"):
        KernelDims((), (0,))
    with pytest.raises(ValueError, match="twice"):
        KernelDims((0,), (1, 0))


@pytest.mark.parametrize(
    "dims,ndim",
    [
        (KernelDims((0,), (1,)), 3),
        (KernelDims((0,), (1,), (2,)), 2),
        (KernelDims((0,), (2,)), 2),
        (KernelDims((0,), (-2,)), 2),
    ],
)
def test_kernel_dims_must_partition_the_rank(dims, ndim):
    with pytest.raises(ValueError):
        dims.at_rank(ndim)
    params = {"kernel": leaf(*range(4, 4 + ndim))}
    with pytest.raises(ValueError, match=r"znorm, \['kernel'\]"):
        znorm(dims=lambda path, leaf: dims).init(params)


def test_resolvers_are_checked():
    with pytest.raises(TypeError):
        znorm(dims=DENSE)  # pyright: ignore[reportArgumentType]
    tx = znorm(dims=lambda path, leaf: (0, 1))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="must answer KernelDims or None"):
        tx.init({"kernel": leaf(4, 4)})


@pytest.mark.parametrize("transform", [znorm, centralize_gradients])
def test_a_tree_in_which_nothing_would_change_is_refused(transform):
    params = {"embedding": leaf(3, 16), "b1": leaf(16)}
    with pytest.raises(ValueError, match=r"none of the 2.*embedding.*torch_dims"):
        transform().init(params)
    dims = override_dims({"embedding": DENSE})
    transform(dims=dims).init(params)
    optax.masked(transform(), {"embedding": False, "b1": True}).init(params)
