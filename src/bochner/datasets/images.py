"""Sets of images: MNIST, CIFAR and SVHN from files, and scikit-learn's digits, which need none."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bochner.datasets.tables import data_folder, is_there
from bochner.errors import unknown_name


@dataclass(frozen=True)
class ImageFile:
    """A set of images in an .npz file, and its known properties.

    Attributes:
        file: Name of the file.
        shapes: Shape of each of its arrays; all are uint8.
        classes: Number of classes.
        content: SHA-256 of the arrays, whatever way they are packed.
    """

    file: str
    shapes: dict[str, tuple[int, ...]]
    classes: int
    content: str


IMAGES = {
    "mnist": ImageFile(
        "mnist.npz",
        {"x_train": (60000, 28, 28), "y_train": (60000,), "x_test": (10000, 28, 28), "y_test": (10000,)},
        10,
        "76026c93dc8bd5cb0902a7c8d6745e9f1b97b7619c589d85d83a30121692bfcc",
    ),
    "cifar10": ImageFile(
        "cifar10.npz",
        {"x_train": (50000, 32, 32, 3), "y_train": (50000,), "x_test": (10000, 32, 32, 3), "y_test": (10000,)},
        10,
        "be5f23b4067305b30dff609f33998df3916f443520e71d02a792cd00c404a07e",
    ),
    "cifar100": ImageFile(
        "cifar100.npz",
        {"x_test": (10000, 32, 32, 3), "y_test": (10000,)},
        100,
        "b2ee0b5d6b755b81196b1f4d9dfe8adc90068f67b0ddcb96650b510854c669f8",
    ),
    # The first 1,083 images of SVHN's training set, without their labels: the rest is not available here.
    "svhn-1083": ImageFile(
        "svhn.npz",
        {"x_test": (1083, 32, 32, 3)},
        10,
        "b282c2855bb4d6da1d56e84304a500a15831861a1ec5ba88709b22f0ca40135e",
    ),
}


@dataclass(frozen=True)
class Images:
    """A set of images, uint8: (N, height, width) or (N, height, width, 3), and labels from 0; None where they are missing."""

    name: str
    x_train: np.ndarray | None
    y_train: np.ndarray | None
    x_test: np.ndarray
    y_test: np.ndarray | None


def image_sum(arrays: dict[str, np.ndarray]) -> str:
    """SHA-256 of the arrays of a set of images."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name}{arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def read_images(name: str, path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file, after checking them; a ValueError says in a few words what is wrong."""
    known = IMAGES[name]
    try:
        # Opened here, because NumPy leaves a file that is no archive open.
        with path.open("rb") as handle, np.load(handle, allow_pickle=False) as file:
            arrays = {part: file[part] for part in known.shapes if part in file.files}
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    except Exception as error:  # zipfile, zlib and NumPy have several ways to refuse a damaged file
        raise ValueError(str(error) or type(error).__name__) from error
    for part, shape in known.shapes.items():
        if part not in arrays:
            raise ValueError(f"it has no array '{part}'")
        if arrays[part].shape != shape or arrays[part].dtype != np.uint8:
            raise ValueError(
                f"its array '{part}' is {arrays[part].dtype} of shape {arrays[part].shape}, not uint8 of {shape}"
            )
        if part.startswith("y_") and int(arrays[part].max()) >= known.classes:
            raise ValueError(f"its labels go up to {arrays[part].max()}, not {known.classes - 1}")
    return arrays


def _digits() -> Images:
    """Scikit-learn's 8×8 digits, grey levels stretched to 255; the last 360, by other writers, are the test set."""
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    x, y = np.round(bunch.images * (255 / 16)).astype(np.uint8), bunch.target.astype(np.uint8)
    return Images("digits", x[:-360], y[:-360], x[-360:], y[-360:])


def load_images(name: str, folder: Path | None = None) -> Images:
    """Loads a set of images.

    Args:
        name: "digits", which needs no file, or one of ``IMAGES``.
        folder: Where the files are, as for `load`.

    Raises:
        ValueError: If there is no set of that name, or its file is damaged.
        FileNotFoundError: If its file is not in the folder.
    """
    if name not in (names := ["digits", *IMAGES]):
        raise ValueError(unknown_name("name", name, names))
    if name == "digits":
        return _digits()
    path = data_folder(folder) / IMAGES[name].file
    if not is_there(path):
        arrays = ", ".join(f"{part} {shape}" for part, shape in IMAGES[name].shapes.items())
        raise FileNotFoundError(
            f"The file {path.name} of the data set '{name}' is not in {path.parent}. Put it there, an .npz file of uint8 arrays "
            f"{arrays}, or set BOCHNER_DATA to the folder that holds it."
        )
    try:
        arrays = read_images(name, path)
    except ValueError as error:
        raise ValueError(
            f"The file {path} cannot be read as the data set '{name}': {error}. Run `bochner data check {name}`; if it is damaged, "
            "delete it and copy it again."
        ) from error
    return Images(name, *(arrays.get(part) for part in ("x_train", "y_train", "x_test", "y_test")))  # pyright: ignore[reportArgumentType]
