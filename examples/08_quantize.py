"""Makes an integer network of a trained one, and looks at what it costs.

The network is trained as usual. Calibration images tell the ranges of its activations,
its kernels are rounded to 8 bits with a scale for each output channel, and what comes
out computes with integers alone: in JAX, to the bit as in the C code that is written.

    python examples/08_quantize.py
"""

import pathlib
import tempfile

import jax
import numpy as np
import optax
from flax import nnx

from jaxaccel import data, quant, train

digits = data.load_dataset("digits")
normalize = data.make_normalizer(digits.mean, digits.std)


class Net(nnx.Module):
    """A convolution, a maximum pool, and a linear head."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.head = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits."""
        x = nnx.max_pool(nnx.relu(self.conv(x)), (2, 2), strides=(2, 2))
        return self.head(x.reshape(len(x), -1))


# Train it; nothing here knows of quantization.
task = train.from_nnx(Net(nnx.Rngs(0)), train.classification_loss)
tx = optax.adam(3e-3)
params, model_state = task.init()
state = train.TrainState.create(
    params, tx, key=jax.random.key(0), model_state=model_state
)
step = train.make_train_step(
    task.train_loss,
    tx,
    preprocess=lambda batch, key: {**batch, "image": normalize(batch["image"])},
)
plan = data.BatchPlan(len(digits.train), 64, seed=0, epochs=20)
with data.DeviceDataset(digits.train).batches(plan) as batches:
    for rows in batches:
        state, metrics = step(state, rows)
model = task.merge(state.params, state.model_state)

# Quantize it: 8 bits everywhere, ranges of 512 training images.
seen = digits.train.take(np.arange(512))["image"]
attached = quant.attach(model, quant.LayerRule(observer=quant.minmax))
quantized = quant.calibrate(attached, [normalize(seen)])

# Lower it to integers, from the stored bytes to the codes of the logits.
graph = quant.lower_integer(
    lambda images: quantized(normalize(images)), seen[:1], calibration=[seen]
)
print(graph.size_report())

test = digits.test.take(np.arange(len(digits.test)))
images, labels = test["image"], test["label"]
logits = model(normalize(images))
codes = quant.integer_apply(graph, images)
print(f"float32  {(np.asarray(logits).argmax(-1) == labels).mean():.2%}")
print(f"int8     {(np.asarray(codes).argmax(-1) == labels).mean():.2%}")

with tempfile.TemporaryDirectory() as folder:
    written = quant.to_c(graph, folder)
    sizes = {path.name: path.stat().st_size for path in pathlib.Path(written).iterdir()}
    print("C:", ", ".join(sorted(sizes)))
