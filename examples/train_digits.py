"""Train for a few epochs with the toy framework, export to ONNX, reload, and compare the accuracy.

`python -m examples.toy_framework.train_digits cnn` (or vit) trains to the end, to 98.5% and more. docs/training.md
follows one op of it to a cuDNN plan.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from examples.toy_framework.train_digits import train  # the project's root must be on the path first


def main() -> None:
    """Train a CNN for five epochs."""
    found, reloaded = train("cnn", epochs=5)
    print(f"{found:.2%} of the test images after five epochs, {reloaded:.2%} reloaded from ONNX")
    if found < 0.95 or abs(found - reloaded) > 0.003:
        raise SystemExit("the accuracy is below 95%, or the reloaded model differs")


if __name__ == "__main__":
    main()
