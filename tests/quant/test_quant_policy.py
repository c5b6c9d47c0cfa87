"""Policies: the first rule that fits counts, and one that fits nothing is an error."""

import functools

import numpy as np
import pytest

from jaxaccel import quant
from jaxaccel.quant import LayerRule, QuantSpec

INT4 = quant.INT4_WEIGHT
INT8 = quant.INT8_WEIGHT
PARAMS = {
    "conv": {"kernel": np.ones((3, 3, 2, 4)), "bias": np.ones(4)},
    "head": {"kernel": np.ones((4, 2)), "bias": np.ones(2)},
    "embed": {"embedding": np.ones((5, 4))},
    "norm": {"scale": np.ones(4), "bias": np.ones(4)},
}


def _formats(policy):
    """Returns the bits of each quantized array."""
    found = quant.quantize_params(PARAMS, policy)
    return {
        f"{layer}/{name}": leaf.spec.bits
        for layer, arrays in found.items()
        for name, leaf in arrays.items()
        if isinstance(leaf, quant.QTensor)
    }


def test_by_default_kernels_are_quantized_and_nothing_else():
    found = quant.quantize_params(PARAMS)
    assert found["conv"]["kernel"].spec == found["head"]["kernel"].spec == INT8
    for layer, name in (("conv", "bias"), ("embed", "embedding"), ("norm", "scale")):
        assert found[layer][name] is PARAMS[layer][name]


def test_the_first_rule_that_fits_counts():
    assert _formats({"conv/kernel": INT4, "kernel": INT8}) == {
        "conv/kernel": 4,
        "head/kernel": 8,
    }
    assert _formats({"head": None, "kernel": INT8}) == {"conv/kernel": 8}


def test_patterns_are_regular_expressions_found_anywhere():
    assert _formats({r"^(conv|embed)/(kernel|embedding)$": INT4}) == {
        "conv/kernel": 4,
        "embed/embedding": 4,
    }


def test_one_format_is_for_every_floating_array():
    tree = {"a": np.ones((2, 3)), "b": np.float32(2.0), "steps": np.int32(3)}
    found = quant.quantize_params(tree, QuantSpec(symmetric=True))
    assert isinstance(found["a"], quant.QTensor)
    assert isinstance(found["b"], quant.QTensor)
    assert found["steps"] == np.int32(3)


@pytest.mark.parametrize("function", [quant.quantize_params, quant.fake_quant_params])
def test_a_rule_that_fits_nothing_is_named_with_what_there_is(function):
    with pytest.raises(ValueError, match="'hed' fits nothing.*conv/bias.*head/kernel"):
        function(PARAMS, {"hed": INT8, "kernel": INT8})


def test_a_rule_in_the_shadow_of_another_is_an_error():
    with pytest.raises(ValueError, match="'conv/kernel' fits nothing.*a rule before"):
        _formats({"kernel": INT8, "conv/kernel": INT4})


def test_a_long_list_of_paths_is_cut():
    tree = {f"layer{i:02}": np.ones(2) for i in range(30)}
    with pytest.raises(ValueError, match=r"layer19, \.\.\.$"):
        quant.quantize_params(tree, {"kernel": INT8})


def test_an_empty_tree_says_so():
    with pytest.raises(ValueError, match="no paths at all"):
        quant.quantize_params({}, {"kernel": INT8})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        ({}, ValueError, "the policy holds no rule"),
        ({"(": INT8}, ValueError, r"'\(' is no regular expression"),
        ({"kernel": 8}, TypeError, "rule of 'kernel' must be a QuantSpec or None.*8"),
        (8, TypeError, "a policy is a QuantSpec or a dict of patterns; got 8"),
        ({"kernel": LayerRule()}, TypeError, "must be a QuantSpec"),
    ],
)
def test_what_is_no_policy_is_refused(policy, error, message):
    with pytest.raises(error, match=message):
        quant.quantize_params(PARAMS, policy)


# Rules of layers.


def test_a_layer_rule_defaults_to_eight_bits():
    rule = LayerRule()
    assert rule.weight == INT8 and rule.activation == quant.INT8_ACTIVATION
    observer = rule.make_observer()
    assert observer is not None and observer.spec == quant.INT8_ACTIVATION
    assert LayerRule(activation=None).make_observer() is None


def test_an_observer_takes_its_options_by_partial():
    rule = LayerRule(observer=functools.partial(quant.ema_minmax, decay=0.5))
    observer = rule.make_observer()
    assert observer is not None
    state = observer.init(())
    for top in (4.0, 8.0):
        state = observer.update(state, np.array([0.0, top]))
    assert observer.range(state)[1] == 6.0


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"weight": 8}, TypeError, "weight must be a QuantSpec or None; got 8"),
        ({"activation": "int8"}, TypeError, "activation must be.*got 'int8'"),
        ({"observer": None}, TypeError, "observer must be a function; got None"),
        (
            {"activation": QuantSpec(channel_axis=0)},
            ValueError,
            "one scale, or channel_axis=-1; got channel_axis=0",
        ),
        (
            {"activation": QuantSpec(block_size=4)},
            ValueError,
            "activation must have one scale.*block_size=4",
        ),
        (
            {"activation": QuantSpec(rounding="stochastic")},
            ValueError,
            "activation rounds stochastically",
        ),
        (
            {"weight": QuantSpec(), "learned": True},
            ValueError,
            "learned=True needs symmetric weights",
        ),
        (
            {"weight": None, "learned": True},
            ValueError,
            "learned=True needs symmetric weights.*got None",
        ),
        (
            {"weight": quant.FP8_E4M3, "learned": True},
            ValueError,
            "learned=True needs",
        ),
        (
            {"weight": QuantSpec(symmetric=True, pow2_scale=True), "learned": True},
            ValueError,
            "learned=True needs",
        ),
    ],
)
def test_rules_that_no_layer_can_follow_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        LayerRule(**fields)
