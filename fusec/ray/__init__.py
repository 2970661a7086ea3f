"""Run a model over a Ray Data set, or serve it with Ray Serve (extra `ray`)."""

from fusec.ray.predictor import BatchPredictor
from fusec.ray.serving import ServeOptions, application

__all__ = ["BatchPredictor", "ServeOptions", "application"]
