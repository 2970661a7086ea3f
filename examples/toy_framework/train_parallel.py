"""Train on handwritten digits in several processes.

`python -m examples.toy_framework.train_parallel --devices cpu cpu`. Each worker trains on its share of the images. The
gradients are averaged in each step, so the parameters stay equal.
"""

from __future__ import annotations

import argparse

import numpy as np

import fusec
from examples.toy_framework import models, nn
from examples.toy_framework.data import DataLoader, digits
from examples.toy_framework.optim import AdamW
from examples.toy_framework.trainer import Trainer
from fusec.scale.communicator import Communicator


def train(communicator: Communicator, epochs: int, target: str = "cpu") -> float:
    """Train one worker; return the accuracy on the test images."""
    nn.seed(0)
    images, labels, test_images, test_labels = digits()
    mine = slice(communicator.rank, None, communicator.size)
    trainer = Trainer(models.cnn(8), AdamW(), images.shape[1:], 32, target, communicator)
    loader = DataLoader(images[mine], labels[mine], 32, np.random.default_rng(communicator.rank))
    trainer.fit(loader, epochs, 1e-2, lambda line: None)
    trainer.training.average_statistics()
    return trainer.accuracy(test_images, test_labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"], help="of: cpu, cuda:0, cuda:1, …")
    parser.add_argument("--epochs", type=int, default=3)
    given = parser.parse_args()
    target = "cpu" if given.devices[0] == "cpu" else "auto"
    options = {"epochs": given.epochs, "target": target}
    found = fusec.run_workers("examples.toy_framework.train_parallel:train", given.devices, options)
    print(f"{len(found)} workers: {found[0]:.2%} of the test images")
    if len(set(found)) != 1:
        raise SystemExit(f"the workers differ: {found}")


if __name__ == "__main__":
    main()
