"""Reads a folder of PNGs, converts it to an Arrow file once, and trains from that.

`open_store` reads many formats through one interface, `convert` gets from any of them
to any other. A folder of images is decoded on every read; an Arrow file without
compression is memory-mapped, so that a batch is a copy of bytes. The pixels are the
same, and a checksum beside the file guards them.

    python examples/06_read_any_format.py
"""

import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from PIL import Image

from jaxaccel import data, train

digits = data.load_dataset("digits")
normalize = data.make_normalizer(digits.mean, digits.std)


def write_pngs(folder: Path) -> None:
    examples = digits.train.take(range(len(digits.train)))
    for number, label in enumerate(examples["label"]):
        path = folder / str(label) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(examples["image"][number, :, :, 0]).save(path)


def same_pixels(store: data.Store) -> bool:
    # A folder is read class by class, in the order of the names.
    order = np.argsort(digits.train.columns["label"], kind="stable")
    rows = np.arange(len(store))
    return (store.take(rows)["image"] == digits.train.take(order)["image"]).all()


def preprocess(batch, key):
    return {**batch, "image": normalize(batch["image"])}


def accuracy_from(store: data.Store) -> float:
    task = train.from_nnx(
        nnx.Linear(64, 10, rngs=nnx.Rngs(0)),
        train.classification_loss,
        inputs=lambda batch: batch["image"].reshape(-1, 64),
    )
    tx = optax.adam(1e-2)
    params, model_state = task.init()
    key = jax.random.key(0)
    state = train.TrainState.create(params, tx, key=key, model_state=model_state)
    step = train.make_train_step(task.train_loss, tx, preprocess=preprocess)
    plan = data.BatchPlan(len(store), 64, seed=0, epochs=5)
    with data.to_device(data.Loader(store, plan)) as batches:
        for batch in batches:
            state, _ = step(state, batch)
    eval_step = train.make_eval_step(task.eval_loss, preprocess=preprocess)
    return train.evaluate(eval_step, state, digits.test.scan(120))["accuracy"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_pngs(folder / "pngs")
        pngs = data.open_store(folder / "pngs", image_mode="L")
        arrow = data.convert(pngs, folder / "train.arrow", progress=False)
        report = data.verify(folder / "train.arrow", progress=False)

        for store in (pngs, arrow):
            print(f"{store}, pixels as they were: {same_pixels(store)}")
        compared = ", ".join(set(report.files.values()))
        print(f"{report.examples} examples compared with their {compared}")
        print(f"test accuracy {accuracy_from(arrow):.1%}")
        pngs.close()
        arrow.close()
