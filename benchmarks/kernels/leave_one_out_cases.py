"""Prepare the models that benchmarks/kernels/leave_one_out.py compiles again and again: MODEL:BATCH[:FORM].

FORM is fp16 (the default), a format of fusec.quantize, `training`, or, for decoders, the bits of a weight: `4bit`. The
models are those of the other benchmarks. Decoders and training steps have fewer layers, and recurrent networks fewer
steps, so that they compile soon.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

import fusec
from benchmarks.common.model_zoo import channels_last, exported, feeds_of, halved, make
from benchmarks.common.torch_timing import device_ms, host_ms
from benchmarks.models import decoders, detectors, recurrent
from benchmarks.models.decoder_model import FileWriter
from benchmarks.models.peers import CHANNELS_LAST
from benchmarks.models.torch_training_steps import first_weights
from examples.training_models import training_step
from fusec.generation.decoder_graph import LOGITS
from fusec.runtime import Executable
from fusec.segments.executable import SegmentedExecutable

FP16, TRAINING = "fp16", "training"
BITS = {FP16: 16, "4bit": 4}  # of a decoder's weights
LAYERS: dict[str, dict[str, Any]] = {"resnet50": {"blocks": (1, 1, 1, 1)}, "vit_b_16": {"depth": 2}}  # in training
DECODER_LAYERS, RECURRENT_STEPS, PROMPT = 2, 40, 16
SIDE = 224  # of images in training
TRAINING_STEPS = 3  # whose losses are compared
Made = Executable | SegmentedExecutable


@dataclass(frozen=True)
class Trial:
    """A compiled model after its first run.

    program: the steps on the GPU.
    results: results of the first run.
    span: takes a number of runs, and returns the ms of one.
    """

    program: Executable
    results: torch.Tensor
    span: Callable[[int], float]


@dataclass(frozen=True)
class Case:
    """A model to compile without one family at a time.

    compile: takes options of fusec.compile.
    start: runs what was compiled for the first time.
    smaller: what the model has less of than elsewhere, and how many: `layers` or `steps`.
    """

    model: str
    batch: int
    form: str
    compile: Callable[..., Made]
    start: Callable[[Made], Trial]
    smaller: tuple[str, int] | None = None

    def row(self) -> dict[str, Any]:
        """Return what identifies the row of the result file."""
        found: dict[str, Any] = {"model": self.model, "batch": self.batch, "form": self.form}
        return found if self.smaller is None else {**found, self.smaller[0]: self.smaller[1]}


def prepare(text: str, folder: Path) -> Case:
    """Prepare a case. On a machine without a GPU it can be compiled, but not started.

    text: MODEL:BATCH[:FORM]
    folder: for the files of models.
    """
    model, number, form = (*text.split(":"), FP16)[:3]
    batch = int(number)
    if model in ("decoder", "prompt"):
        return _decoder(model, batch, form, folder)
    if model in recurrent.CASES:
        return _recurrent(model, batch)
    if model == "retinanet":
        return _detector(batch)
    return _training(model, batch) if form == TRAINING else _inference(model, batch, form)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _inference(model: str, batch: int, form: str) -> Case:
    """Prepare a model of the zoo, in fp16 or quantised with random weights."""
    nhwc = model in CHANNELS_LAST
    wide, inputs = make(model, batch)
    if form == FP16:
        module = wide.to(_device()).half()
        inputs = tuple(halved(x.to(_device())) for x in inputs)
        data = exported(module, inputs)
    else:
        samples = {f"x{i}": x.numpy() for i, x in enumerate(inputs)}
        target = "auto" if torch.cuda.is_available() else "h200"
        quantised = fusec.quantize(exported(wide, inputs), samples, format=form, calibration="max", target=target)
        data = quantised.model.SerializeToString()
        inputs = tuple(halved(x).to(x.dtype) for x in inputs)
    if nhwc:
        inputs = channels_last(inputs)
    return Case(
        model,
        batch,
        form,
        partial(fusec.compile, data, precision="fp16", channels_last=nhwc),
        lambda made: _started(made, feeds_of(tuple(x.cuda() for x in inputs))),
    )


def _started(made: Made, feeds: dict[str, Any]) -> Trial:
    """Run a program over inputs that stay in place."""
    program = cast("Executable", made)
    program.hold_inputs()
    (y,) = program.run(None, feeds)
    program.backend.finish()
    return Trial(program, torch.from_dlpack(y).clone(), partial(device_ms, program.replay))


def _recurrent(model: str, batch: int) -> Case:
    """Prepare recurrent layers."""
    network = replace(recurrent.CASES[model], batch=batch, steps=RECURRENT_STEPS)
    data = network.in_onnx(network.in_torch(_device()))
    shape = (network.steps, network.batch, network.size)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float16)

    def start(made: Made) -> Trial:
        import cupy  # here, because preparing a case needs no GPU

        return _started(made, {"x": cupy.asarray(x)})

    compiled = partial(fusec.compile, data, precision="fp16")
    return Case(model, batch, FP16, compiled, start, ("steps", RECURRENT_STEPS))


def _detector(batch: int) -> Case:
    """Prepare a detector with its suppression of boxes. The host's clock times its calls, because they may wait."""
    simulate = not torch.cuda.is_available()
    model = detectors.detector(detectors.SIDE, simulate)
    images = torch.randn(batch, 3, model.side, model.side).half().to(_device()).to(memory_format=torch.channels_last)
    data = detectors.exported(model, images)

    def start(made: Made) -> Trial:
        run = partial(made.run, None, {"x": images})
        run()
        results = dict(zip([s.name for s in made.outputs], run(), strict=True))
        scores = torch.as_tensor(results["chosen_scores"]).clone().sort(descending=True).values
        # the best scores are never suppressed, and their order does not depend on rounding
        best = scores[: detectors.CANDIDATES * batch // 10]
        return Trial(cast("SegmentedExecutable", made).programs[0], best, partial(host_ms, run))

    return Case("retinanet", batch, FP16, partial(fusec.compile, data, channels_last=["x"]), start)


def _decoder(model: str, batch: int, form: str, folder: Path) -> Case:
    """Prepare a decode step over a cache that is nearly full, or a program that reads prompts of PROMPT tokens."""
    config = replace(decoders.LLAMA, num_hidden_layers=DECODER_LAYERS)
    path = FileWriter(config, folder, BITS[form], _device()).write()
    rng = np.random.default_rng(0)
    length = config.max_position_embeddings * 7 // 8
    tokens = rng.integers(0, config.vocab_size, (batch, PROMPT))

    def compiled(**options: Any) -> Executable:
        generator = fusec.Generator(
            path,
            batch=batch,
            max_length=config.max_position_embeddings,
            prompt_sizes=[PROMPT],
            precision="fp16",
            **options,
        )
        if model == "decoder":
            return generator.decode
        generator.stream(tokens)  # compiles the program
        return generator.prompts[PROMPT]

    def start(made: Made) -> Trial:
        program = cast("Executable", made)
        drawn = np.random.default_rng(1)
        for spec in program.inputs:  # the cache
            if spec.name in program.state and len(spec.shape) == 4:
                program.bind(**{spec.name: drawn.standard_normal(spec.shape, np.float32).astype(np.float16)})

        def begin() -> None:
            program.bind(lengths=np.full(batch, length if model == "decoder" else PROMPT))
            if model == "decoder":
                program.bind(tokens=tokens[:, :1])

        feeds = {} if model == "decoder" else {"prompt": tokens}
        program.hold_inputs()
        begin()
        (logits,) = program.run([LOGITS], feeds)
        program.backend.finish()
        most = config.max_position_embeddings - length - 1
        return Trial(program, torch.as_tensor(logits).clone(), decoders.span(begin, program.replay, most))

    return Case(model, batch, form, compiled, start, ("layers", DECODER_LAYERS))


def _training(model: str, batch: int) -> Case:
    """Prepare a training step of a network with fewer layers."""
    sizes = LAYERS[model]
    first = {key: value.numpy() for key, value in first_weights(model).items()}
    rng = np.random.default_rng(0)
    images = rng.standard_normal((batch, 3, SIDE, SIDE), np.float32).astype(np.float16)
    labels = rng.integers(0, 1000, batch)

    def compiled(**options: Any) -> Made:
        return fusec.compile(training_step(model, batch, SIDE, first, **sizes), **options)

    def start(made: Made) -> Trial:
        import cupy  # here, because preparing a case needs no GPU

        program = cast("Executable", made)
        feeds = {"images": cupy.asarray(images), "labels": cupy.asarray(labels)}
        losses = [float(torch.as_tensor(program.step(**feeds))) for _ in range(TRAINING_STEPS)]
        program.run(None, feeds)
        program.backend.finish()
        return Trial(program, torch.tensor(losses), partial(device_ms, program.replay))

    (count,) = (sum(size) if isinstance(size, tuple) else size for size in sizes.values())
    return Case(model, batch, TRAINING, compiled, start, ("layers", count))
