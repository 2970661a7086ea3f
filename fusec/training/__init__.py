"""Turn gradients into a training step: optimisers that add ops to a graph, and loss scaling for fp16."""

from fusec.training.loss_scaling import scaled_backward
from fusec.training.optimizers import Rate, adam, adamw, sgd

__all__ = ["Rate", "adam", "adamw", "scaled_backward", "sgd"]
