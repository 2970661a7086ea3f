"""Decode image files on the host, with Pillow. The bytes may come from strangers."""

from __future__ import annotations

import importlib
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from fusec.errors import FusecError, VerifyError
from fusec.frontends.onnx.model_file.limits import require_constant
from fusec.ir import DType, HostArray, TensorType
from fusec.ops.spec import require

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

# Pillow's names of the formats that ONNX lists. Pillow has decoders for many others, which strangers must not reach.
FORMATS = ("BMP", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
# Pillow's mode for each pixel format of ONNX. A mode has one letter for each channel.
MODES = {"RGB": "RGB", "BGR": "RGB", "Grayscale": "L"}
_END_OF_JPEG2000 = b"\xff\xd9"  # occurs in no compressed data


def require_pillow() -> None:
    """Check that Pillow is installed. Raises VerifyError with the remedy."""
    try:
        importlib.import_module("PIL.Image")
    except ImportError as error:
        raise VerifyError(f"decoding images needs Pillow ({error}): pip install 'fusec[images]'") from None


def decode(data: bytes, pixel_format: str) -> HostArray:
    """Decode an image file, and return its pixels: u8 of shape [height, width, channels].

    The first image of a file of several is decoded. Alpha is dropped, and an orientation in EXIF is not applied,
    because ONNX names neither. Pillow applies the orientation of TIFF files, which is a part of that format.

    Raises VerifyError if the bytes cannot be decoded, or the image is too large. Nothing is allocated for it then.
    """
    from PIL import Image

    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            mode = MODES[pixel_format]
            _require_size(image, len(mode))
            pixels = _pixels(image, mode)
            require(image.format != "JPEG2000" or _END_OF_JPEG2000 in data, "the image file is truncated")
    except FusecError:
        raise
    except Image.UnidentifiedImageError as error:
        raise VerifyError(f"the {len(data)} bytes are no image in the formats {', '.join(FORMATS)}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise VerifyError(f"Pillow refuses the image (PIL.Image.MAX_IMAGE_PIXELS is the limit): {error}") from error
    except Exception as error:  # decoders raise exceptions of many classes for damaged files
        raise VerifyError(f"Pillow cannot decode the image: {type(error).__name__}: {error}") from error
    return np.ascontiguousarray(pixels[..., ::-1]) if pixel_format == "BGR" else pixels


def _require_size(image: ImageFile, channels: int) -> None:
    """Check the size that the header declares. Pillow only warns of images up to twice its limit."""
    from PIL import Image

    limit = Image.MAX_IMAGE_PIXELS
    require(
        limit is None or image.width * image.height <= limit,
        f"the image has {image.width} x {image.height} pixels; the limit is {limit} (PIL.Image.MAX_IMAGE_PIXELS)",
    )
    require_constant(TensorType((image.height, image.width, channels), DType.U8), "the image")


def _pixels(image: ImageFile, mode: str) -> HostArray:
    """Return the pixels of an image in a mode of 8 bits. Pillow would clip gray values of 16 bits to 255."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        gray = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        pixels = np.array(gray.convert(mode))
    else:
        require(image.mode not in ("I", "F"), "the image has floats or integers of 32 bits, which have no range")
        pixels = np.array(image.convert(mode))
    return pixels.reshape(*pixels.shape[:2], len(mode))
