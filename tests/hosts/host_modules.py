"""Runs every hook on a host's own UNet and autoencoder, narrow ones with SD1.5's topology; prints JSON.

A program of its own, because hosts read the command line and put modules of common names in everybody's way. Started
as ``python host_modules.py comfyui|a1111|forge|reforge FOLDER``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sd_lowvram import Settings, attached
from sd_lowvram.models import dissect

KNOBS: dict[str, dict[str, Any]] = {
    "attention": {"attention": "fused-softmax", "attention_mib": 1},
    "feed_forward": {"feed_forward_chunks": 5},
    "residual_strips": {"residual_strips": 3},
    "transformer_chunks": {"transformer_chunks": 3},
    "park_skips": {"park_skips": True},
    "guidance_in_turn": {"guidance_in_turn": True},
}
TOGETHER = {name: value for knobs in KNOBS.values() for name, value in knobs.items()}
DECODER: dict[str, Any] = {
    "double_z": True,
    "z_channels": 4,
    "resolution": 64,
    "in_channels": 3,
    "out_ch": 3,
    "ch": 32,
    "ch_mult": [1, 2, 2, 2],
    "num_res_blocks": 2,
    "attn_resolutions": [],
    "dropout": 0.0,
}
UNET: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 32,
    "channel_mult": (1, 2, 2, 2),
    "num_heads": 4,
    "use_spatial_transformer": True,
    "context_dim": 32,
    "use_checkpoint": False,
}
DEPTHS: dict[str, Any] = {
    "num_res_blocks": [2] * 4,
    "transformer_depth": [1] * 6 + [0] * 2,
    "transformer_depth_output": [1] * 9 + [0] * 3,
    "transformer_depth_middle": 1,
}
RESOLUTIONS: dict[str, Any] = {"num_res_blocks": 2, "attention_resolutions": [4, 2, 1], "transformer_depth": 1}


def comfyui() -> tuple[nn.Module, nn.Module]:
    arguments = importlib.import_module("comfy.cli_args")
    arguments.args.cpu = True
    return _of_comfy("comfy")


def reforge() -> tuple[nn.Module, nn.Module]:
    arguments = importlib.import_module("ldm_patched.modules.args_parser").args
    arguments.always_cpu = arguments.cpu = True
    return _of_comfy("ldm_patched")


def _of_comfy(package: str) -> tuple[nn.Module, nn.Module]:
    unet = importlib.import_module(f"{package}.ldm.modules.diffusionmodules.openaimodel").UNetModel
    vae = importlib.import_module(f"{package}.ldm.models.autoencoder").AutoencoderKL
    return unet(image_size=32, legacy=False, dtype=torch.float32, **UNET, **DEPTHS), vae(ddconfig=DECODER, embed_dim=4)


def forge() -> tuple[nn.Module, nn.Module]:
    sys.argv.append("--always-cpu")
    import diffusers.configuration_utils  # noqa: F401, before what stands in for a package that it looks for

    with contextlib.suppress(ImportError):
        importlib.import_module("sentencepiece")
    stand_in = types.ModuleType("sentencepiece")
    stand_in.SentencePieceProcessor = object  # type: ignore[attr-defined]
    sys.modules.setdefault("sentencepiece", stand_in)
    sys.path.insert(1, str(Path(sys.path[0]) / "packages_3rdparty"))
    operations = importlib.import_module("backend.operations").ForgeOperations
    unet, vae = importlib.import_module("backend.nn.unet"), importlib.import_module("backend.nn.vae")
    with _layers_of(operations):
        models = (
            unet.IntegratedUNet2DConditionModel(**UNET, **DEPTHS),
            vae.IntegratedAutoencoderKL(block_out_channels=(32, 64, 64, 64), layers_per_block=2),
        )
    for layer in (layer for model in models for layer in model.modules() if hasattr(layer, "dummy")):
        layer.weight = nn.Parameter(torch.empty(layer.out_features, layer.in_features))
        layer.bias = nn.Parameter(torch.empty(layer.out_features))
        del layer.dummy
    return models


@contextlib.contextmanager
def _layers_of(operations: Any) -> Iterator[None]:
    names = ("Conv2d", "Linear", "GroupNorm", "LayerNorm")
    before = {name: getattr(nn, name) for name in names}
    for name in names:
        setattr(nn, name, getattr(operations, name))
    try:
        yield
    finally:
        for name, layer in before.items():
            setattr(nn, name, layer)


def a1111() -> tuple[nn.Module, nn.Module]:
    sys.path.insert(0, str(Path(sys.path[0]) / "repositories" / "stable-diffusion-stability-ai"))
    with contextlib.suppress(ImportError):
        importlib.import_module("pytorch_lightning")
    lightning = types.ModuleType("pytorch_lightning")
    lightning.LightningModule = nn.Module  # type: ignore[attr-defined]
    sys.modules.setdefault("pytorch_lightning", lightning)
    unet = importlib.import_module("ldm.modules.diffusionmodules.openaimodel").UNetModel
    vae = importlib.import_module("ldm.models.autoencoder").AutoencoderKL
    return unet(image_size=32, legacy=False, **UNET, **RESOLUTIONS), vae(DECODER, {"target": "torch.nn.Identity"}, 4)


def with_random_weights(module: nn.Module) -> nn.Module:
    noise = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.05, generator=noise)
        else:
            nn.init.uniform_(parameter, 0.5, 1.0, generator=noise)
    return module.eval().requires_grad_(False)


def compared(module: nn.Module, run: Callable[[], Tensor], knobs: dict[str, Any]) -> dict[str, Any]:
    """Sites hit, relative error against the plain run, and whether the module is as before afterwards."""
    expected = run()
    with attached(module, Settings(**knobs), device="cpu") as attachment:
        result = run()
    error = float((result.double() - expected.double()).norm() / expected.double().norm())
    return {"sites": attachment.sites, "error": error, "restored": torch.equal(run(), expected)}


def report(unet: Any, vae: Any) -> dict[str, Any]:
    noise = torch.Generator().manual_seed(1)
    latents, text = torch.randn(2, 4, 24, 32, generator=noise), torch.randn(2, 77, 32, generator=noise)
    pixels = torch.randn(1, 3, 152, 104, generator=noise)
    verbs = dissect(unet).verbs  # type: ignore[union-attr]
    found: dict[str, Any] = {}
    for name, knobs in {**KNOBS, "together": TOGETHER}.items():
        found[name] = compared(unet, lambda: verbs.predict(unet, latents, torch.tensor(500), text, {}), knobs)
    for kept in ("held", "parked", "recomputed"):
        exact = {"vae_tiles": "exact", "vae_map": kept, "vae_strip_mib": 1}
        found[f"decode {kept}"] = compared(vae, lambda: verbs.decode(vae, latents[:1, :, :19, :13]), exact)
        found[f"encode {kept}"] = compared(vae, lambda: verbs.encode(vae, pixels), exact)
    found["decode attention"] = compared(vae, lambda: verbs.decode(vae, latents), KNOBS["attention"])
    return found


def main() -> None:
    host, folder = sys.argv[1:3]
    sys.argv = sys.argv[:1]
    sys.path.insert(0, folder)
    out, sys.stdout = sys.stdout, sys.stderr  # hosts print
    with torch.no_grad():
        unet, vae = map(with_random_weights, globals()[host]())
        answer = report(unet, vae)
    print(json.dumps(answer), file=out, flush=True)
    os._exit(0)  # threads that a host has started are not waited for


if __name__ == "__main__":
    main()
