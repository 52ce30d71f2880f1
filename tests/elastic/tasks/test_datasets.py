"""Data sets and image files: those of packages, folders, and what is refused."""

import itertools

import numpy as np
import pytest

from jaxinfer.elastic import (
    Dataset,
    Division,
    InvalidImageError,
    load_cifar,
    load_dataset,
    load_image,
    load_image_folder,
)
from jaxinfer.elastic.tasks.datasets import DATASETS
from jaxinfer.elastic.tasks.images import resize_images
from jaxinfer.models.config import PreprocessingConfig, Resampling

Image = pytest.importorskip("PIL.Image")
IMAGES = np.zeros((4, 2, 2, 3), np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count", "classes"),
    [("digits", 1797, 10), ("mnist", 5000, 10), ("faces", 200, 2), ("textures", 768, 3)],
)
def test_sets_of_packages(name, count, classes):
    found = load_dataset(name, 16)
    assert found.images.shape == (count, 16, 16, 3)
    assert len(found.names) == classes >= len(np.unique(found.labels)) > 1
    assert found.images.std() > 20  # not blank
    means = [found.images[found.labels == label].mean(0) for label in np.unique(found.labels)]
    assert min(np.abs(a - b).max() for a, b in itertools.pairwise(means)) > 5  # classes differ


def test_all_names_are_known():
    assert set(DATASETS) == {"digits", "mnist", "faces", "textures"}


@pytest.mark.parametrize(
    ("images", "labels", "names", "message"),
    [
        (IMAGES.astype(float), [0, 1, 0, 1], "ab", "images must be uint8"),
        (IMAGES[..., 0], [0, 1, 0, 1], "ab", r"images must be uint8 \[N, H, W, 3\], got uint8 \[4, 2, 2\]"),
        (IMAGES, [0, 1], "ab", r"labels must be integers \[4\], got int64 \[2\]"),
        (IMAGES, [0.0, 1, 0, 1], "ab", "labels must be integers"),
        (IMAGES, [0, 1, 0, 2], "ab", r"labels must be in \[0, 2\), got 0 to 2"),
        (IMAGES[:0], np.zeros(0, int), "ab", "got no images"),
        (IMAGES, [0, 1, 0, 1], "aba", "names must be different from each other, got 'a' twice"),
    ],
)
def test_wrong_sets(images, labels, names, message):
    with pytest.raises(InvalidImageError, match=message):
        Dataset(images, labels, tuple(names))


def test_splits_keep_the_shares_of_classes():
    labels = np.repeat([0, 1, 2], [50, 10, 1])
    images = np.arange(61, dtype=np.uint8).repeat(12).reshape(61, 2, 2, 3)
    rest, part = Dataset(images, labels, ("a", "b", "c")).split(0.2)
    assert np.bincount(part.labels, minlength=3).tolist() == [10, 2, 0]
    assert sorted([*rest.images[:, 0, 0, 0], *part.images[:, 0, 0, 0]]) == list(range(61))
    again = Dataset(images, labels, ("a", "b", "c")).split(0.2)[1]
    np.testing.assert_array_equal(part.images, again.images)


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_divisions_have_nothing_in_common_and_stay_as_they_are(share):
    rng = np.random.default_rng(0)
    dataset = Dataset(images=rng.integers(0, 256, (80, 2, 2, 3), np.uint8), labels=np.arange(80) % 2, names=("a", "b"))
    division = Division(test_share=share, test_seed=3)
    training, validation, test = division.parts(dataset)
    seen = [{image.tobytes() for image in part.images} for part in (training, validation, test)]
    assert not seen[0] & (seen[1] | seen[2])
    assert (seen[1] == seen[2]) == (share == 0)
    assert len(seen[0] | seen[1] | seen[2]) == 80
    assert len(test) == (20 if share else 16)
    for part, again in zip((training, validation, test), division.parts(dataset), strict=True):
        np.testing.assert_array_equal(part.images, again.images)
    assert {image.tobytes() for image in Division(test_share=share, test_seed=4).parts(dataset).test.images} != seen[
        2
    ] or not share
    for wrong in (-0.1, 1.0, float("nan")):
        with pytest.raises(InvalidImageError, match=r"Division.test_share must be a number in \[0, 1\), got"):
            Division(test_share=wrong)


def test_classes_are_known_by_name():
    found = Dataset(IMAGES, [0, 1, 1, 0], ("dog", "cat", "unused")).with_names(("bird", "cat", "dog"))
    assert (found.labels.tolist(), found.names) == ([2, 1, 1, 2], ("bird", "cat", "dog"))
    with pytest.raises(InvalidImageError, match="images of the class 'dog'; known classes: bird, cat"):
        Dataset(IMAGES, [0, 1, 1, 0], ("dog", "cat")).with_names(("bird", "cat"))


def save(path, colour, size=(5, 4)):
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def test_folders_of_classes(tmp_path):
    for name, colour in (("forest", (0, 99, 0)), ("river", (0, 0, 99))):
        for i in range(3):
            save(tmp_path / name / f"{i}.png", colour)
    (tmp_path / "river" / "notes.txt").write_text("not an image")
    found = load_dataset(str(tmp_path), 6)
    assert found.names == ("forest", "river")
    assert found.labels.tolist() == [0, 0, 0, 1, 1, 1]
    np.testing.assert_array_equal(found.images[3:], np.broadcast_to([0, 0, 99], (3, 6, 6, 3)))


def test_wrong_folders(tmp_path):
    with pytest.raises(InvalidImageError, match="no such folder, and no data set with this name; known: digits"):
        load_dataset(str(tmp_path / "missing"), 6)
    save(tmp_path / "forest" / "0.png", 0)
    with pytest.raises(InvalidImageError, match="needs a folder of images for each of at least two classes"):
        load_image_folder(tmp_path, 6)
    (tmp_path / "river").mkdir()
    (tmp_path / "river" / "0.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    with pytest.raises(InvalidImageError, match=r"0\.png: not an image that can be read"):
        load_image_folder(tmp_path, 6)


def cifar(folder, coarse):
    """Records of 4 images in each file, the first pixel of each (label, label + 1, label + 2)."""
    folder.mkdir()
    names = "fine_label_names.txt" if coarse else "batches.meta.txt"
    (folder / names).write_text("cat\ndog\n")
    records = np.zeros((4, 3072), np.uint8)
    labels = np.array([0, 1, 1, 0], np.uint8)
    for channel in range(3):
        records[:, 1024 * channel : 1024 * (channel + 1)] = labels[:, None] + channel
    columns = ([np.full((4, 1), 7, np.uint8)] if coarse else []) + [labels[:, None], records]
    content = np.concatenate(columns, axis=1).tobytes()
    files = ["train.bin", "test.bin"] if coarse else [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    for file in files:
        (folder / file).write_bytes(content)


@pytest.mark.parametrize(("coarse", "batches"), [(False, 5), (True, 1)])
def test_cifar(tmp_path, coarse, batches):
    cifar(tmp_path / "bin", coarse)
    found = load_dataset(str(tmp_path / "bin"), 32)
    assert found.names == ("cat", "dog")
    assert found.labels.tolist() == [0, 1, 1, 0] * batches
    np.testing.assert_array_equal(found.images[1], np.broadcast_to([1, 2, 3], (32, 32, 3)))
    assert len(load_cifar(tmp_path / "bin", 32, train=False)) == 4
    file = tmp_path / "bin" / ("test.bin" if coarse else "test_batch.bin")
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(InvalidImageError, match="truncated"):
        load_cifar(tmp_path / "bin", 32, train=False)
    file.unlink()
    with pytest.raises(InvalidImageError, match="is missing; unpack"):
        load_cifar(tmp_path / "bin", 32, train=False)
    with pytest.raises(InvalidImageError, match="neither cifar-10-batches-bin nor cifar-100-binary"):
        load_cifar(tmp_path, 32)


def test_image_files(tmp_path):
    save(tmp_path / "a.png", (1, 2, 3))
    np.testing.assert_array_equal(load_image(tmp_path / "a.png", 4), np.broadcast_to([1, 2, 3], (4, 4, 3)))
    with pytest.raises(InvalidImageError, match="no such file"):
        load_image(tmp_path / "b.png", 4)
    (tmp_path / "text.png").write_text("text")
    with pytest.raises(InvalidImageError, match="not an image that can be read"):
        load_image(tmp_path / "text.png", 4)
    content = (tmp_path / "a.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(content[: len(content) // 2])
    with pytest.raises(InvalidImageError, match="not an image that can be read"):
        load_image(tmp_path / "cut.png", 4)


def test_images_are_resized_as_the_model_says(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (24, 12, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    cropped = PreprocessingConfig(resampling=Resampling.BICUBIC, resized=6, keep_ratio=True)
    expected = np.asarray(Image.fromarray(pixels).resize((6, 12), Image.Resampling.BICUBIC))[4:8, 1:5]
    np.testing.assert_array_equal(load_image(tmp_path / "a.png", 4, cropped), expected)
    np.testing.assert_array_equal(resize_images(pixels[None], 4, cropped)[0], expected)
    with pytest.raises(InvalidImageError, match="must be 4 x 4, got 24 x 12"):
        load_image(tmp_path / "a.png", 4, PreprocessingConfig(resampling=None))


def test_images_of_16_bits(tmp_path):
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    Image.fromarray(pixels).save(tmp_path / "8.png")
    for name in ("16.png", "16.tif"):
        Image.fromarray(pixels.astype(np.uint16) * 257).save(tmp_path / name)
        np.testing.assert_array_equal(load_image(tmp_path / name, 8), load_image(tmp_path / "8.png", 8))
    np.testing.assert_array_equal(load_image(tmp_path / "8.png", 8)[..., 0], pixels)
    Image.fromarray(pixels.astype(np.int32)).save(tmp_path / "I.tif")  # 32 bits, of which 8 are used
    np.testing.assert_array_equal(load_image(tmp_path / "I.tif", 8)[..., 0], pixels)
    dark = pixels.astype(np.uint16)
    Image.fromarray(dark).save(tmp_path / "dark.png")
    np.testing.assert_array_equal(load_image(tmp_path / "dark.png", 8)[..., 0], dark >> 8)
    Image.frombytes("I;16B", (8, 8), dark.astype(">u2").tobytes()).save(tmp_path / "dark.tif")
    (tmp_path / "dark.pgm").write_bytes(b"P5 8 8 65535\n" + dark.astype(">u2").tobytes())
    for name in ("dark.tif", "dark.pgm"):
        np.testing.assert_array_equal(load_image(tmp_path / name, 8)[..., 0], dark >> 8)
    for name, dtype in (("float.tif", np.float32), ("32.tif", np.int32)):
        Image.fromarray(pixels.astype(dtype) * 1000).save(tmp_path / name)
        with pytest.raises(InvalidImageError, match=r"pixels are \w+32; save the image with 8 or 16 bits a channel"):
            load_image(tmp_path / name, 8)


def test_rotated_images_are_upright(tmp_path):
    """As cameras save them: with the orientation beside the pixels."""
    pixels, exif = np.arange(192, dtype=np.uint8).reshape(8, 8, 3), Image.Exif()
    exif[0x0112] = 6  # the top is on the right
    Image.fromarray(np.rot90(pixels)).save(tmp_path / "a.png", exif=exif)
    np.testing.assert_array_equal(load_image(tmp_path / "a.png", 8), pixels)


def test_formats_that_run_other_programs_are_refused(tmp_path):
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "a.eps")
    with pytest.raises(InvalidImageError, match="not an image that can be read"):
        load_image(tmp_path / "a.eps", 8)


@pytest.mark.parametrize("side", [8000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_decompression_bombs(tmp_path, side):
    """A file of a few kB that would fill hundreds of MB."""
    Image.new("1", (side, side)).save(tmp_path / "bomb.png")
    with pytest.raises(InvalidImageError, match=r"pixels; make the image smaller|decompression bomb"):
        load_image(tmp_path / "bomb.png", 4)
