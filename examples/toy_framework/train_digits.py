"""Train on handwritten digits, export to ONNX, reload: `python -m examples.toy_framework.train_digits cnn`.

On the test images, `cnn` reaches 98.5% or more, and `vit` 97%.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from threadpoolctl import threadpool_limits

import fusec
from examples.toy_framework import models, nn
from examples.toy_framework.data import DataLoader, digits
from examples.toy_framework.optim import AdamW
from examples.toy_framework.trainer import Trainer, accuracy, in_batches

RECIPES = {"cnn": (models.cnn, 20, 4e-3, 0.985), "vit": (models.ViT, 40, 3e-3, 0.97)}


def train(name: str, epochs: int | None = None, target: str = "cpu", batch: int = 64) -> tuple[float, float]:
    """Return the accuracy on the test images: of the trained model, and of the exported and reloaded one."""
    make, usual, rate, _ = RECIPES[name]
    threadpool_limits(1)  # because such small matmuls end before a second thread wakes up
    nn.seed(0)
    images, labels, test_images, test_labels = digits()
    trainer = Trainer(make(), AdamW(0.05), images.shape[1:], batch, target)
    trainer.fit(DataLoader(images, labels, batch, np.random.default_rng(0)), epochs or usual, rate)
    found = trainer.accuracy(test_images, test_labels)
    reloaded = fusec.compile(trainer.export(), target=target)
    again = accuracy(in_batches(reloaded, test_images, batch), test_labels)
    return found, again


def main() -> None:
    """Train a model; exit with 1 if its accuracy is below the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=RECIPES)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--target", default="cpu", help="cpu (NumPy), or auto: the GPU")
    arguments = parser.parse_args()
    start = time.perf_counter()
    found, again = train(arguments.model, arguments.epochs, arguments.target)
    print(f"{arguments.model}: {found:.2%} of the test images, reloaded from ONNX {again:.2%}; ", end="")
    print(f"{time.perf_counter() - start:.0f} s")
    good = RECIPES[arguments.model][3]
    if not arguments.epochs and min(found, again) < good:
        raise SystemExit(f"less than {good:.1%}")


if __name__ == "__main__":
    main()
