"""JPEG, PNG and other encoded images into rows of a uint8 array, in threads."""

import functools
import io
import math
import os
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxaccel.data._errors import DataCorruptionError

# Path, record and byte offset of the image with the given position.
Where = Callable[[int], tuple[Any, int | None, int]]

_CHANNELS = {"RGB": 3, "L": 1}
_KINDS = ("JPEG", "PNG", "GIF", "WEBP", "BMP")
# Pillow's own limit for what may be an attack: 268 MB of RGB.
_MAX_PIXELS = 2**30 // 12
_SHRINKABLE = 64
# What the decoder leaves is so many times larger than the result at least: then the
# resize that follows hides most of what the decoder does differently.
_SPARE = 2


def decode_images(
    blobs: Sequence[Any],
    out: np.ndarray,
    *,
    mode: str,
    image_size: tuple[int, int] | None,
    num_threads: int | None,
    where: Where,
) -> None:
    """Decodes images into the rows of an array.

    The interpreter's lock is free meanwhile, so threads help. The pixels are those
    of the file: an EXIF orientation is not applied, alpha is dropped, of an
    animation the first frame counts, and 16-bit gray loses its lower 8 bits. CMYK,
    palette and gray images are converted.

    With `image_size`, the largest centered box of the wanted aspect ratio is scaled
    to it by area-weighted bilinear interpolation; a JPEG at least four times as large
    is first shrunk by 2, 4 or 8 in the decoder itself, which is faster than decoding
    all of it: photographs then differ from Pillow's resize of the whole image by about
    one level of 255, single pixels by up to 15. The result is the same with simplejpeg
    as without.

    Args:
      blobs: The encoded bytes of each image (bytes, memoryview or uint8 array).
      out: `(len(blobs), height, width, channels)` uint8, C-contiguous, overwritten.
      mode: `"RGB"` or `"L"`.
      image_size: (height, width) of `out`, where images are to be resized; None
        requires that all have that size.
      num_threads: Threads to use; None takes one a core, 8 at most.
      where: Function from the position of an image to its path, record and byte
        offset, for messages.

    Raises:
      DataCorruptionError: If an image is damaged; of several, the first.
      ImportError: If neither Pillow nor simplejpeg can decode a kind of image here.
      ValueError: If an image has another size, and `image_size` is None.
    """

    def work(start: int) -> None:
        for i in range(start, min(start + step, len(blobs))):
            _decode(blobs[i], out[i], mode, image_size is not None, where, i)

    threads = min(num_threads or default_threads(), len(blobs))
    # Several parts a thread, as images differ in cost.
    step = max(1, math.ceil(len(blobs) / (4 * max(threads, 1))))
    starts = range(0, len(blobs), step)
    if threads < 2:
        for start in starts:
            work(start)
        return
    # Made anew, as that costs little beside the decoding: nothing has to be closed,
    # and stores that decode travel to other processes.
    with ThreadPoolExecutor(threads, "jaxaccel-decode") as pool:
        for part in [pool.submit(work, start) for start in starts]:
            part.result()


def probe_image(blob: Any, mode: str) -> tuple[int, int, int]:
    """Reads the size of an encoded image from its header.

    Args:
      blob: The encoded bytes.
      mode: `"RGB"` or `"L"`, the channels that it will be decoded to.

    Returns:
      Height, width and channels.

    Raises:
      ImportError: If neither Pillow nor simplejpeg can read it here.
      ValueError: If it is damaged or no image; the message names no file.
    """
    try:
        return *_probe(blob), _CHANNELS[mode]
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        # Pillow has many kinds of its own.
        raise ValueError(_text(error)) from error


def is_image(blob: Any) -> bool:
    """Whether the first bytes are those of a kind of image that can be decoded."""
    head = bytes(blob[:12])
    starts = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a")
    return head.startswith(starts) or (head[:4] + head[8:] == b"RIFFWEBP")


def default_threads() -> int:
    """One a core that this process may use, 8 at most."""
    affinity = getattr(os, "sched_getaffinity", None)
    return min(8, len(affinity(0)) if affinity else os.cpu_count() or 1)


def _decode(
    blob: Any, row: np.ndarray, mode: str, resize: bool, where: Where, index: int
) -> None:
    try:
        size = _probe(blob)
        if resize:
            _resized(blob, row, mode, size)
        elif size == row.shape[:2]:
            _exact(blob, row, mode)
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        raise DataCorruptionError(
            *where(index), f"the image cannot be decoded: {_text(error)}"
        ) from error
    if not resize and size != row.shape[:2]:
        path, record, offset = where(index)
        raise ValueError(
            f"{path}: images of different sizes: {size[0]}x{size[1]} (record {record}, "
            f"byte offset {offset}), where others have {row.shape[0]}x{row.shape[1]} "
            "(height x width); a column holds one size: pass image_size=(height, width)"
        )


def _probe(blob: Any) -> tuple[int, int]:
    turbo = _turbo(blob)
    if turbo:
        height, width = turbo.decode_jpeg_header(memoryview(blob))[:2]
    else:
        with _opened(blob) as image:
            width, height = image.size
    if height * width > _MAX_PIXELS or height * width == 0:
        raise ValueError(f"its header says {height}x{width} pixels")
    return height, width


def _exact(blob: Any, row: np.ndarray, mode: str) -> None:
    if _decode_turbo(blob, mode, buffer=row) is None:
        with _opened(blob) as image:
            image.draft(mode, image.size)
            row[...] = _pixels(image, mode)


def _resized(blob: Any, row: np.ndarray, mode: str, size: tuple[int, int]) -> None:
    height, width = size
    crop = min(height / row.shape[0], width / row.shape[1])
    # Of small images, the decoders round the size differently.
    shrinks = (8, 4, 2) if min(size) >= _SHRINKABLE else ()
    shrink = next((s for s in shrinks if _SPARE * s <= crop), 1)
    least = {"min_height": -(-height // shrink), "min_width": -(-width // shrink)}
    pixels = _decode_turbo(blob, mode, min_factor=shrink, **least)
    if pixels is None:
        with _opened(blob) as image:
            image.draft(mode, (width // shrink, height // shrink))
            pixels = _pixels(image, mode)
    # The last pixels of a shrunk image may stand for less than the others do.
    extent = height / shrink, width / shrink
    if pixels.shape[:2] != tuple(map(math.ceil, extent)):
        extent = float(pixels.shape[0]), float(pixels.shape[1])
    row[...] = _fitted(pixels, extent, row.shape[0], row.shape[1])


def _fitted(
    pixels: np.ndarray, extent: tuple[float, float], to_height: int, to_width: int
) -> np.ndarray:
    (height, width), channels = extent, pixels.shape[2]
    if (height, width) == (to_height, to_width):
        return pixels
    crop = min(height / to_height, width / to_width)
    top, left = (height - crop * to_height) / 2, (width - crop * to_width) / 2
    image_module = _pillow()
    image = image_module.fromarray(pixels if channels == 3 else pixels[:, :, 0])
    fitted = image.resize(
        (to_width, to_height),
        image_module.Resampling.BILINEAR,
        # Rounding must not put the box a hair outside.
        box=(max(left, 0.0), max(top, 0.0), min(width - left, width), height - top),
    )
    return np.asarray(fitted).reshape(to_height, to_width, channels)


def _decode_turbo(blob: Any, mode: str, **options: Any) -> np.ndarray | None:
    turbo = _turbo(blob)
    if not turbo:
        return None
    data = memoryview(blob)
    # It does not convert these.
    if turbo.decode_jpeg_header(data)[2] in ("CMYK", "YCCK"):
        return None
    colors = "RGB" if mode == "RGB" else "GRAY"
    try:
        return turbo.decode_jpeg(data, colors, **options)
    except ValueError as error:
        # Files in well-known data sets have these, and are displayed all the same;
        # Pillow passes over them, but not over a truncated file.
        if "extraneous bytes" in str(error):
            return None
        raise


def _pixels(image: Any, mode: str) -> np.ndarray:
    if image.mode.startswith("I"):
        # Pillow would saturate 16-bit gray at 255.
        gray = np.asarray(image).astype(np.int64) >> 8
        if gray.min() < 0 or gray.max() > 255:
            raise ValueError(f"images of mode {image.mode} are not supported")
        gray = gray.astype(np.uint8)
        return np.repeat(gray[:, :, None], _CHANNELS[mode], axis=2)
    if image.mode in ("P", "PA") and "transparency" in image.info:
        # The direct way warns that the transparency may be lost.
        image = image.convert("RGBA")
    array = np.asarray(image.convert(mode))
    return array.reshape(*array.shape[:2], _CHANNELS[mode])


def _opened(blob: Any) -> Any:
    return _pillow().open(io.BytesIO(memoryview(blob)), formats=_KINDS)


def _text(error: Exception) -> str:
    # Pillow's messages name the address of the buffer, which differs each time.
    return str(error).split(" <_io.")[0] or type(error).__name__


def _turbo(blob: Any) -> types.ModuleType | None:
    return _simplejpeg() if bytes(blob[:2]) == b"\xff\xd8" else None


@functools.cache
def _simplejpeg() -> types.ModuleType | None:
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def _pillow() -> types.ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "decoding this image needs Pillow: pip install 'jaxaccel[formats]'"
        ) from error
    return Image
