"""Run a model over Dask collections, or over a folder of files, in the workers of a Dask cluster (extra `dask`).

Each worker process loads the model once. Dask repeats what a worker has lost that died.
"""

from fusec.dask.cluster import gpu_cluster
from fusec.dask.collections import map_array, map_bag
from fusec.dask.folders import map_folder
from fusec.dask.fuzzing import fuzz_cluster
from fusec.dask.spread import spread

__all__ = ["fuzz_cluster", "gpu_cluster", "map_array", "map_bag", "map_folder", "spread"]
