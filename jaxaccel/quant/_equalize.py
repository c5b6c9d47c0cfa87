"""Ranges of channels evened out between layers, with the same function."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxaccel.quant._qparams import is_concrete


def cross_layer_equalize(
    kernels: Sequence[ArrayLike],
    biases: Sequence[ArrayLike | None],
    *,
    depthwise: Sequence[bool] | None = None,
    passes: int = 20,
) -> tuple[list[jax.Array], list[jax.Array | None]]:
    r"""Rescales the channels between layers so that their ranges are alike.

    With the largest magnitudes :math:`a_c` of output channel c of one kernel and
    :math:`b_c` of input channel c of the next, each channel's numbers are divided by
    :math:`r_c = \sqrt{a_c / b_c}` before, and multiplied after. Then one scale for the
    whole kernel loses little. The function stays the same where what lies between is
    positively homogeneous: ReLU, leaky ReLU, pooling, flattening; not ReLU6.

    Args:
      kernels: Those of a chain of layers, of Dense or convolutions (`(..., in, out)`);
        a dense kernel after a convolution may take its flattened (height, width,
        channels). Fold batch normalization first.
      biases: Of the layers; None where there is none.
      depthwise: Whether each is depthwise, `(height, width, 1, channels)`; None for
        no. Channels are then those of the last axis, in and out.
      passes: Times to go over the chain.

    Returns:
      Kernels and biases.

    Raises:
      ValueError: If lengths differ, there are fewer than two layers, the channels of
        two neighbours do not fit, or a bias does not fit its kernel.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import quant
      >>> first, second = np.array([[1.0, 100.0]]), np.array([[4.0], [1.0]])
      >>> (first, second), _ = quant.cross_layer_equalize([first, second], [None, None])
      >>> print(first, second.ravel())
      [[ 2. 10.]] [ 2. 10.]

    References:
      Nagel et al., Data-Free Quantization Through Weight Equalization and Bias
      Correction, 2019, arXiv:1906.04721
    """
    found = [jnp.asarray(kernel, jnp.float32) for kernel in kernels]
    shifts = [None if b is None else jnp.asarray(b, jnp.float32) for b in biases]
    flags = [False] * len(found) if depthwise is None else list(depthwise)
    if len(found) < 2 or not len(found) == len(shifts) == len(flags):
        raise ValueError(
            "kernels, biases and depthwise must be equally long, two layers or more; "
            f"got {len(found)}, {len(shifts)} and {len(flags)}"
        )
    for i, (kernel, bias) in enumerate(zip(found, shifts, strict=True)):
        _check_bias(f"biases[{i}]", bias, kernel.shape)
    for _ in range(passes):
        for i in range(len(found) - 1):
            before = _magnitude(found[i], axis=-1)
            after = _by_input(found[i + 1], len(before), flags[i + 1], i)
            ratio = _ratio(before, jnp.abs(after).max(axis=(0, 2)))
            found[i] = found[i] / ratio.reshape((1,) * (found[i].ndim - 1) + (-1,))
            bias = shifts[i]
            shifts[i] = None if bias is None else bias / ratio
            scaled = after * ratio[None, :, None]
            found[i + 1] = scaled.reshape(found[i + 1].shape)
    return found, shifts


def _magnitude(kernel: jax.Array, axis: int) -> jax.Array:
    return jnp.abs(jnp.moveaxis(kernel, axis, 0).reshape(kernel.shape[axis], -1)).max(1)


def _by_input(kernel: jax.Array, channels: int, depthwise: bool, i: int) -> jax.Array:
    """Returns the kernel as `(rest, input channels, outputs of each)`."""
    if depthwise:
        fits, outputs = kernel.shape[-1] % channels == 0, kernel.shape[-1] // channels
    else:
        fits, outputs = kernel.shape[-2] % channels == 0, kernel.shape[-1]
        # Only the flattened output of a convolution repeats its channels.
        fits = fits and (kernel.shape[-2] == channels or kernel.ndim == 2)
    if not fits:
        raise ValueError(
            f"kernel {i} has {channels} output channels, which do not fit the shape "
            f"{kernel.shape} of kernel {i + 1}"
        )
    return kernel.reshape(-1, channels, max(outputs, 1))


def _ratio(before: jax.Array, after: jax.Array) -> jax.Array:
    # A channel that is all zeros on one side has nothing to even out.
    usable = (before > 0) & (after > 0)
    return jnp.where(usable, jnp.sqrt(before / jnp.where(usable, after, 1.0)), 1.0)


def bias_correction(
    kernel: ArrayLike,
    quantized: ArrayLike,
    bias: ArrayLike | None,
    input_mean: ArrayLike,
) -> jax.Array:
    r"""Returns the bias that makes up for the mean error of a quantized kernel.

    .. math:: b'_o = b_o - \sum_i E[x_i] \, (\hat k_{io} - k_{io})

    summed over the taps of a convolution as well (padding at borders is left out).

    Args:
      kernel: `(..., in, out)`.
      quantized: What its codes stand for, of the same shape.
      bias: `(out,)`, or None for 0.
      input_mean: Mean of each input channel over calibration data: `(in,)`, or
        `(groups * in,)` for a grouped or depthwise convolution.

    Returns:
      float32 `(out,)`.

    Raises:
      ValueError: If shapes do not fit.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import quant
      >>> print(quant.bias_correction(
      ...     np.array([[1.0], [2.0]]), np.array([[1.5], [2.0]]), None,
      ...     np.array([4.0, 7.0])))
      [-2.]

    References:
      Nagel et al., 2019, arXiv:1906.04721
    """
    shape = np.shape(kernel)
    if np.shape(quantized) != shape or len(shape) < 2:
        raise ValueError(
            "kernel and quantized must be of one shape, (..., in, out); got "
            f"{shape} and {np.shape(quantized)}"
        )
    _check_bias("bias", bias, shape)
    width, out = shape[-2:]
    channels = np.size(input_mean)
    groups = max(channels // width, 1)
    if np.shape(input_mean) != (groups * width,) or out % groups:
        raise ValueError(
            f"input_mean must be of shape ({width},), or for the groups of a "
            f"convolution a multiple that divides {out} outputs; got "
            f"{np.shape(input_mean)}"
        )
    wide = [jnp.asarray(x, jnp.float32) for x in (kernel, quantized, input_mean)]
    error = (wide[1] - wide[0]).reshape(-1, width, groups, out // groups).sum(axis=0)
    shift = jnp.einsum("gi,igo->go", wide[2].reshape(groups, width), error).ravel()
    start = jnp.zeros(out) if bias is None else jnp.asarray(bias, jnp.float32)
    return start - shift


def _check_bias(name: str, bias: ArrayLike | None, kernel: tuple[int, ...]) -> None:
    if bias is not None and np.shape(bias) != kernel[-1:]:
        raise ValueError(f"{name} must be of shape {kernel[-1:]}; got {np.shape(bias)}")


def smoothquant_scales(
    activation_max: ArrayLike, kernel: ArrayLike, *, alpha: float = 0.5
) -> jax.Array:
    r"""Returns what moves outliers of activations into the kernel that takes them.

    .. math:: s_j = \max|X_j|^\alpha \,/\, \max|W_j|^{1 - \alpha}

    Divide the activations by it (in the layer before them, a normalization or a dense
    kernel), and multiply the rows of the kernel: the product stays the same.

    Args:
      activation_max: Largest magnitude of each input channel, `(in,)`, not negative.
      kernel: `(..., in, out)`.
      alpha: How much of the difficulty moves, in [0, 1].

    Returns:
      float32 `(in,)`, positive; 1 where a channel is all zeros.

    Raises:
      ValueError: If shapes do not fit, `alpha` is out of range, or a maximum is
        negative.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import quant
      >>> print(quant.smoothquant_scales(
      ...     np.array([100.0, 1.0]), np.array([[1.0], [4.0]])))
      [10.   0.5]

    References:
      Xiao et al., SmoothQuant, 2023, arXiv:2211.10438
    """
    shape = np.shape(kernel)
    if len(shape) < 2 or np.shape(activation_max) != shape[-2:-1]:
        raise ValueError(
            "activation_max must hold one number for each input channel of a kernel "
            f"(..., in, out); got {np.shape(activation_max)} and {shape}"
        )
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be from 0 to 1; got {alpha}")
    largest = jnp.asarray(activation_max, jnp.float32)
    if is_concrete(largest) and (np.asarray(largest) < 0).any():
        raise ValueError(f"activation_max must not be negative; got {largest.min()}")
    weights = _magnitude(jnp.asarray(kernel, jnp.float32), axis=-2)
    usable = (largest > 0) & (weights > 0)
    scales = largest ** np.float32(alpha) / jnp.where(usable, weights, 1.0) ** (
        np.float32(1 - alpha)
    )
    return jnp.where(usable, scales, 1.0)
