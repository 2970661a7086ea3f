"""Choose the target of a compilation, and check that this machine's GPU can run a program."""

from __future__ import annotations

from fusec.errors import FusecError, TargetError
from fusec.execution.compilation import Compiled
from fusec.gpu import device, kernels
from fusec.gpu.cudnn.without_driver import deviceless
from fusec.gpu.kernels.elementwise import scatter
from fusec.ir import print_node, quote
from fusec.ops import Scatter
from fusec.schedule.program import Kind
from fusec.targets.target import DEFAULT, Target
from fusec.targets.target import load as load_target


def resolve_target(name: str) -> Target:
    """Return the target of that name; `auto` is the GPU of this machine, or an H200 if there is none."""
    if name != "auto":
        return load_target(name)
    return device.detect() or load_target(DEFAULT)


def require_cudnn() -> None:
    """Raise TargetError if cuDNN, which the GPU of this machine needs, is not installed."""
    if deviceless.is_absent():
        raise TargetError(
            f"cuDNN, which runs programs on this machine's {device.device_name()}, is not installed: "
            f"{deviceless.INSTALL}; or take --target cpu (FUSEC_DEVICE=none hides the GPU)"
        )


def require_runs_on_gpu(compiled: Compiled) -> None:
    """Raise TargetError for a type that no kernel takes, FusecError for an op that cannot be deterministic there."""
    for step in compiled.program.steps:
        # because CuPy, which runs steps without a kernel, has no types below 8 bits and no floats of 8 bits
        values = [v for node in step.nodes for v in (*node.operands, *node.results) if v.type.dtype.is_narrow]
        if values and step.kind is Kind.KERNEL and kernels.find(step.nodes, step.outputs, compiled.figures) is None:
            raise TargetError(
                f"{print_node(step.nodes[0])}: {values[0].type.dtype.value} runs in simulation only, not on a GPU, "
                "because no kernel does this with such numbers"
            )
    for name, _ in compiled.options.state:
        value = next(v for v in compiled.graph.inputs if v.name == name)
        if value.type.dtype.is_narrow:
            raise TargetError(f"state {quote(name)}: {value.type.dtype.value} cannot be state on a GPU")
    if not compiled.options.deterministic:
        return
    for node in compiled.graph.nodes:
        if isinstance(node.op, Scatter) and not scatter.has_fixed_order(node, compiled.figures):
            raise FusecError(
                f"{print_node(node)}: a GPU adds updates of one place in no fixed order, which deterministic rules out"
            )
