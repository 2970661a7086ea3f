"""Load scikit-learn's 1,797 handwritten digits of 8 by 8 pixels, and serve them in batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from examples.toy_framework.tape import Array


def digits(test_share: float = 0.2) -> tuple[Array, Array, Array, Array]:
    """Return training images and their labels, then test images and their labels. Images are f32[n, 1, 8, 8]."""
    images, labels = load_digits(return_X_y=True)
    images = ((images.reshape(-1, 1, 8, 8) - 4.9) / 6.0).astype(np.float32)
    parts = train_test_split(images, labels.astype(np.int64), test_size=test_share, random_state=0, stratify=labels)
    return parts[0], parts[2], parts[1], parts[3]


def shifted(images: Array, rng: np.random.Generator) -> Array:
    """Shift about half of the images by up to one pixel, and fill in background."""
    padded = np.pad(images, [(0, 0), (0, 0), (1, 1), (1, 1)], constant_values=images.min())
    at = np.where(rng.random((len(images), 1)) < 0.5, 1, rng.integers(0, 3, (len(images), 2)))
    rows, columns = (at[:, i, None] + np.arange(8) for i in range(2))
    return padded[np.arange(len(images))[:, None, None], :, rows[:, :, None], columns[:, None, :]].transpose(0, 3, 1, 2)


@dataclass
class DataLoader:
    """Batches in a new random order in each epoch. Images that do not fill a batch are left out of that epoch."""

    images: Array
    labels: Array
    batch: int
    rng: np.random.Generator
    augment: bool = True

    def __len__(self) -> int:
        return len(self.images) // self.batch

    def __iter__(self) -> Iterator[tuple[Array, Array]]:
        order = self.rng.permutation(len(self.images))
        for i in range(len(self)):
            picked = order[i * self.batch : (i + 1) * self.batch]
            images = self.images[picked]
            yield shifted(images, self.rng) if self.augment else images, self.labels[picked]
