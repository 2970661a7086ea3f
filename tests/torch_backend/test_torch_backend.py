"""Test torch.compile with graph breaks and fallbacks, exported programs, and shared memory."""

from __future__ import annotations

import importlib
import tomllib
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import assert_close, one_program

import fusec
from fusec.errors import ExecutionError, FusecError, ModelError

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
pytestmark = [pytest.mark.cudnn, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

from fusec import torch_backend  # noqa: E402 - not where torch is missing
from fusec.frontends import torch_export  # noqa: E402
from fusec.torch_backend import graph_inputs, tensors  # noqa: E402 - as above


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2.0)
        self.drop = torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        return self.head(self.drop(torch.relu(self.norm(self.conv(x))).mean((2, 3))))


class Watched:
    """The backend, and the graphs it was given."""

    def __init__(self, **options: Any) -> None:
        self.graphs: list[Any] = []
        self.options = options

    def __call__(self, gm: Any, inputs: Any) -> Any:
        self.graphs.append(torch_backend.backend(gm, inputs, options=self.options))
        return self.graphs[-1]

    def compile(self, f: Any, **more: Any) -> Any:
        return torch.compile(f, backend=self, **more)

    @property
    def shapes(self) -> list[list[tuple[int, ...]]]:
        """Of the first input, by export."""
        return [[next(iter(s.values())) for s in c.executable.shapes] for graph in self.graphs for c in graph._compiled]


def close(got: Any, want: Any, rtol: float = 1e-5) -> None:
    assert got.dtype == want.dtype
    assert_close(got.detach().double().numpy(), want.detach().double().numpy(), rtol)


def test_a_net_is_compiled_for_the_sizes_of_its_calls() -> None:
    net, watched = Net().eval(), Watched()
    compiled = watched.compile(net, dynamic=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="fusec")
        for batch in (2, 3, 2):
            x = torch.randn(batch, 3, 8, 8)
            close(compiled(x), net(x))
        assert watched.shapes == [[(3, 3, 8, 8), (2, 3, 8, 8)]]
        # a parameter changed in place: what was made of it before is let go
        net.head.weight.mul_(2)
        close(compiled(x), net(x))
        assert watched.shapes == [[(2, 3, 8, 8)]]
    with torch.inference_mode():
        close(compiled(x), net(x))


@pytest.mark.parametrize("drop", [0.5, 0.0])
def test_a_net_in_training_is_left_to_torch(drop: float) -> None:
    net, watched = Net(), Watched()
    net.drop.p = drop
    before = net.norm.running_mean.clone()
    with (
        torch.no_grad(),
        pytest.warns(UserWarning, match="a graph runs in torch itself: (the model changes|.*Dropout)"),
    ):
        watched.compile(net)(torch.randn(2, 3, 8, 8))
    assert not torch.equal(net.norm.running_mean, before)
    assert net.training
    assert watched.shapes == []


def test_graphs_break_and_results_of_every_kind_come_back() -> None:
    watched = Watched()

    def f(x: Any, k: float) -> Any:
        y = torch.relu(x) * k
        torch._dynamo.graph_break()
        return y.sum(1), x, y.to(torch.bfloat16), y > 0, None, y

    compiled = watched.compile(f)
    x = torch.randn(4, 5)
    for k in (2.0, 3.5):
        with pytest.warns(UserWarning, match=r"a graph breaks at test_torch_backend.py:\d+, `torch._dynamo"):
            got = compiled(x, k)
        want = f(x, k)
        assert got[1] is x
        assert got[4] is None
        for place in (0, 2, 3, 5):
            close(got[place], want[place])
    assert len(watched.graphs) >= 2
    assert all(not graph.refused for graph in watched.graphs)


def test_what_fusec_lacks_runs_in_torch_with_the_reason() -> None:
    compiled = Watched().compile(lambda x: torch.relu(torch.linalg.svdvals(x)))
    with pytest.warns(UserWarning, match=r"fusec: a graph runs in torch itself: .*svd") as caught:
        compiled(torch.ones(3, 3))
    assert all("\n" not in str(w.message) for w in caught)
    compiled = Watched().compile(lambda x: x.add_(1).relu())
    x = torch.zeros(3)
    with pytest.warns(UserWarning, match="the model changes"):
        compiled(x)
    assert torch.equal(x, torch.ones(3))


def test_a_graph_shared_by_two_modules_keeps_their_parameters_apart() -> None:
    layers = [torch.nn.Linear(4, 4).eval() for _ in range(2)]
    watched = Watched()

    def forward(layer: Any, x: Any) -> Any:
        return torch.relu(layer(x))

    compiled = watched.compile(forward)
    x = torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(2):
            for layer in layers:
                close(compiled(layer, x), forward(layer, x))
    assert sum(len(graph._compiled) for graph in watched.graphs) == 2


def test_options_are_those_of_compile_dynamic() -> None:
    net, watched = Net().eval(), Watched(precision="fp16", max_shapes=1, deterministic=True)
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        close(watched.compile(net)(x), net(x), 1e-2)
    program = watched.graphs[0]._compiled[0].executable.at({"inputs_0": (2, 3, 8, 8)})
    assert program.compiled.options.precision == "fp16"
    assert program.compiled.options.deterministic
    with pytest.raises(Exception, match="the backend has no option 'speed'; options are target, precision"):
        Watched(speed=11).compile(net)(x)


def test_modes_say_how_plans_are_tuned() -> None:
    graph = torch.fx.symbolic_trace(lambda x: (torch.relu(x),))
    made: Any = torch_backend.backend(graph, [torch.zeros(2)], mode="max-autotune", options={"target": "l4"})
    assert made.options == {"tune": "full", "target": "l4"}
    f = torch.compile(lambda x: torch.relu(x) + 1, backend=torch_backend.backend, mode="reduce-overhead")
    close(f(torch.ones(3)), torch.full((3,), 2.0))
    with pytest.raises(FusecError, match="the backend has no mode 'warp'; modes are default"):
        torch_backend.backend(graph, [torch.zeros(2)], mode="warp")


def test_the_name_leads_to_the_backend() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["torch_dynamo_backends"]["fusec"].partition(":")
    assert getattr(importlib.import_module(module), name) is torch_backend.backend


class Pair(torch.nn.Module):
    """Inputs and outputs in structures, an argument by name, and a number that is part of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(4, 6))

    def forward(self, xs: dict[str, Any], scale: float, *, more: Any) -> Any:
        y = xs["a"] @ self.w + more
        return {"y": y * scale, "rest": (torch.softmax(y, -1), None)}


def exported(**dims: Any) -> Any:
    inputs = ({"a": torch.randn(3, 4)}, 2.0), {"more": torch.randn(6)}
    shapes = {"xs": {"a": {0: torch.export.Dim.DYNAMIC}}, "scale": None, "more": None} if dims else None
    return torch.export.export(Pair().eval(), *inputs, dynamic_shapes=shapes)


def test_an_exported_program_is_called_as_the_model_was() -> None:
    program = exported(batch=True)
    exe = fusec.from_torch(program, target="l4")
    for batch in (3, 5):
        args, more = ({"a": torch.randn(batch, 4)}, 2.0), {"more": torch.randn(6)}
        got, want = exe(*args, **more), program.module()(*args, **more)
        close(got["y"], want["y"])
        close(got["rest"][0], want["rest"][0])
        assert got["rest"][1] is None
    assert len(exe.executable.shapes) == 2
    assert one_program(exe.executable.at(exe.executable.shapes[0])).compiled.target.name == "l4"
    with pytest.raises(ExecutionError, match=r"was exported for 2.0, which is part of it"):
        exe({"a": torch.randn(3, 4)}, 3.0, more=torch.randn(6))
    with pytest.raises(
        ExecutionError, match="argument 0 is a ndarray, not a tensor of torch; `executable` takes arrays"
    ):
        exe({"a": np.zeros((3, 4), np.float32)}, 2.0, more=torch.randn(6))
    assert repr(exe).startswith("<fusec.TorchExecutable of <fusec.DynamicExecutable ")
    with pytest.raises(ExecutionError, match="the arguments have the structure"):
        exe(torch.randn(3, 4), 2.0, more=torch.randn(6))
    with pytest.raises(ExecutionError, match=r"has shape \[s\d+, 4\], the array \[3, 5\]"):
        exe({"a": torch.randn(3, 5)}, 2.0, more=torch.randn(6))


def test_parameters_stay_where_they_are() -> None:
    program = exported()
    graph = torch_export.source(program).load()
    (weight,) = (v.literal for v in graph.values() if v.literal is not None and v.type.shape == (4, 6))
    assert np.shares_memory(weight.array, program.state_dict["w"].detach().numpy())


def test_what_is_no_inference_is_refused() -> None:
    program = torch.export.export(Net(), (torch.randn(2, 3, 8, 8),))
    with pytest.raises(ModelError, match=r"changes .*running_mean.*call model.eval\(\) first"):
        fusec.from_torch(program)
    with pytest.raises(ModelError, match=r"an ExportedProgram is wanted .*, not Net"):
        fusec.from_torch(Net())
    with pytest.raises(FusecError, match="max_shapes"):
        fusec.from_torch(exported(), max_shapes=0)


@pytest.mark.parametrize("dtype", list(torch_export.DTYPES), ids=str)
def test_arrays_and_tensors_share_memory(dtype: Any) -> None:
    tensor = torch.tensor([[0, 1, 2], [1, 0, 3]]).to(dtype)
    array = torch_export.to_numpy(tensor)
    assert array.dtype == torch_export.DTYPES[dtype].numpy
    assert array.astype(np.float64).tolist() == tensor.double().tolist()
    back = torch_export.from_numpy(array)
    assert back.dtype == dtype
    assert back.data_ptr() == tensor.data_ptr()


def test_memory_on_the_device_is_borrowed_as_the_type_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    import ml_dtypes

    from fusec.gpu.launch import cupy_arrays

    monkeypatch.setattr(cupy_arrays, "cupy", types.SimpleNamespace(from_dlpack=np.from_dlpack))
    tensor = torch.randn(3).to(torch.bfloat16)
    array = cupy_arrays.borrowed(tensor.view(torch.int16), np.dtype(ml_dtypes.bfloat16))
    assert array.astype(np.float32).tolist() == tensor.float().tolist()
    assert array.ctypes.data == tensor.data_ptr()


def test_tensors_on_a_gpu_do_not_go_to_the_simulator() -> None:
    program: Any = types.SimpleNamespace(device="simulated", inputs=[types.SimpleNamespace(name="x")])
    with pytest.raises(ExecutionError, match="its inputs must be on the CPU"):
        tensors.lent(types.SimpleNamespace(is_cuda=True, device=torch.device("cuda:0")), program)
    with pytest.raises(ExecutionError, match="a tensor is on cuda:1, fusec runs on cuda:0"):
        tensors.lent(types.SimpleNamespace(is_cuda=True, device=torch.device("cuda:1")), program)


def test_all_of_a_graph_is_on_one_device() -> None:
    cpu, gpu, other = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1"))
    graph_inputs.require_one_device([gpu, gpu], [gpu])
    for inputs, results in (([cpu, gpu], [gpu]), ([gpu], [gpu, cpu]), ([other], [other])):
        with pytest.raises(ModelError, match="all must be on the CPU, or all on cuda:0"):
            graph_inputs.require_one_device(inputs, results)
    watched = Watched()
    made = watched.compile(lambda: torch.arange(4).float().exp())
    with pytest.warns(UserWarning, match="it takes no tensor"):
        close(made(), torch.arange(4).float().exp())


@pytest.mark.gpu
def test_on_a_gpu_tensors_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusec.gpu import device

    if not torch.cuda.is_available():
        pytest.skip("torch knows no GPU")
    monkeypatch.delenv("FUSEC_DEVICE")
    device._first_gpu.cache_clear()
    net = Net().eval().cuda()
    compiled = Watched().compile(net, dynamic=True)
    side = torch.cuda.Stream()
    with torch.no_grad():
        for batch in (2, 3, 2):
            x = torch.randn(batch, 3, 8, 8, device="cuda")
            close(compiled(x).cpu(), net(x).cpu(), 1e-3)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                big = torch.randn(4096, 4096, device="cuda")
                for _ in range(20):
                    big = big @ big * 1e-2
                late = x + 0 * big[0, 0].nan_to_num(0.0, 0.0, 0.0)
                got = compiled(late)
            side.synchronize()
            assert got.is_cuda
            close(got.cpu(), net(x).cpu(), 1e-3)
        half = net.half()
        x = torch.randn(2, 3, 8, 8, device="cuda", dtype=torch.float16)
        close(torch.compile(half, backend=torch_backend.backend)(x).cpu(), half(x).cpu(), 1e-2)
        program = torch.export.export(net.bfloat16(), (x.bfloat16(),))
        close(fusec.from_torch(program)(x.bfloat16()).cpu(), net(x.bfloat16()).cpu(), 5e-2)


class Residual(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.Conv2d(8, 4, 1)

    def forward(self, x: Any) -> Any:
        return self.b(torch.relu(self.a(x)) + x), x.mean((2, 3))


@pytest.mark.parametrize("dynamic", [None, True])
def test_memory_formats_are_those_of_eager_torch(dynamic: bool | None) -> None:
    net, watched = Residual().eval(), Watched()
    fast = watched.compile(net, dynamic=dynamic)
    formats = (torch.contiguous_format, torch.channels_last, torch.channels_last, torch.contiguous_format)
    with torch.inference_mode():
        for batch, memory_format in zip((2, 2, 3, 3), formats, strict=True):
            x = torch.randn(batch, 8, 6, 5).to(memory_format=memory_format)
            got, want = fast(x), net(x)
            for a, b in zip(got, want, strict=True):
                close(a, b)
                assert a.stride() == b.stride()
    programs = [c.executable.at(s) for graph in watched.graphs for c in graph._compiled for s in c.executable.shapes]
    copies = [sum(n.op.name == "relayout" for n in p.compiled.graph.nodes) for p in programs]
    orders = [p.inputs[0].order for p in programs]
    assert sorted(orders) == [(), (), (0, 2, 3, 1), (0, 2, 3, 1)]
    assert all(count == 0 for count, order in zip(copies, orders, strict=True) if order)
    assert any(copies)
    chosen = watched.graphs[0].options
    assert "channels_last" not in chosen


def test_an_option_decides_over_the_format_of_a_tensor() -> None:
    net, watched = Residual().eval(), Watched(channels_last=False)
    x = torch.randn(2, 8, 6, 5).to(memory_format=torch.channels_last)
    with torch.inference_mode():
        y, _ = watched.compile(net)(x)
        assert y.is_contiguous()
        close(y, net(x)[0])


def test_exported_programs_keep_the_memory_format_of_the_export() -> None:
    net, x = Residual().eval(), torch.randn(2, 8, 6, 5)
    for memory_format, order in ((torch.contiguous_format, ()), (torch.channels_last, (0, 2, 3, 1))):
        exported = torch.export.export(net, (x.to(memory_format=memory_format),))
        exe = fusec.from_torch(exported)
        with torch.inference_mode():
            want = net(x)[0]
            for given in (x, x.to(memory_format=torch.channels_last)):
                y, _ = exe(given)
                assert y.is_contiguous(memory_format=memory_format)
                close(y, want)
        (program,) = [one_program(exe.executable.at(s)) for s in exe.executable.shapes]
        assert program.inputs[0].order == program.outputs[0].order == order
    turned = fusec.from_torch(torch.export.export(net, (x,)), channels_last=True)
    assert turned(x)[0].is_contiguous(memory_format=torch.channels_last)
