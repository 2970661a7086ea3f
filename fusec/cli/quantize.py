"""Run `fusec quantize`: quantise a trained model, write it as ONNX, and report the noise that this adds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fusec.cli.common import files, output
from fusec.cli.common.options import AsJson
from fusec.errors import FusecError

# Imports that only a command needs are inside it: see commands.py.


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="An ONNX file.")],
    file: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE.onnx", help="The file to write."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Calibration data: a folder or file of .npz or .npy.")
    ] = None,
    format: Annotated[str, typer.Option(help="int8, fp8 (E4M3), weights-int8 or weights-int4.")] = "int8",
    calibration: Annotated[
        str, typer.Option(help="max, entropy or percentile. Default: entropy for int8, max for fp8.")
    ] = "",
    percentile: Annotated[float, typer.Option(help="Percent of a tensor's elements that do not saturate.")] = 99.99,
    block_size: Annotated[int, typer.Option(help="Weights that share a scale in weights-int4.")] = 32,
    attention: Annotated[bool, typer.Option("--attention", help="Also quantise the products of attention.")] = False,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Leave nodes of this name in float; * matches any text.")
    ] = None,
    keep_float: Annotated[int, typer.Option(metavar="N", help="Leave the N layers that lose most in float.")] = 0,
    min_sqnr: Annotated[
        float | None,
        typer.Option(metavar="DB", help="Leave layers in float until every output has this signal-to-noise ratio."),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Measure what each layer loses, and print all layers and edges.")
    ] = False,
    target: Annotated[
        str, typer.Option("--target", help="Where calibration runs: cpu (NumPy), or auto: this machine's GPU.")
    ] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Quantise a trained model: calibrate it on data, and write QuantizeLinear and DequantizeLinear into it."""
    from fusec import frontends
    from fusec.quantization.quantize import quantize_model
    from fusec.quantization.quantize_options import QuantizeOptions

    if file is None and not report:
        raise FusecError("quantize: give -o FILE.onnx, or --report to write no file")
    files.check_writable(file)
    with output.progress() as progress:
        options = QuantizeOptions(
            format=format,
            calibration=calibration,
            percentile=percentile,
            block_size=block_size,
            attention=attention,
            exclude=exclude or (),
            keep_float=keep_float,
            min_sqnr=min_sqnr,
            report=report,
            target=target,
            progress=progress,
        )
        with output.without_cudnn_warning():
            quantised = quantize_model(frontends.Source(model), data, options)
    if file is not None:
        contents = quantised.to_bytes()
        files.write_whole(file, lambda opened: opened.write(contents))
    findings = quantised.report
    summary = {**findings.to_json(), "output": None if file is None else str(file)}
    output.result(summary, str(findings) if report else findings.summary, as_json)
    if file is not None:
        output.wrote(file, as_json)
