"""Input pipeline: stores, batch plans, the loader, and what happens to images in jit.

Images travel as uint8 in whole batches; normalization and augmentation run inside
the jitted step.
"""

from jaxaccel._fetch import DatasetUnavailableError
from jaxaccel.data._arrays import ArrayStore
from jaxaccel.data._augment import random_crop_flip
from jaxaccel.data._device import DeviceBatches, to_device
from jaxaccel.data._errors import DataCorruptionError
from jaxaccel.data._loader import Loader, LoaderStats
from jaxaccel.data._named import NamedDataset, load_dataset
from jaxaccel.data._normalize import make_normalizer
from jaxaccel.data._open import open_store
from jaxaccel.data._plan import BatchPlan, Plan
from jaxaccel.data._resident import DeviceDataset, ResidentBatches
from jaxaccel.data._statistics import mean_and_std
from jaxaccel.data._store import ColumnSpec, ConcatStore, Store

__all__ = (
    "ArrayStore",
    "BatchPlan",
    "ColumnSpec",
    "ConcatStore",
    "DataCorruptionError",
    "DatasetUnavailableError",
    "DeviceBatches",
    "DeviceDataset",
    "Loader",
    "LoaderStats",
    "NamedDataset",
    "Plan",
    "ResidentBatches",
    "Store",
    "load_dataset",
    "make_normalizer",
    "mean_and_std",
    "open_store",
    "random_crop_flip",
    "to_device",
)
