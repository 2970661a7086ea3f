"""Export small configurations of twenty architectures with both of torch's exporters, for tests/exported.

Usage, with torch, transformers and onnxscript installed: python benchmarks/checks/export_models.py [NAME ...]
Writes tests/exported/models.zip, without the large weights.
"""

from __future__ import annotations

import io
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import onnx  # noqa: E402  # the tests folder must be on the path first
import torch  # noqa: E402
import transformers as hf  # noqa: E402
from exported.packing import pack  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from transformers.models.whisper.modeling_whisper import WhisperEncoder  # noqa: E402

DYNAMO_ONLY = ("gpt2", "llama")  # because torch's TorchScript exporter fails on the masks that transformers makes
COMMON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {"vocab_size": 100, **COMMON}


class Last(nn.Module):
    """A model of transformers whose output is its last hidden state."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).last_hidden_state


class UNet(nn.Module):
    """Group norms, cross-attention, a transposed convolution and a skip connection."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.down = nn.Conv2d(16, 32, 3, 2, 1)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.up, self.last = nn.ConvTranspose2d(32, 16, 2, 2), nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        skip = functional.silu(self.norm(self.first(x)))
        low = functional.silu(self.down(skip))
        tokens = low.flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(tokens, context, context, need_weights=False)[0]
        low = tokens.transpose(1, 2).reshape(low.shape)
        high = functional.interpolate(self.up(low), size=x.shape[-2:], mode="bilinear", align_corners=False)
        return self.last(torch.cat([high, skip], 1))


class DeepLab(nn.Module):
    """Dilated branches, a pooled branch, and bilinear resizes."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.branches = nn.ModuleList(nn.Conv2d(16, 8, 3, padding=d, dilation=d) for d in (1, 2, 4))
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 8, 1))
        self.last = nn.Conv2d(32, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.stem(x)
        pooled = functional.interpolate(self.pooled(low), size=low.shape[-2:], mode="bilinear", align_corners=False)
        y = self.last(torch.cat([*[branch(low) for branch in self.branches], pooled], 1))
        return functional.interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=False)


class Detector(nn.Module):
    """Heads of classes and boxes; the outputs are the best ten."""

    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 16, 3, 2, 1)
        self.classes, self.boxes = nn.Conv2d(16, 3 * 5, 1), nn.Conv2d(16, 3 * 4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = functional.mish(self.body(x))
        classes = torch.sigmoid(self.classes(y)).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 5)
        boxes = self.boxes(y).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4)
        best, places = torch.topk(classes.max(-1).values, 10, dim=1)
        return best, torch.gather(boxes, 1, places[..., None].expand(-1, -1, 4))


class Recurrent(nn.Module):
    """Two layers of LSTM in both directions."""

    def __init__(self):
        super().__init__()
        self.lstm, self.last = nn.LSTM(8, 12, 2, batch_first=True, bidirectional=True), nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.lstm(x)[0])


def volume() -> nn.Module:
    norm = (nn.InstanceNorm3d(8, affine=True), nn.LeakyReLU(0.1), nn.MaxPool3d(2))
    return nn.Sequential(nn.Conv3d(2, 8, 3, padding=1), *norm, nn.Conv3d(8, 4, 1), nn.AdaptiveAvgPool3d(1))


def image(size: int = 32, batch: int = 2) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 3, size, size),)


def tokens() -> tuple[torch.Tensor]:
    return (torch.randint(0, 90, (2, 16)),)


STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
SPEECH = {"conv_dim": [16] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
WHISPER = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "bert": (lambda: Last(hf.BertModel(hf.BertConfig(**TEXT))), tokens),
    "bilstm": (Recurrent, lambda: (torch.randn(2, 9, 8),)),
    "clip_text": (lambda: Last(hf.CLIPTextModel(hf.CLIPTextConfig(**TEXT))), tokens),
    "conv3d": (volume, lambda: (torch.randn(1, 2, 8, 8, 8),)),
    "convnext": (
        lambda: Last(hf.ConvNextModel(hf.ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1]))),
        image,
    ),
    "deberta": (lambda: Last(hf.DebertaV2Model(hf.DebertaV2Config(**TEXT))), tokens),
    "deeplab": (DeepLab, lambda: image(33, 1)),
    "detector": (Detector, lambda: image(16)),
    "efficientnet": (
        lambda: Last(
            hf.EfficientNetModel(
                hf.EfficientNetConfig(image_size=32, width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320)
            )
        ),
        image,
    ),
    "gpt2": (
        lambda: Last(hf.GPT2Model(hf.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, use_cache=False))),
        tokens,
    ),
    "llama": (lambda: Last(hf.LlamaModel(hf.LlamaConfig(**TEXT, num_key_value_heads=2, use_cache=False))), tokens),
    "mobilenetv2": (
        lambda: Last(hf.MobileNetV2Model(hf.MobileNetV2Config(depth_multiplier=0.25, image_size=32))),
        image,
    ),
    "resnet": (
        lambda: Last(hf.ResNetModel(hf.ResNetConfig(embedding_size=8, layer_type="bottleneck", **STAGES))),
        image,
    ),
    "segformer": (
        lambda: Last(hf.SegformerModel(hf.SegformerConfig(num_attention_heads=[1, 2, 2, 4], **STAGES))),
        image,
    ),
    "swin": (
        lambda: Last(
            hf.SwinModel(
                hf.SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
            )
        ),
        image,
    ),
    "t5enc": (
        lambda: Last(
            hf.T5EncoderModel(hf.T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4))
        ),
        tokens,
    ),
    "unet_xattn": (UNet, lambda: (torch.randn(1, 3, 16, 16), torch.randn(1, 7, 32))),
    "vit": (lambda: Last(hf.ViTModel(hf.ViTConfig(**COMMON, image_size=32, patch_size=8))), image),
    "wav2vec2": (
        lambda: Last(hf.Wav2Vec2Model(hf.Wav2Vec2Config(**COMMON, **SPEECH))),
        lambda: (torch.randn(1, 4000),),
    ),
    "whisper": (
        lambda: Last(WhisperEncoder(hf.WhisperConfig(**WHISPER, max_source_positions=50, num_mel_bins=20))),
        lambda: (torch.randn(1, 20, 100),),
    ),
}


def exported(name: str, dynamo: bool) -> onnx.ModelProto:
    make, arguments = MODELS[name]
    torch.manual_seed(0)
    model, inputs = make().eval(), arguments()
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.BatchNorm3d)):
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    options: dict[str, Any] = {"opset_version": 18 if dynamo else 17, "dynamo": dynamo}
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        if dynamo:
            file = str(Path(folder) / "model.onnx")
            torch.onnx.export(model, inputs, file, external_data=False, verbose=False, **options)
            return onnx.load(file)
        data = io.BytesIO()
        torch.onnx.export(model, inputs, data, **options)
        return onnx.load_from_string(data.getvalue())


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    models: dict[str, onnx.ModelProto] = {}
    for name in names or MODELS:
        for kind in ("script", "dynamo"):
            if kind == "dynamo" or name not in DYNAMO_ONLY:
                models[f"{name}-{kind}"] = exported(name, kind == "dynamo")
                print(f"{name}-{kind}: {len(models[f'{name}-{kind}'].graph.node)} nodes", flush=True)
    pack(models)


if __name__ == "__main__":
    main(sys.argv[1:])
