"""Folders of images per class."""

import os
import pickle

import numpy as np
import PIL.Image
import pytest

from jaxaccel.data import ColumnSpec, DataCorruptionError, open_store
from jaxaccel.data._image_folder import ImageFolderStore

UINT8 = np.dtype(np.uint8)


@pytest.fixture
def write(tmp_path):
    def write(name, pixels):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(pixels).save(path)

    return write


@pytest.fixture
def pixels(rng, write):
    pixels = rng.integers(0, 256, (5, 6, 4, 3), dtype=np.uint8)
    names = ["dog/b.png", "dog/a.PNG", "cat/2020/x.png", "cat/y.png", "owl/z.png"]
    for name, image in zip(names, pixels, strict=True):
        write(name, image)
    return dict(zip(names, pixels, strict=True))


def test_classes_are_numbered_by_name(tmp_path, pixels):
    store = open_store(tmp_path)
    assert isinstance(store, ImageFolderStore)
    assert store.class_names == ("cat", "dog", "owl")
    assert store.spec == {
        "image": ColumnSpec((6, 4, 3), UINT8),
        "label": ColumnSpec((), UINT8),
    }
    batch = store.take(np.arange(5))
    assert batch["label"].tolist() == [0, 0, 1, 1, 2]
    order = ["cat/2020/x.png", "cat/y.png", "dog/a.PNG", "dog/b.png", "owl/z.png"]
    for image, name in zip(batch["image"], order, strict=True):
        np.testing.assert_array_equal(image, pixels[name])
    assert store.take([4, 0])["label"].tolist() == [2, 0]


def test_what_is_no_image_is_left_out(tmp_path, pixels):
    (tmp_path / "readme.txt").write_text("not a class")
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "cat" / "._x.png").write_text("a hidden file")
    (tmp_path / ".cache").mkdir()
    (tmp_path / "cat" / ".thumbs").mkdir()
    os.symlink(tmp_path / "cat", tmp_path / "cat" / "circle")
    assert len(open_store(tmp_path)) == 5


def test_an_empty_class_keeps_its_number(tmp_path, pixels):
    (tmp_path / "bird").mkdir()
    store = open_store(tmp_path)
    assert isinstance(store, ImageFolderStore)
    assert store.class_names == ("bird", "cat", "dog", "owl")
    assert store.take([0])["label"].tolist() == [1]


def test_more_than_256_classes_take_16_bits(tmp_path, write):
    write("000/x.png", np.zeros((2, 2, 3), np.uint8))
    for i in range(1, 300):
        (tmp_path / f"{i:03}").mkdir()
    assert open_store(tmp_path).spec["label"].dtype == np.uint16


def test_resized_gray_and_pickled(tmp_path, pixels):
    store = open_store(tmp_path, image_size=(3, 2), image_mode="L", num_threads=2)
    assert store.spec["image"].shape == (3, 2, 1)
    copy = pickle.loads(pickle.dumps(store))
    batch, again = store.take([3, 1]), copy.take([3, 1])
    np.testing.assert_array_equal(batch["image"], again["image"])
    assert copy.fingerprint() == store.fingerprint()


def test_fingerprint_follows_files_and_options(tmp_path, pixels, write):
    first = open_store(tmp_path).fingerprint()
    assert open_store(tmp_path).fingerprint() == first
    assert open_store(tmp_path, image_size=(6, 4)).fingerprint() != first
    write("owl/z.png", 255 - pixels["owl/z.png"])
    assert open_store(tmp_path).fingerprint() != first


def test_chosen_columns(tmp_path, pixels):
    store = open_store(tmp_path, columns={"label": ColumnSpec((), UINT8)})
    assert set(store.take([1])) == {"label"}
    with pytest.raises(ValueError, match="it holds"):
        open_store(tmp_path, columns={"mask": ColumnSpec((), UINT8)})


def test_different_sizes_name_the_file(tmp_path, pixels, write):
    write("owl/z.png", np.zeros((4, 6, 3), np.uint8))
    store = open_store(tmp_path)
    with pytest.raises(ValueError, match=r"owl/z.png: images of different sizes"):
        store.take([0, 4])
    assert open_store(tmp_path, image_size=(4, 4)).take([4])["image"].sum() == 0


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n", b"garbage" * 9])
def test_damaged_image(tmp_path, pixels, content):
    (tmp_path / "owl" / "z.png").write_bytes(content)
    store = open_store(tmp_path)
    with pytest.raises(DataCorruptionError, match="owl/z.png") as info:
        store.take([2, 4])
    assert info.value.record == 4
    (tmp_path / "cat" / "2020" / "x.png").write_bytes(content)
    with pytest.raises(DataCorruptionError, match="x.png"):
        open_store(tmp_path)


def test_image_that_vanished(tmp_path, pixels):
    store = open_store(tmp_path)
    (tmp_path / "owl" / "z.png").unlink()
    with pytest.raises(FileNotFoundError, match="z.png"):
        store.take([4])


def test_folder_without_images(tmp_path):
    (tmp_path / "cat").mkdir()
    with pytest.raises(ValueError, match="no sub-folder with images"):
        open_store(tmp_path)
    with pytest.raises(ValueError, match="no sub-folder with images"):
        open_store(tmp_path, format="image_folder")


def test_splits_are_no_classes(tmp_path, pixels, write):
    for name in ("train/cat/a.png", "val/dog/a.png"):
        write(f"set/{name}", pixels["cat/y.png"])
    with pytest.raises(ValueError, match=r"\['train', 'val'\].*open one: .*set/train"):
        open_store(tmp_path / "set")
    assert len(open_store(tmp_path / "set" / "train")) == 1
    # Classes of such names hold images themselves.
    write("set/val/a.png", pixels["cat/y.png"])
    assert open_store(tmp_path / "set").class_names == ("train", "val")


def test_a_broken_link_is_named(tmp_path, pixels):
    link = tmp_path / "dog" / "c.png"
    os.symlink(tmp_path / "nowhere.png", link)
    with pytest.raises(FileNotFoundError, match="dog/c.png"):
        open_store(tmp_path)
    (tmp_path / "nowhere.png").write_bytes((tmp_path / "dog" / "b.png").read_bytes())
    assert len(open_store(tmp_path)) == 6


@pytest.mark.parametrize("stray", ["mean.npy", "metadata.parquet"])
def test_a_stray_file_beside_the_classes(tmp_path, pixels, stray):
    if stray.endswith("npy"):
        np.save(tmp_path / stray, np.zeros(3))
    else:
        (tmp_path / stray).write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="several formats.*format=") as caught:
        open_store(tmp_path)
    assert stray in str(caught.value) and "image_folder" in str(caught.value)
    assert len(open_store(tmp_path, format="image_folder")) == 5
