"""Make small configurations of models that people export, with random weights: backbones, heads, language, speech."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
import torch
import torchvision
import transformers as hf
from torch import nn

Made = tuple[nn.Module, tuple[torch.Tensor, ...]]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {"vocab_size": 100, **SIZES}
CAUSAL = {**TEXT, "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0}
STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
SPEECH = {"conv_dim": [16] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
BACKBONE = {"embedding_size": 8, **STAGES, "out_features": ["stage2", "stage3", "stage4"]}
SEQ2SEQ = {
    "vocab_size": 100,
    "d_model": 32,
    **{f"{part}_{what}": count for part in ("encoder", "decoder") for what, count in
       (("layers", 1), ("attention_heads", 4), ("ffn_dim", 64))},
    "use_cache": False,
}  # fmt: skip


class Outputs(nn.Module):
    """A model whose tensors are returned as a tuple, without caches.

    names: attributes of the model's result; by default its last hidden state.
    """

    def __init__(self, model: nn.Module, *names: str):
        super().__init__()
        self.model = model
        self.names = names or ("last_hidden_state",)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the model on its inputs."""
        found = self.model(*inputs)
        return tuple(getattr(found, name) for name in self.names)


class Heads(nn.Module):
    """The backbone and heads of a detector of torchvision, without the search for boxes after them."""

    def __init__(self, detector: nn.Module):
        super().__init__()
        self.backbone, self.head = detector.backbone, detector.head

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the raw outputs of the heads by name."""
        return self.head(list(self.backbone(x).values()))


class Dense(nn.Module):
    """A segmentation network of torchvision, which returns a dict."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the classes of each pixel."""
        return self.model(x)["out"]


def image(size: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 3, size, size)


def tokens(length: int = 12, batch: int = 2) -> torch.Tensor:
    return torch.randint(3, 90, (batch, length))


def vision(name: str, size: int = 64, **options: Any) -> Callable[[], Made]:
    """Make a classifier of torchvision."""
    return lambda: (getattr(torchvision.models, name)(weights=None, num_classes=10, **options), (image(size),))


def heads(name: str, size: int, **options: Any) -> Callable[[], Made]:
    """Make the heads of a detector of torchvision."""
    builder = getattr(torchvision.models.detection, name)
    return lambda: (Heads(builder(weights=None, weights_backbone=None, num_classes=7, **options)), (image(size),))


def dense(name: str) -> Callable[[], Made]:
    builder = getattr(torchvision.models.segmentation, name)
    return lambda: (Dense(builder(weights=None, weights_backbone=None, num_classes=5)), (image(64),))


def of_timm(name: str, size: int = 64, **options: Any) -> Callable[[], Made]:
    """Make a classifier of timm."""
    return lambda: (timm.create_model(name, pretrained=False, num_classes=10, **options), (image(size),))


def text(name: str, config: dict[str, Any] = TEXT, **more: Any) -> Callable[[], Made]:
    """Make an encoder or decoder of transformers that reads tokens."""
    return lambda: (Outputs(_model(name, {**config, **more})), (tokens(),))


def sight(name: str, size: int = 32, *names: str, **config: Any) -> Callable[[], Made]:
    """Make a vision model of transformers. names: what it returns."""
    return lambda: (Outputs(_model(name, config), *names), (image(size),))


def _model(name: str, config: dict[str, Any]) -> nn.Module:
    """Build a model class of transformers from the fields of its configuration."""
    model = getattr(hf, name)
    return model(model.config_class(**config))


def _detr() -> Made:
    config = hf.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
        backbone_config=hf.ResNetConfig(**{**BACKBONE, "out_features": ["stage4"]}), num_queries=7,
        **{k: v for k, v in SEQ2SEQ.items() if k not in ("vocab_size", "use_cache")},
    )  # fmt: skip
    return Outputs(hf.DetrForObjectDetection(config), "logits", "pred_boxes"), (image(64),)


def _translation(name: str, **config: Any) -> Callable[[], Made]:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = _model(name, config)

        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=source, decoder_input_ids=target).last_hidden_state

    return lambda: (Both(), (tokens(), tokens(9)))


def _speech(name: str) -> Callable[[], Made]:
    return lambda: (Outputs(_model(name, {**SIZES, **SPEECH})), (torch.randn(1, 4000),))


PLAIN = ("resnet10t", "mobilenetv4_conv_small", "ghostnet_100", "repvgg_a0", "hgnetv2_b0", "edgenext_xx_small",
         "mobilevit_xxs", "fastvit_t8", "poolformerv2_s12", "dla34", "inception_next_atto", "eca_nfnet_l0", "pvt_v2_b0",
         "hrnet_w18_small")  # fmt: skip
# timm's models whose size of images is an option
SIZED = (
    "deit_tiny_patch16_224", "mixer_s32_224", "resmlp_12_224", "xcit_nano_12_p16_224", "visformer_tiny"
)  # fmt: skip
PATCHES = {"image_size": 32, "patch_size": 8}
T5 = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
MODELS: dict[str, dict[str, Callable[[], Made]]] = {
    "torchvision": {
        "alexnet": vision("alexnet"),
        "vgg11_bn": vision("vgg11_bn", 32),
        "resnet18": vision("resnet18"),
        "resnext50_32x4d": vision("resnext50_32x4d"),
        "densenet121": vision("densenet121"),
        "googlenet": vision("googlenet", aux_logits=False, init_weights=False),
        "squeezenet1_1": vision("squeezenet1_1"),
        "mobilenet_v2": vision("mobilenet_v2"),
        "mobilenet_v3_small": vision("mobilenet_v3_small"),
        "shufflenet_v2_x0_5": vision("shufflenet_v2_x0_5"),
        "mnasnet0_5": vision("mnasnet0_5"),
        "regnet_y_400mf": vision("regnet_y_400mf"),
        "efficientnet_b0": vision("efficientnet_b0"),
        "convnext_tiny": vision("convnext_tiny"),
        "swin_t": vision("swin_t"),
        "vit": lambda: (torchvision.models.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=10), (image(32),)),
        "lraspp": dense("lraspp_mobilenet_v3_large"),
        "deeplabv3": dense("deeplabv3_mobilenet_v3_large"),
        "ssdlite heads": heads("ssdlite320_mobilenet_v3_large", 96),
        "retinanet heads": heads("retinanet_resnet50_fpn", 64),
        "fcos heads": heads("fcos_resnet50_fpn", 64),
    },
    "timm": {name: of_timm(name) for name in PLAIN} | {name: of_timm(name, 64, img_size=64) for name in SIZED},
    "transformers": {
        "bert": text("BertModel"),
        "distilbert": text("DistilBertModel", {"vocab_size": 100, "dim": 32, "n_layers": 2, "n_heads": 4}),
        "albert": text("AlbertModel", embedding_size=16),
        "deberta": text("DebertaV2Model"),
        "gpt2": text("GPT2Model", {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False}),
        "gpt_neox": text("GPTNeoXModel", use_cache=False),
        "llama": text("LlamaModel", CAUSAL),
        "qwen2": text("Qwen2Model", CAUSAL),
        "gemma": text("GemmaModel", CAUSAL, head_dim=8),
        "mamba": text("MambaModel", {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "use_cache": False}),
        "t5": _translation("T5Model", **T5, use_cache=False),
        "bart": _translation("BartModel", **SEQ2SEQ),
        "wav2vec2": _speech("Wav2Vec2Model"),
        "clip vision": sight("CLIPVisionModel", **SIZES, **PATCHES),
        "siglip vision": sight("SiglipVisionModel", **SIZES, **PATCHES),
        "dinov2": sight("Dinov2Model", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **PATCHES),
        "convnextv2": sight("ConvNextV2Model", **STAGES),
        "segformer": sight(
            "SegformerForSemanticSegmentation", 64, "logits", num_attention_heads=[1, 2, 2, 4], **STAGES
        ),
        "yolos": sight(
            "YolosForObjectDetection", 32, "logits", "pred_boxes",
            **SIZES, image_size=[32, 32], patch_size=8, num_detection_tokens=5,
        ),
        "detr": _detr,
    },
}  # fmt: skip
