"""Test models that decode image files on the host, with Pillow."""

from __future__ import annotations

import io
import re
import struct
import sys
import tracemalloc
import warnings
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from frontends.onnx.models import info, model
from helpers import assert_close
from PIL import Image, ImageFile
from segments.models import FLOAT, n
from segments.test_onnx_suite import OPS

import fusec
from fusec.errors import ExecutionError, ModelError
from fusec.frontends.onnx.movement import image_files
from fusec.segments import programs
from fusec.segments.executable import SegmentedExecutable

U8 = 2
CPU: dict[str, Any] = {"target": "cpu"}
MOST = 8 << 20  # bytes that a refusal may allocate at one time

LOSSLESS: Mapping[str, Mapping[str, Any]] = {
    "BMP": {},
    "JPEG2000": {"irreversible": False},
    "PNG": {},
    "PPM": {},
    "TIFF": {},
    "TIFF lzw": {"compression": "tiff_lzw"},
    "WEBP": {"lossless": True},
}
FILES = {**LOSSLESS, "JPEG": {"quality": 60}, "WEBP lossy": {"quality": 60}}
REFUSALS = re.compile(r"the \d+ bytes are no image|Pillow cannot decode|the image file is truncated")
Pixels = np.ndarray[Any, Any]


def drawn(rng: np.random.Generator, *channels: int) -> Pixels:
    """Draw an image of random pixels and size."""
    return rng.integers(0, 256, (*rng.integers(9, 24, 2), *channels), dtype=np.uint8)


def written(pixels: Pixels | Image.Image, name: str = "PNG", **more: Any) -> bytes:
    """Write an image in a format of FILES."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    into = io.BytesIO()
    image.save(into, name.split()[0], **FILES[name], **more)
    return into.getvalue()


def bytes_of(data: bytes) -> Pixels:
    return np.frombuffer(data, np.uint8)


def decoder(length: int, pixel_format: str = "RGB") -> Any:
    nodes = [n("ImageDecoder x -> y", pixel_format=pixel_format)]
    return model(nodes, [info("x", [length], U8)], [info("y", None, U8)], opset=20)


def decoded(data: bytes, pixel_format: str = "RGB") -> Pixels:
    return fusec.compile(decoder(len(data), pixel_format), **CPU)(bytes_of(data))


def network(length: int, filters: Pixels, mean: Pixels, opset: int = 21) -> Any:
    """Decode an image, scale and shift its channels, and convolve it."""
    nodes = [
        n("ImageDecoder x -> image"),
        n("Cast image -> floats", to=FLOAT),
        n("Sub floats mean -> centred"),
        n("Mul centred scale -> normal"),
        n("Transpose normal -> chw", perm=[2, 0, 1]),
        n("Unsqueeze chw zero -> nchw"),
        n("Conv nchw filters -> y"),
    ]
    held = {"mean": mean, "scale": np.array(1 / 64, np.float32), "zero": np.array([0]), "filters": filters}
    return model(nodes, [info("x", [length], U8)], [info("y", None)], held, opset=opset)


def convolved(pixels: Pixels, filters: Pixels, mean: Pixels) -> Pixels:
    normal = (pixels.astype(np.float64) - mean) / 64
    windows = np.lib.stride_tricks.sliding_window_view(normal, filters.shape[2:], (0, 1))
    return np.einsum("hwcij,fcij->fhw", windows, filters)[None]


def pictured(rng: np.random.Generator, name: str) -> tuple[bytes, Pixels, Pixels, Pixels]:
    """Draw what `network` takes: an image file, its pixels as Pillow decodes them, filters and a mean."""
    data = written(drawn(rng, 3), name)
    filters = rng.standard_normal((5, 3, 3, 3)).astype(np.float32)
    pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    return data, pixels, filters, rng.uniform(90, 160, 3).astype(np.float32)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_a_network_that_decodes_its_image(
    name: str, small: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not small:
        monkeypatch.setattr(programs, "SMALL_ELEMENTS", -1)
    data, pixels, filters, mean = pictured(rng, name)
    executable = fusec.compile(network(len(data), filters, mean), **CPU)
    assert isinstance(executable, SegmentedExecutable)
    assert_close(executable(bytes_of(data)), convolved(pixels, filters, mean), 1e-5)
    step, *rest = executable.explain().segments[0].steps
    assert not rest
    assert (step.op, step.read_bytes, step.written_bytes) == ("ImageDecoder", len(data), pixels.nbytes)
    assert "the bytes of the image" in str(executable.explain())
    assert "'ImageDecoder_0' (ImageDecoder)" in str(executable.explain())


@pytest.mark.cudnn
def test_a_network_in_simulation(rng: np.random.Generator) -> None:
    """Images of several sizes, padded to one number of bytes."""
    sources = [drawn(rng, 3) for _ in range(2)]
    filters = rng.standard_normal((4, 3, 3, 3)).astype(np.float32)
    mean = rng.uniform(90, 160, 3).astype(np.float32)
    executable = fusec.compile(network(4096, filters, mean), target="h200", simulate=True)
    for source in sources:
        x = np.zeros(4096, np.uint8)
        data = written(source)
        x[: len(data)] = bytes_of(data)
        assert_close(executable(x), convolved(source, filters, mean), 1e-5)
    assert executable.device == "simulated"


@pytest.mark.parametrize("name", FILES)
def test_pixel_formats(name: str, rng: np.random.Generator) -> None:
    source = drawn(rng, 3)
    data = written(source, name)
    image = Image.open(io.BytesIO(data))
    rgb = decoded(data)
    assert (rgb.dtype, rgb.shape) == (np.uint8, source.shape)
    assert rgb.tolist() == np.asarray(image).tolist()
    assert (rgb == source).all() == (name in LOSSLESS)
    assert decoded(data, "BGR").tolist() == rgb[..., ::-1].tolist()
    assert decoded(data, "Grayscale").tolist() == np.asarray(image.convert("L"))[..., None].tolist()


@pytest.mark.parametrize("name", FILES)
def test_padding_after_a_file_is_ignored(name: str, rng: np.random.Generator) -> None:
    data = written(drawn(rng, 3), name)
    assert decoded(data + bytes(int(rng.integers(1, 5000)))).tolist() == decoded(data).tolist()


@pytest.mark.parametrize("name", ["BMP", "JPEG2000", "PNG", "PPM", "TIFF", "TIFF lzw"])
def test_gray_images(name: str, rng: np.random.Generator) -> None:
    gray = drawn(rng)
    data = written(gray, name)
    assert decoded(data, "Grayscale").tolist() == gray[..., None].tolist()
    for pixel_format in ("RGB", "BGR"):
        assert decoded(data, pixel_format).tolist() == np.stack([gray] * 3, -1).tolist()


@pytest.mark.parametrize("name", ["JPEG2000", "PNG", "PPM", "TIFF"])
def test_gray_images_of_16_bits_keep_their_high_byte(name: str, rng: np.random.Generator) -> None:
    gray = rng.integers(0, 1 << 16, (11, 14)).astype(np.uint16)
    data = written(gray, name)
    assert decoded(data, "Grayscale").tolist() == (gray >> 8)[..., None].tolist()
    assert decoded(data).tolist() == np.stack([gray >> 8] * 3, -1).tolist()


def test_alpha_palettes_and_single_bits(rng: np.random.Generator) -> None:
    source = drawn(rng, 4)
    assert decoded(written(source)).tolist() == source[..., :3].tolist()
    assert decoded(written(source[..., :2])).tolist() == np.stack([source[..., 0]] * 3, -1).tolist()
    palette = Image.fromarray(source[..., :3]).quantize(16)
    assert decoded(written(palette)).tolist() == np.asarray(palette.convert("RGB")).tolist()
    bits = Image.fromarray(source[..., 0]).convert("1")
    for name in ("BMP", "PNG", "PPM", "TIFF"):
        assert decoded(written(bits, name), "Grayscale")[..., 0].tolist() == np.asarray(bits.convert("L")).tolist()


def test_orientations(rng: np.random.Generator) -> None:
    """EXIF in a JPEG or PNG file turns nothing. The tag of a TIFF file says what its pixels are."""
    source = drawn(rng, 3)[:, :8]
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decoded(written(source, "PNG", exif=exif.tobytes())).tolist() == source.tolist()
    assert decoded(written(source, "JPEG", exif=exif.tobytes())).shape == source.shape
    turned = decoded(written(source, "TIFF", tiffinfo={0x0112: 6}))
    assert turned.tolist() == np.rot90(source, -1).tolist()


def test_the_first_image_of_several(rng: np.random.Generator) -> None:
    first, second = drawn(rng, 3), drawn(rng, 3)
    data = written(first, "TIFF", save_all=True, append_images=[Image.fromarray(second)])
    assert decoded(data).tolist() == first.tolist()


def test_a_constant_image_becomes_a_constant(rng: np.random.Generator) -> None:
    source = drawn(rng, 3)
    nodes = [n("ImageDecoder file -> image", pixel_format="BGR"), n("Cast image -> f", to=FLOAT), n("Mul f x -> y")]
    held = {"file": bytes_of(written(source))}
    made = model(nodes, [info("x", [1])], [info("y", None)], held, opset=20)
    executable = fusec.compile(made, **CPU)
    assert isinstance(executable, fusec.Executable)
    x = rng.standard_normal(1).astype(np.float32)
    assert_close(executable(x), source[..., ::-1] * x, 1e-6)
    made = decoder(len(held["file"]))
    bound = fusec.compile(made, constants={"x": held["file"]}, **CPU)
    assert isinstance(bound, fusec.Executable)
    assert bound().tolist() == source.tolist()
    with pytest.raises(
        ModelError, match=r"node 'ImageDecoder_0' \(ImageDecoder\): the 9 bytes are no image in the formats BMP, JPEG,"
    ):
        fusec.compile(decoder(9), constants={"x": rng.integers(0, 256, 9, dtype=np.uint8)}, **CPU)


def refusal(data: bytes) -> str:
    """Return the error of decoding these bytes at a call, without the name of the node."""
    with pytest.raises(ExecutionError) as caught:
        decoded(data)
    before, node, words = str(caught.value).partition("node 'ImageDecoder_0' (ImageDecoder): ")
    assert node and not before
    return words


def test_bytes_that_are_no_image(rng: np.random.Generator) -> None:
    for length in (0, 1, 4, 12, 500):
        data = rng.integers(0, 128, length, dtype=np.uint8).tobytes()
        assert refusal(data) == f"the {length} bytes are no image in the formats {', '.join(image_files.FORMATS)}"


@pytest.mark.parametrize("name", ["GIF", "ICO", "PCX", "TGA", "DDS", "SGI", "EPS"])
def test_decoders_of_other_formats_are_not_reached(name: str, rng: np.random.Generator) -> None:
    into = io.BytesIO()
    Image.fromarray(drawn(rng, 3)).save(into, name)
    assert Image.open(io.BytesIO(into.getvalue())).format == name
    assert "are no image in the formats" in refusal(into.getvalue())


@pytest.mark.parametrize("action", ["ignore", "error"])
@pytest.mark.parametrize("name", FILES)
def test_truncated_files(name: str, action: Any, rng: np.random.Generator) -> None:
    """PNG and BMP files may lack the last bytes, which hold no pixels. Warnings of Pillow change no result."""
    data = written(drawn(rng, 3), name)
    whole = decoded(data)
    end = len(data) - (20 if name in ("PNG", "BMP") else 0)
    lengths = {int(k) for k in rng.integers(0, end, 40)} | {end - 1}
    if name == "JPEG2000":
        lengths.add(data.index(b"\xff\x93"))  # openjpeg decodes headers alone, as black
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        for length in sorted(lengths):
            assert REFUSALS.match(refusal(data[:length])), length
    assert decoded(data).tolist() == whole.tolist()


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_decoded_or_refused(name: str, rng: np.random.Generator) -> None:
    data = bytes_of(written(drawn(rng, 3), name))
    executable = fusec.compile(decoder(len(data)), **CPU)
    refused: list[str] = []
    for _ in range(150):
        damaged = data.copy()
        places = rng.integers(0, len(data) if rng.random() < 0.5 else 64, int(rng.integers(1, 4)))
        damaged[places] = rng.integers(0, 256, len(places), dtype=np.uint8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                got = executable(damaged)
            except ExecutionError as error:
                refused.append(str(error))
            else:
                assert got.dtype == np.uint8 and got.ndim == 3
    assert refused
    assert all(words.startswith("node 'ImageDecoder_0' (ImageDecoder): ") for words in refused)


def huge_png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


def huge_bmp(width: int, height: int) -> bytes:
    return struct.pack("<2sIHHIIiiHHIIiiII", b"BM", 1 << 20, 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)


def huge_webp(width: int, height: int) -> bytes:
    inner = written(np.full((8, 8, 3), 9, np.uint8), "WEBP")[12:]
    extended = (
        b"VP8X" + struct.pack("<I", 10) + bytes(4) + b"".join(struct.pack("<I", d - 1)[:3] for d in (width, height))
    )
    return b"RIFF" + struct.pack("<I", len(extended + inner) + 4) + b"WEBP" + extended + inner


def huge_ppm(width: int, height: int) -> bytes:
    return b"P6 %d %d 255\n" % (width, height) + bytes(99)


@pytest.mark.parametrize("size", [(60_000, 60_000), (9_500, 9_500), (16_000, 11_000)])
@pytest.mark.parametrize("declared", [huge_png, huge_bmp, huge_ppm])
def test_absurd_sizes_are_refused_before_decoding(
    declared: Callable[[int, int], bytes], size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that Pillow refuses, and those up to twice its limit, of which it warns."""
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("the pixels were decoded"))
    data = declared(*size)
    for action in ("error", "ignore"):
        assert "MAX_IMAGE_PIXELS" in refusal_within(MOST, data, action)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    if size[0] == 60_000:
        assert refusal_within(MOST, data) == "the image u8[60000,60000,3] takes 10.06 GiB; the limit is 2 GiB"


def test_an_absurd_size_in_a_webp_file() -> None:
    """Pillow reads it before libwebp does, which allocates an image of that size."""
    assert "MAX_IMAGE_PIXELS" in refusal_within(MOST, huge_webp(60_000, 60_000))


def refusal_within(most: int, data: bytes, action: Any = "error") -> str:
    """Return the error of decoding, with that action for warnings. Check the memory that Python allocates for it."""
    tracemalloc.start()
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        words = refusal(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < most
    return words


def test_a_lower_limit_of_pillow_holds(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    data = written(drawn(rng, 3))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 80)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "MAX_IMAGE_PIXELS" in refusal(data)


def test_pixels_without_a_range_are_refused(rng: np.random.Generator) -> None:
    floats = rng.uniform(0, 1, (9, 9)).astype(np.float32)
    for pixels in (floats, floats.astype(np.int32)):
        assert "floats or integers of 32 bits, which have no range" in refusal(written(pixels, "TIFF"))


def test_models_that_are_refused(rng: np.random.Generator) -> None:
    with pytest.raises(
        ModelError,
        match=r"node 'ImageDecoder_0' \(ImageDecoder\): pixel_format must be one of RGB, BGR, Grayscale, not",
    ):
        fusec.compile(decoder(9, "rgb"), **CPU)
    nodes = [n("ImageDecoder x -> y")]
    for shape, dtype in (([3, 4], U8), ([12], FLOAT)):
        made = model(nodes, [info("x", shape, dtype)], [info("y", None, U8)], opset=20)
        with pytest.raises(
            ModelError, match=r"node 'ImageDecoder_0' \(ImageDecoder\): needs the bytes of a file, u8 of one dim"
        ):
            fusec.compile(made, **CPU)
    with pytest.raises(ModelError, match="op ImageDecoder"):
        fusec.compile(model(nodes, [info("x", [9], U8)], [info("y", None, U8)], opset=19), **CPU)


def test_without_pillow_the_model_is_refused_on_import(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "PIL"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ModelError) as caught:
        fusec.compile(decoder(9), **CPU)
    words = str(caught.value)
    assert "ImageDecoder" in words and "node 'ImageDecoder_0'" in words
    assert "decoding images needs Pillow" in words and words.endswith("pip install 'fusec[images]'")


def test_onnx_cases_are_decoded_on_the_host() -> None:
    """tests/segments/test_onnx_suite.py compiles all cases of OPS without the values of their inputs."""
    assert "ImageDecoder" in OPS


def test_images_of_several_lengths(rng: np.random.Generator) -> None:
    made = decoder(1)
    made.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "length"
    session = fusec.InferenceSession(made, **CPU)
    for name in ("PNG", "BMP", "PPM"):
        source = drawn(rng, 3)
        assert session.run(None, {"x": bytes_of(written(source, name))})[0].tolist() == source.tolist()
