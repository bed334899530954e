"""List the models of docs/models.md, with the frozen part of each.

The rule: freeze the first two thirds of a model's blocks (rounded up), and every module registered before the
last of them. This is the practice of fine-tuning the upper part of a network: its stem or embeddings and its
lower blocks stay. Blocks are the units that a model's authors repeat: residual blocks, transformer layers,
cells. Where a model has no blocks to count (one block that is called again and again, an encoder and a
decoder, two towers), the list names the frozen modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from upriver.program.freeze import freeze_to


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One model of the table.

    Attributes:
        name: Name for ``load_model``.
        family: Family that the model represents.
        blocks: Pattern of its blocks' module paths, segment by segment.
        through: The last frozen module, where no blocks can be counted; empty if only ``also`` is frozen.
        also: Also frozen: modules that run among the frozen blocks but are registered after them.
        settings: Changes to the model's configuration that make the frozen part deterministic in training.
    """

    name: str
    family: str
    blocks: str = ""
    through: str = ""
    also: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def library(self) -> str:
        """Return torchvision, timm, transformers, or the module of our own models."""
        return self.name.partition(":")[0]

    def freeze(self, model: nn.Module) -> str:
        """Freeze a model by the rule. Return the last frozen block, or the other frozen modules."""
        for key, value in self.settings.items():
            setattr(model.config, key, value)
        for path in self.also:
            model.get_submodule(path).requires_grad_(False)
        last = self.through
        if self.blocks:
            last = _at_two_thirds([path for path, _ in model.named_modules()], self.blocks)
        if last:
            freeze_to(model, last)
        return last or ", ".join(self.also)


def _at_two_thirds(paths: Iterable[str], pattern: str) -> str:
    wanted = pattern.split(".")
    blocks = [path for path in paths if _fits(path.split("."), wanted)]
    if not blocks:
        raise ValueError(f"the model has no module like {pattern!r}")
    return blocks[math.ceil(len(blocks) * 2 / 3) - 1]


def _fits(path: list[str], pattern: list[str]) -> bool:
    return len(path) == len(pattern) and all(map(fnmatchcase, path, pattern))


def _entries(library: str, table: Mapping[str, tuple[str, str]]) -> tuple[Entry, ...]:
    return tuple(
        Entry(name=f"{library}:{name}", family=family, blocks=blocks)
        for name, (family, blocks) in table.items()
    )


TORCHVISION = _entries(
    "torchvision",
    {
        "alexnet": ("AlexNet", "features.*"),
        "vgg16": ("VGG", "features.*"),
        "resnet18": ("ResNet", "layer?.*"),
        "resnet50": ("ResNet", "layer?.*"),
        "resnext50_32x4d": ("ResNeXt", "layer?.*"),
        "wide_resnet50_2": ("Wide ResNet", "layer?.*"),
        "densenet121": ("DenseNet", "features.*"),
        "googlenet": ("GoogLeNet, auxiliary heads", "inception*"),
        "inception_v3": ("Inception v3, auxiliary head", "Mixed_*"),
        "mobilenet_v2": ("MobileNet v2", "features.*"),
        "mobilenet_v3_large": ("MobileNet v3", "features.*"),
        "mnasnet1_0": ("MNASNet", "layers.*"),
        "shufflenet_v2_x1_0": ("ShuffleNet v2", "stage?.*"),
        "squeezenet1_1": ("SqueezeNet", "features.*"),
        "efficientnet_b0": ("EfficientNet", "features.[1-7].*"),
        "efficientnet_v2_s": ("EfficientNet v2", "features.[1-6].*"),
        "regnet_x_1_6gf": ("RegNet X", "trunk_output.*.*"),
        "regnet_y_1_6gf": ("RegNet Y", "trunk_output.*.*"),
        "convnext_tiny": ("ConvNeXt", "features.[1357].*"),
        "vit_b_16": ("ViT", "encoder.layers.*"),
        "swin_t": ("Swin", "features.[1357].*"),
        "swin_v2_t": ("Swin v2", "features.[1357].*"),
        "maxvit_t": ("MaxViT", "blocks.*.layers.*"),
    },
)

TIMM = (
    *_entries(
        "timm",
        {
            "vit_small_patch16_224": ("ViT", "blocks.*"),
            "eva02_tiny_patch14_224": ("EVA-02, rotary", "blocks.*"),
            "cait_xxs24_224": ("CaiT", "blocks.*"),
            "xcit_tiny_12_p16_224": ("XCiT", "blocks.*"),
            "crossvit_tiny_240": ("CrossViT, two branches", "blocks.*"),
            "mixer_s16_224": ("MLP-Mixer", "blocks.*"),
            "convnextv2_atto": ("ConvNeXt v2", "stages.*.blocks.*"),
            "resnetv2_50": ("ResNet v2", "stages.*.blocks.*"),
            "res2net50_26w_4s": ("Res2Net", "layer?.*"),
            "repvgg_a0": ("RepVGG", "stages.*.*"),
            "nfnet_l0": ("NFNet", "stages.*.*"),
            "dla34": ("DLA", "level?"),
            "hrnet_w18_small": ("HRNet, four branches", "stage?.*"),
            "ghostnet_100": ("GhostNet", "blocks.*.*"),
            "mobilenetv3_small_100": ("MobileNet v3", "blocks.*.*"),
            "mobilenetv4_conv_small": ("MobileNet v4", "blocks.*.*"),
            "rexnet_100": ("ReXNet", "features.*"),
            "poolformer_s12": ("PoolFormer", "stages.*.blocks.*"),
            "levit_128s": ("LeViT", "stages.*.blocks.*"),
            "pvt_v2_b0": ("PVT v2", "stages.*.blocks.*"),
            "edgenext_xx_small": ("EdgeNeXt", "stages.*.blocks.*"),
            "fastvit_t8": ("FastViT", "stages.*.blocks.*"),
            "efficientformer_l1": ("EfficientFormer", "stages.*.blocks.*"),
            "focalnet_tiny_srf": ("FocalNet", "layers.*.blocks.*"),
            "davit_tiny": ("DaViT", "stages.*.blocks.*"),
            "volo_d1_224": ("VOLO", "network.[0234].*"),
        },
    ),
    Entry(
        name="timm:twins_svt_small",
        family="Twins",
        blocks="blocks.*.*",
        also=("pos_block.0", "pos_block.1", "pos_block.2"),
    ),
)

_UNMASKED = {"apply_spec_augment": False, "layerdrop": 0.0}
"""Sound models mask their input and drop layers in training, inside the frozen part."""

TRANSFORMERS = (
    *_entries(
        "transformers",
        {
            "bert": ("BERT", "bert.encoder.layer.*"),
            "roberta": ("RoBERTa", "roberta.encoder.layer.*"),
            "distilbert": ("DistilBERT", "distilbert.transformer.layer.*"),
            "electra": ("ELECTRA", "electra.encoder.layer.*"),
            "mobilebert": ("MobileBERT", "mobilebert.encoder.layer.*"),
            "modernbert": ("ModernBERT", "model.layers.*"),
            "xlnet": ("XLNet", "transformer.layer.*"),
            "T5EncoderModel": ("T5 encoder (t5-small)", "encoder.block.*"),
            "gpt2": ("GPT-2", "transformer.h.*"),
            "gpt_neox": ("GPT-NeoX (pythia-160m)", "gpt_neox.layers.*"),
            "opt": ("OPT", "model.decoder.layers.*"),
            "llama": ("Llama (SmolLM-135M)", "model.layers.*"),
            "vit": ("ViT", "vit.layers.*"),
            "swin": ("Swin", "swin.encoder.layers.*.blocks.*"),
            "dinov2": ("DINOv2", "dinov2.encoder.layer.*"),
            "segformer": ("SegFormer", "segformer.stages.*.blocks.*"),
            "mobilevit": ("MobileViT", "mobilevit.encoder.layer.*"),
            "CLIPVisionModel": ("CLIP vision", "encoder.layers.*"),
            "WhisperEncoder": ("Whisper encoder (whisper-tiny)", "layers.*"),
        },
    ),
    Entry(
        name="transformers:deberta-v2",
        family="DeBERTa v2 (deberta-v3-base)",
        blocks="deberta.encoder.layer.*",
        also=("deberta.encoder.rel_embeddings", "deberta.encoder.LayerNorm"),
    ),
    Entry(
        name="transformers:albert",
        family="ALBERT (albert-base-v2), one layer for all",
        through="albert.encoder",
    ),
    Entry(name="transformers:t5", family="T5 (t5-small), encoder frozen", through="transformer.encoder"),
    *(
        Entry(
            name=f"transformers:{name}",
            family=family,
            blocks=f"{name}.encoder.layers.*",
            settings=_UNMASKED,
        )
        for name, family in (("wav2vec2", "wav2vec 2.0"), ("hubert", "HuBERT"))
    ),
)

OWN = (
    Entry(name="own_models:early_exit", family="branch on data after the freeze point", through="blocks.5"),
    Entry(name="own_models:detour", family="branch on data inside the frozen part", blocks="blocks.*"),
    Entry(name="own_models:checked", family="branch on data before everything", blocks="blocks.*"),
    Entry(
        name="own_models:two_towers",
        family="three named inputs, second tower frozen",
        also=("text",),
    ),
    Entry(name="own_models:unet", family="U-Net, encoder frozen", through="down.3", also=("shrink",)),
    Entry(name="own_models:siamese", family="encoder called twice, two inputs", through="encoder"),
    Entry(name="own_models:pyramid", family="named tuple, an input that is None", through="backbone"),
    Entry(name="own_models:centred", family="batch mixing: must be refused", blocks="blocks.*"),
)

ENTRIES = (*OWN, *TORCHVISION, *TRANSFORMERS, *TIMM)
"""Every model of the table."""

PART = (
    "torchvision:alexnet",
    "torchvision:resnet18",
    "timm:mobilenetv3_small_100",
    "transformers:electra",
    "transformers:T5EncoderModel",
    "own_models:early_exit",
    "own_models:two_towers",
    "own_models:centred",
)
"""Quick models of each library, and one that must be refused. Every change checks them again."""
