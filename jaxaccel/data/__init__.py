"""Input pipeline: stores, batch plans, the loader, and what happens to images in jit.

Images travel as uint8 in whole batches; normalization and augmentation run inside
the jitted step.
"""

from jaxaccel._fetch import DatasetUnavailableError
from jaxaccel.data._arrays import ArrayStore
from jaxaccel.data._augment import random_crop_flip
from jaxaccel.data._bits import pack_bits, unpack_bits
from jaxaccel.data._cache import disk_cache, memory_cache
from jaxaccel.data._color import color_jitter
from jaxaccel.data._convert import convert
from jaxaccel.data._crops import random_resized_crop
from jaxaccel.data._device import DeviceBatches, to_device
from jaxaccel.data._epoch import make_epoch_scan
from jaxaccel.data._erase import cutout, random_erasing
from jaxaccel.data._errors import DataCorruptionError
from jaxaccel.data._grain import as_grain
from jaxaccel.data._guards import DataWarning, check_pipeline
from jaxaccel.data._labels import one_hot
from jaxaccel.data._loader import Loader
from jaxaccel.data._mix import cutmix, mixup
from jaxaccel.data._mixture import Mixture, MixturePlan
from jaxaccel.data._named import NamedDataset, load_dataset
from jaxaccel.data._normalize import make_normalizer
from jaxaccel.data._open import open_store
from jaxaccel.data._packing import PackedStore, pack_sequences
from jaxaccel.data._plan import BatchPlan, Plan
from jaxaccel.data._resident import DeviceDataset, ResidentBatches
from jaxaccel.data._sampling import ClassBalancedPlan, WeightedPlan, balanced_weights
from jaxaccel.data._sequences import StreamPlan, WindowStore, windows
from jaxaccel.data._statistics import mean_and_std
from jaxaccel.data._stats import LoaderStats
from jaxaccel.data._store import ColumnSpec, ConcatStore, Store
from jaxaccel.data._verify import VerifyReport, verify

__all__ = (
    "ArrayStore",
    "BatchPlan",
    "ClassBalancedPlan",
    "ColumnSpec",
    "ConcatStore",
    "DataCorruptionError",
    "DataWarning",
    "DatasetUnavailableError",
    "DeviceBatches",
    "DeviceDataset",
    "Loader",
    "LoaderStats",
    "Mixture",
    "MixturePlan",
    "NamedDataset",
    "PackedStore",
    "Plan",
    "ResidentBatches",
    "Store",
    "StreamPlan",
    "VerifyReport",
    "WeightedPlan",
    "WindowStore",
    "as_grain",
    "balanced_weights",
    "check_pipeline",
    "color_jitter",
    "convert",
    "cutmix",
    "cutout",
    "disk_cache",
    "load_dataset",
    "make_epoch_scan",
    "make_normalizer",
    "mean_and_std",
    "memory_cache",
    "mixup",
    "one_hot",
    "open_store",
    "pack_bits",
    "pack_sequences",
    "random_crop_flip",
    "random_erasing",
    "random_resized_crop",
    "to_device",
    "unpack_bits",
    "verify",
    "windows",
)
