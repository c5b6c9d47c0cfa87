"""Encoded images against Pillow's own decoding, and damaged ones."""

import io
import sys
import threading
from typing import Any

import numpy as np
import PIL.Image
import pytest

from jaxaccel.data import DataCorruptionError
from jaxaccel.data import _decode as decode
from jaxaccel.data._decode import decode_images, is_image, probe_image


@pytest.fixture(scope="module")
def photo():
    """Something smooth, as JPEG expects, 80 x 130."""
    rows, columns = np.mgrid[:80, :130]
    channels = [2 * rows, columns, 90 + 60 * np.sin(rows / 9) * np.cos(columns / 7)]
    return PIL.Image.fromarray(np.stack(channels, -1).astype(np.uint8))


@pytest.fixture(params=["simplejpeg", "pillow"])
def decoder(request, monkeypatch):
    if request.param == "pillow":
        monkeypatch.setattr(decode, "_simplejpeg", lambda: None)
    else:
        pytest.importorskip("simplejpeg")


def encode(image, kind="JPEG", **options):
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def where(i):
    return "photos.tar", 10 + i, 100 * i


def run(blobs, shape, mode="RGB", resize=False, threads=1):
    out = np.zeros((len(blobs), *shape), np.uint8)
    size = shape[:2] if resize else None
    decode_images(
        blobs, out, mode=mode, image_size=size, num_threads=threads, where=where
    )
    return out


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("source", ["RGB", "L", "CMYK"])
def test_jpeg_pixels_are_pillows(photo, source, mode):
    blob = encode(photo.convert(source), quality=90)
    opened = PIL.Image.open(io.BytesIO(blob))
    if (source, mode) == ("RGB", "L"):
        # The luma that the file holds, not one computed from rounded RGB.
        opened.draft("L", opened.size)
    expected = np.asarray(opened.convert(mode)).reshape(80, 130, -1)
    assert probe_image(blob, mode) == expected.shape
    np.testing.assert_array_equal(run([blob], expected.shape, mode)[0], expected)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("source", ["RGB", "RGBA", "L", "LA", "P", "1"])
def test_png_pixels(photo, source, mode):
    image = photo.convert(source)
    if source == "RGBA":
        image.putalpha(7)
    expected = np.asarray(image.convert(mode)).reshape(80, 130, -1)
    blob = encode(image, "PNG")
    assert is_image(blob)
    np.testing.assert_array_equal(run([blob], expected.shape, mode)[0], expected)


def test_png_palette_with_transparency(photo):
    image = photo.convert("P")
    blob = encode(image, "PNG", transparency=bytes(range(256)))
    expected = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(run([blob], expected.shape)[0], expected)


def test_png_of_16_bits_keeps_the_upper_ones(rng):
    gray = rng.integers(0, 2**16, (6, 5)).astype(np.uint16)
    blob = encode(PIL.Image.fromarray(gray), "PNG")
    np.testing.assert_array_equal(run([blob], (6, 5, 1), "L")[0, ..., 0], gray >> 8)
    rgb = run([blob], (6, 5, 3))[0]
    np.testing.assert_array_equal(rgb, np.repeat((gray >> 8)[..., None], 3, -1))


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_of_an_animation_the_first_frame_counts(kind):
    frames = [PIL.Image.new("RGB", (4, 4), color) for color in ("white", "black")]
    options = {"lossless": True} if kind == "WEBP" else {}
    blob = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert is_image(blob)
    assert run([blob], (4, 4, 3)).min() == 255


@pytest.mark.usefixtures("decoder")
def test_exif_orientation_is_not_applied(photo):
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    blob = encode(photo, exif=exif)
    assert probe_image(blob, "RGB") == (80, 130, 3)
    same = run([encode(photo), blob], (80, 130, 3))
    np.testing.assert_array_equal(same[0], same[1])


@pytest.mark.parametrize("size", [(20, 20), (40, 10), (100, 200), (80, 130)])
def test_resizing_takes_the_centered_box(photo, size):
    scale = min(80 / size[0], 130 / size[1])
    height, width = scale * size[0], scale * size[1]
    box = ((130 - width) / 2, (80 - height) / 2, (130 + width) / 2, (80 + height) / 2)
    expected = photo.resize(size[::-1], PIL.Image.Resampling.BILINEAR, box=box)
    got = run([encode(photo, "PNG")], (*size, 3), resize=True)[0]
    difference = np.abs(got.astype(int) - np.asarray(expected))
    assert difference.max() <= 1


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize(
    "size", [(8, 8), (9, 15), (10, 16), (25, 25), (40, 65), (79, 3)]
)
def test_shrunk_jpeg_is_the_same_without_simplejpeg(photo, size, mode, monkeypatch):
    pytest.importorskip("simplejpeg")
    blob, shape = encode(photo, quality=95), (*size, 3 if mode == "RGB" else 1)
    fast = run([blob], shape, mode, resize=True)
    monkeypatch.setattr(decode, "_simplejpeg", lambda: None)
    np.testing.assert_array_equal(run([blob], shape, mode, resize=True), fast)
    # And near what decoding all of it first would give.
    whole = encode(PIL.Image.open(io.BytesIO(blob)), "PNG")
    slow = run([whole], shape, mode, resize=True)
    assert np.abs(fast.astype(int) - slow).mean() < 5


@pytest.mark.parametrize("size", [30, 64, 100])
def test_resized_jpeg_is_near_pillow_s_resize(rng, size):
    # Noise of six pixels, coarser than the finest of a photograph.
    noise = PIL.Image.fromarray(rng.integers(0, 256, (45, 45, 3), dtype=np.uint8))
    blob = encode(noise.resize((270, 270), PIL.Image.Resampling.BICUBIC), quality=90)
    found = run([blob], (size, size, 3), resize=True)[0].astype(int)
    whole = PIL.Image.open(io.BytesIO(blob)).convert("RGB")
    expected = whole.resize((size, size), PIL.Image.Resampling.BILINEAR)
    difference = np.abs(found - np.asarray(expected))
    assert difference.mean() < 2.5


@pytest.mark.parametrize("threads", [1, 2, None])
def test_many_images_in_threads(rng, threads):
    pixels = rng.integers(0, 256, (33, 6, 5, 3), dtype=np.uint8)
    blobs: list[Any] = [encode(PIL.Image.fromarray(image), "PNG") for image in pixels]
    blobs[1], blobs[2] = memoryview(blobs[1]), np.frombuffer(blobs[2], np.uint8)
    before = threading.active_count()
    np.testing.assert_array_equal(run(blobs, (6, 5, 3), threads=threads), pixels)
    assert threading.active_count() == before


def test_no_images():
    assert run([], (4, 4, 3), threads=2).shape == (0, 4, 4, 3)


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP"])
@pytest.mark.parametrize("resize", [False, True])
def test_damaged_image(photo, kind, resize):
    blob = encode(photo, kind)
    shape = (20, 20, 3) if resize else (80, 130, 3)
    parts = [b"", blob[:2], blob[:20], blob[: len(blob) // 2], bytes(64), b"\xff" * 64]
    for damaged in parts:
        with pytest.raises(DataCorruptionError, match="cannot be decoded") as info:
            run([blob, damaged, b""], shape, resize=resize, threads=2)
        assert (info.value.path, info.value.record) == ("photos.tar", 11)
        assert info.value.offset == 100
        assert " at 0x" not in info.value.reason


@pytest.mark.usefixtures("decoder")
def test_absurd_size_in_the_header_is_refused(photo):
    blob = bytearray(encode(photo))
    frame = blob.index(b"\xff\xc0")
    blob[frame + 5 : frame + 9] = bytes.fromhex("fde8fde8")
    with pytest.raises(DataCorruptionError, match="pixels"):
        run([bytes(blob)], (20, 20, 3), resize=True)
    with pytest.raises(ValueError, match="pixels"):
        probe_image(bytes(blob), "RGB")


def test_bytes_before_a_marker_are_passed_over(photo):
    blob = encode(photo)
    end = blob.rindex(b"\xff\xd9")
    padded = blob[:end] + b"\x12\x34" + blob[end:]
    both = run([blob, padded], (80, 130, 3))
    np.testing.assert_array_equal(both[0], both[1])


def test_images_of_different_sizes(photo):
    blobs = [encode(photo), encode(photo.rotate(90, expand=True))]
    with pytest.raises(ValueError, match=r"photos.tar.*130x80 \(record 11.*80x130"):
        run(blobs, (80, 130, 3))
    with pytest.raises(ValueError, match=r"image_size=\(height, width\)"):
        run(blobs, (80, 130, 3), threads=2)


def test_no_image_at_all():
    with pytest.raises(ValueError, match="cannot identify"):
        probe_image(b"neither JPEG nor PNG", "RGB")
    assert not is_image(b"neither JPEG nor PNG")


def test_without_pillow(photo, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"jaxaccel\[formats\]"):
        run([encode_png()], (2, 2, 3))


def test_without_simplejpeg(monkeypatch):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    assert decode._simplejpeg.__wrapped__() is None


def encode_png():
    # Of 2 x 2 pixels, as encoding needs Pillow.
    return bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000002000000020802000000fdd49a73"
        "0000000b49444154789c6360400600000e0001b6ff3c0c0000000049454e44ae426082"
    )
