"""Mixers inside networks of timm, transformers, MONAI and deepinv, small ones with their usual structure."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from chasm import swap
from chasm.surgery.swapped import Swapped
from libraries import library

IMAGE = torch.randn(2, 3, 64, 64)


def places(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, Swapped)]


def grids_seen(model: nn.Module, **inputs: Tensor) -> list[tuple[int, ...]]:
    """The spatial size of what each mixer gets when the network runs."""
    seen: list[tuple[int, ...]] = []
    hooks = [p.mixer.register_forward_pre_hook(lambda _, x: seen.append(tuple(x[0].shape[2:]))) for p in places(model)]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return seen


def test_timm_vit() -> None:
    create = library("timm").create_model
    vit = create("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=10, dynamic_img_size=True)
    with pytest.warns(UserWarning, match="read from a class token"):
        swap(vit, "blocks.*.attn", "chasm", example=IMAGE)
    vit.global_pool = "avg"
    model = swap(vit, "blocks.*.attn", "chasm", example=IMAGE)
    assert [(p.layout, p.prefix) for p in places(model)] == [("tokens", 1)] * 2
    assert grids_seen(model, x=torch.randn(1, 3, 64, 64)) == [(4, 4)] * 2
    assert grids_seen(model, x=torch.randn(1, 3, 32, 128)) == [(2, 8)] * 2
    model(IMAGE).sum().backward()
    assert all(p.grad is not None for p in places(model)[0].mixer.parameters())


@pytest.mark.parametrize(("place", "layout"), [("conv_dw", "channels_first"), ("mlp", "channels_last")])
def test_timm_convnext(place: str, layout: str) -> None:
    create = library("timm").create_model
    options = {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 16), "num_classes": 10}
    model = swap(create("convnext_tiny", **options), f"stages.*.blocks.*.{place}", "gfnet", example=IMAGE)
    assert [p.layout for p in places(model)] == [layout] * 4
    assert grids_seen(model, x=IMAGE) == [(16, 16), (8, 8), (4, 4), (2, 2)]
    assert model(IMAGE).shape == (2, 10)


def test_timm_metaformer() -> None:
    metaformer = library("timm").models.metaformer
    mixers = (metaformer.Pooling, metaformer.SepConv, metaformer.Attention, metaformer.Attention)
    norms = (metaformer.LayerNorm2dNoBias,) * 2 + (metaformer.LayerNormNoBias,) * 2
    sizes = {"depths": (1, 1, 1, 1), "dims": (8, 16, 32, 64), "num_classes": 10}
    host = metaformer.MetaFormer(**sizes, token_mixers=mixers, norm_layers=norms)
    model = swap(host, "stages.*.blocks.*.token_mixer", "gfnet", example=IMAGE)
    assert [p.layout for p in places(model)] == ["channels_first"] * 2 + ["tokens"] * 2
    assert grids_seen(model, x=torch.randn(1, 3, 32, 128)) == [(8, 32), (4, 16), (2, 8), (1, 4)]


def test_transformers_vit(tmp_path: Path) -> None:
    transformers = library("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(**sizes, image_size=64, patch_size=16)
    vit = transformers.ViTForImageClassification(config).eval()
    with pytest.warns(UserWarning, match="read from a class token"):
        swap(vit, "*.attention", "chasm", example={"pixel_values": IMAGE})
    model = swap(vit, "vit.layers.0.attention", "chasm", example={"pixel_values": IMAGE})
    assert grids_seen(model, pixel_values=torch.randn(1, 3, 32, 128), interpolate_pos_encoding=True) == [(2, 8)]
    # Accumulating, the Trainer passes num_items_in_batch down to every attention.
    options = {"max_steps": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1, "use_cpu": True}
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True}
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), **options, **quiet)
    data = [{"pixel_values": image, "labels": i} for i, image in enumerate(IMAGE)]
    before = places(model)[0].mixer.gain_table["ch"].clone()
    transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
    assert not torch.equal(places(model)[0].mixer.gain_table["ch"], before)
    model.eval()
    with torch.no_grad():
        exported = torch.export.export(model, (), {"pixel_values": IMAGE}).module()  # with a mask that hides nothing
        assert torch.allclose(exported(pixel_values=IMAGE).logits, model(pixel_values=IMAGE).logits, atol=1e-5)


def test_transformers_segformer() -> None:
    transformers = library("transformers")
    sizes = {"hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 1, 2, 2], "decoder_hidden_size": 16}
    config = transformers.SegformerConfig(**sizes, depths=[1, 1, 1, 1])
    segformer = transformers.SegformerForSemanticSegmentation(config).eval()
    model = swap(segformer, "*.attention", "chasm", example={"pixel_values": IMAGE})
    assert [p.layout for p in places(model)] == ["tokens"] * 4
    assert grids_seen(model, pixel_values=IMAGE) == [(16, 16), (8, 8), (4, 4), (2, 2)]
    assert grids_seen(model, pixel_values=torch.randn(1, 3, 32, 128)) == [(8, 32), (4, 16), (2, 8), (1, 4)]


@pytest.mark.parametrize("ndim", [2, 3])
def test_monai_unet(ndim: int) -> None:
    nets = pytest.importorskip("monai.networks.nets")
    unet = nets.UNet(ndim, 1, 1, channels=(4, 8), strides=(2,), num_res_units=2)
    x = torch.randn(1, 1, *[16] * ndim)
    model = swap(unet, "*.unit1.conv", "chasm", example=x, host_residual=False)
    assert [p.mixer.ndim for p in places(model)] == [ndim] * 2
    assert model(torch.randn(1, 1, *[8] * ndim)).shape == (1, 1, *[8] * ndim)


@pytest.mark.parametrize("ndim", [2, 3])
def test_monai_unetr(ndim: int) -> None:
    nets = pytest.importorskip("monai.networks.nets")
    size = (32, 16, 16)[:ndim]
    sizes = {"feature_size": 4, "hidden_size": 16, "mlp_dim": 16, "num_heads": 2, "spatial_dims": ndim}
    unetr = nets.UNETR(in_channels=1, out_channels=1, img_size=size, **sizes).eval()
    x = torch.randn(1, 1, *size)
    model = swap(unetr, "vit.blocks.*.attn", "chasm", example=x)
    assert [p.mixer.ndim for p in places(model)] == [ndim] * 12
    assert set(grids_seen(model, x_in=x)) == {(2, 1, 1)[:ndim]}
    assert model(x).shape == x.shape


def test_deepinv_drunet() -> None:
    models = library("deepinv").models
    drunet = models.DRUNet(in_channels=2, out_channels=2, nc=(4, 8, 8, 8), nb=1, pretrained=None)
    x = torch.randn(1, 2, 32, 32)
    model = swap(drunet, "m_body", "chasm", example=(x, 0.1), host_residual=False)
    assert [p.mixer.channels for p in places(model)] == [8]
    assert model(torch.randn(1, 2, 40, 24), 0.1).shape == (1, 2, 40, 24)
