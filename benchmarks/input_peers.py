"""The pipelines that `input_pipeline.py --part peers` compares."""

import argparse
import contextlib
import functools
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np

from jaxaccel.data import BatchPlan, Loader, make_normalizer, open_store, to_device
from jaxaccel.records import Headline, Record, interleave, paired_ratio

MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)
STD = np.array([0.2470, 0.2435, 0.2616], np.float32)
OURS, READY = "jaxaccel, uint8", "jaxaccel, normalized on the device"
ITEMS = "torch, 2 workers, ToTensor + Normalize"
TORCH_BATCHES = "torch, uint8 by __getitems__"
GRAIN, PLAIN = "Grain, items, float32", "NumPy X[idx], uint8"
# (uint8, normalized) of ours against torch's items.
BOUNDS = {False: (6.0, 4.0), True: (4.0, 1.3)}


class Images:
    """A map-style data set for torch, of memory-mapped files."""

    def __init__(self, folder: str, as_float: bool):
        self.folder, self.as_float = folder, as_float
        self._open()

    def _open(self):
        self.images = np.load(f"{self.folder}/image.npy", mmap_mode="r")
        self.labels = np.load(f"{self.folder}/label.npy", mmap_mode="r")

    def __getstate__(self):
        return {"folder": self.folder, "as_float": self.as_float}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._open()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = np.array(self.images[index])
        return self.convert(image), int(self.labels[index])

    def convert(self, image):
        """What torchvision's ToTensor and Normalize do, if they are wanted."""
        import torch  # type: ignore[import-not-found]

        image = torch.from_numpy(image)
        if not self.as_float:
            return image
        image = image.permute(2, 0, 1).to(torch.float32).div(255)
        mean, std = _torch_statistics()
        return image.sub_(mean).div_(std)


class Batches(Images):
    """The same, but torch hands over all indices of a batch at once."""

    def __getitems__(self, indices):
        import torch  # type: ignore[import-not-found]

        rows = np.asarray(indices)
        return torch.from_numpy(self.images[rows]), torch.from_numpy(self.labels[rows])


@functools.lru_cache
def _torch_statistics():
    import torch  # type: ignore[import-not-found]

    return tuple(torch.from_numpy(x.copy()).reshape(3, 1, 1) for x in (MEAN, STD))


def as_is(batch: Any) -> Any:
    """What torch's collate function is where the data set makes the batches."""
    return batch


def measure(options: argparse.Namespace) -> Record:
    size = 224 if options.large else 32
    examples = options.examples or (1024 if options.large else 20_000)
    batch_size = options.batch_size or (64 if options.large else 256)
    batches = options.batches or (8 if options.large else 24)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        rng = np.random.default_rng(0)
        images = rng.integers(256, size=(examples, size, size, 3), dtype=np.uint8)
        np.save(f"{folder}/image.npy", images)
        np.save(f"{folder}/label.npy", rng.integers(10, size=examples, dtype=np.uint8))
        contenders = {
            name: several(batch, batches)
            for name, batch in pipelines(Path(folder), batch_size, stack).items()
        }
        times = interleave(contenders, rounds=options.rounds)
    count = batches * batch_size
    rounds = {name: [1e6 * t / count for t in values] for name, values in times.items()}
    sizes = {"size": size, "examples": examples, "batch_size": batch_size}
    return describe(options, rounds, {**sizes, "batches": batches})


def several(iterator: Iterator[Any], batches: int) -> Callable[[], Any]:
    def run():
        for _ in range(batches):
            batch = jax.block_until_ready(next(iterator))
        return batch

    return run


def pipelines(
    folder: Path, batch_size: int, stack: contextlib.ExitStack
) -> dict[str, Iterator[Any]]:
    """Endless iterators over batches that are on the device."""
    images, labels = (
        np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("image", "label")
    )
    store = open_store(folder)
    plan = BatchPlan(len(store), batch_size)
    normalize = jax.jit(make_normalizer(MEAN, STD))

    def ours():
        return stack.enter_context(to_device(Loader(store, plan)))

    def normalized():
        for batch in ours():
            yield batch | {"image": normalize(batch["image"])}

    def plain():
        step = 0
        while True:
            rows = plan.indices(step)
            yield jax.device_put((images[rows], labels[rows]))
            step += 1

    found = {
        OURS: iter(ours()),
        READY: normalized(),
        PLAIN: plain(),
        GRAIN: put(grain_items(images, labels, batch_size)),
    }
    if importlib.util.find_spec("torch") is None:
        return found
    items, batches = Images(str(folder), True), Batches(str(folder), False)
    return found | {
        ITEMS: put(torch_loader(items, batch_size, workers=2)),
        "torch, no worker, ToTensor + Normalize": put(torch_loader(items, batch_size)),
        "torch, no worker, uint8 items": put(
            torch_loader(Images(str(folder), False), batch_size)
        ),
        TORCH_BATCHES: put(torch_loader(batches, batch_size, collate_fn=as_is)),
    }


def put(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        yield jax.device_put(jax.tree.map(np.asarray, batch))


def torch_loader(dataset: Images, batch_size: int, workers: int = 0, **options):
    from torch.utils.data import DataLoader  # type: ignore[import-not-found]

    if workers:
        # A fork of a process that runs jax's threads may hang.
        options |= {"multiprocessing_context": "spawn", "persistent_workers": True}
    loader = DataLoader(
        dataset,  # type: ignore
        batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        **options,
    )
    while True:
        yield from loader


def grain_items(images, labels, batch_size):
    def example(index):
        image = (images[index].astype(np.float32) / 255 - MEAN) / STD
        return {"image": image, "label": labels[index]}

    dataset = (
        grain.MapDataset.source(range(len(images)))
        .seed(0)
        .shuffle()
        .repeat()
        .map(example)
        .batch(batch_size)
    )
    return iter(dataset.to_iter_dataset(grain.ReadOptions(0, 0)))


def describe(options, rounds, parameters) -> Record:
    shape = "{batch_size}x{size}x{size}x3".format(**parameters)
    bounds = dict(zip((OURS, READY), BOUNDS[options.large], strict=True))
    figures, held = {}, []
    for name, bound in bounds.items():
        if ITEMS not in rounds:
            figures["torch"] = "not installed: its rows were not measured"
            break
        ratio = paired_ratio(rounds[ITEMS], rounds[name])
        held.append(ratio.median >= bound)
        figures[f"bound: {ITEMS} / {name}"] = (
            f"{ratio} of at least {bound:g}x: {'holds' if held[-1] else 'BROKEN'}"
        )
    peers = [name for name in rounds if name not in bounds]
    return Record.create(
        f"input_pipeline_peers_{parameters['size']}",
        f"A batch of {shape} is on the device sooner than with other loaders",
        verdict="helps" if held and all(held) else "no evidence",
        parameters={**parameters, "rounds": options.rounds},
        unit="us an image",
        rounds=rounds,
        ratios=[f"{peer} / {name}" for name in bounds for peer in peers],
        figures=figures,
        headline=[
            Headline(f"Sooner on the device, {shape}: {what}", ITEMS, f"{ITEMS} / {n}")
            for what, n in (("uint8", OURS), ("normalized there", READY))
            if ITEMS in rounds
        ],
    )
