"""Runs every hook on a host's own UNet and autoencoder, narrow ones with the topology of SD1.5 or SDXL, and traces
the full-size UNet of SD1.5; prints JSON.

A program of its own, because hosts read the command line and put modules of common names in everybody's way. Started
as ``python host_modules.py comfyui|a1111|a1111_sdxl|forge|reforge FOLDER``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from compvis import DECODER, lightning_at_hand, with_random_weights
from torch import Tensor, nn
from unet_bounds import BOUNDS, SMALLEST

from sd_lowvram import Settings, attached
from sd_lowvram.compat import computes_on_cpu
from sd_lowvram.models import dissect
from sd_lowvram.models.calls import StepInputs
from sd_lowvram.patches import set_patch
from sd_lowvram.tracing import trace
from sd_lowvram.weights import weight_bytes

KNOBS: dict[str, dict[str, Any]] = {
    "attention": {"attention": "fused-softmax", "attention_mib": 1},
    "feed_forward": {"feed_forward_chunks": 5},
    "residual_strips": {"residual_strips": 3},
    "transformer_chunks": {"transformer_chunks": 3},
    "park_skips": {"park_skips": True},
    "guidance_in_turn": {"guidance_in_turn": True},
}
TOGETHER = {name: value for knobs in KNOBS.values() for name, value in knobs.items()}
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
FULL: dict[str, Any] = {**UNET, "model_channels": 320, "channel_mult": (1, 2, 4, 4), "num_heads": 8, "context_dim": 768}
DEPTHS: dict[str, Any] = {
    "num_res_blocks": [2] * 4,
    "transformer_depth": [1] * 6 + [0] * 2,
    "transformer_depth_output": [1] * 9 + [0] * 3,
    "transformer_depth_middle": 1,
}
RESOLUTIONS: dict[str, Any] = {"num_res_blocks": 2, "attention_resolutions": [4, 2, 1], "transformer_depth": 1}
SDXL: dict[str, Any] = {
    **UNET,
    "num_res_blocks": 2,
    "attention_resolutions": [4, 2],
    "channel_mult": (1, 2, 4),
    "num_heads": -1,
    "num_head_channels": 16,
    "transformer_depth": [1, 2, 10],
    "use_linear_in_transformer": True,
    "num_classes": "sequential",
    "adm_in_channels": 48,
}
Models = tuple[Callable[..., Any], Any]
"""What makes a UNet of given widths, and a narrow autoencoder."""


def comfyui() -> Models:
    arguments = importlib.import_module("comfy.cli_args")
    arguments.args.cpu = True
    return _of_comfy("comfy")


def reforge() -> Models:
    arguments = importlib.import_module("ldm_patched.modules.args_parser").args
    arguments.always_cpu = arguments.cpu = True
    return _of_comfy("ldm_patched")


def _of_comfy(package: str) -> Models:
    unet = importlib.import_module(f"{package}.ldm.modules.diffusionmodules.openaimodel").UNetModel
    vae = importlib.import_module(f"{package}.ldm.models.autoencoder").AutoencoderKL
    made = functools.partial(unet, image_size=32, legacy=False, dtype=torch.float32, **DEPTHS)
    return made, vae(ddconfig=DECODER, embed_dim=4)


def forge() -> Models:
    neo = (Path(sys.path[0]) / "backend" / "nn" / "anima.py").exists()
    sys.argv.append("--cpu" if neo else "--always-cpu")
    import diffusers.configuration_utils  # noqa: F401, before what stands in for a package that it looks for

    with contextlib.suppress(ImportError):
        importlib.import_module("sentencepiece")
    stand_in = types.ModuleType("sentencepiece")
    stand_in.SentencePieceProcessor = object  # type: ignore[attr-defined]
    sys.modules.setdefault("sentencepiece", stand_in)
    sys.path.insert(1, str(Path(sys.path[0]) / ("modules_forge/packages" if neo else "packages_3rdparty")))
    unet = importlib.import_module("backend.nn.unet").IntegratedUNet2DConditionModel
    vae = importlib.import_module("backend.nn.vae").IntegratedAutoencoderKL
    made = functools.partial(_of_forge, unet, **DEPTHS)
    return made, _of_forge(vae, block_out_channels=(32, 64, 64, 64), layers_per_block=2)


def _of_forge(kind: Any, **widths: Any) -> Any:
    with _layers_of(importlib.import_module("backend.operations").ForgeOperations):
        model = kind(**widths)
    for layer in (layer for layer in model.modules() if hasattr(layer, "dummy")):
        layer.weight = nn.Parameter(torch.empty(layer.out_features, layer.in_features))
        layer.bias = nn.Parameter(torch.empty(layer.out_features))
        del layer.dummy
    return model


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


def autoencoders_of_neo() -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """Forge Neo's autoencoders of Wan and Qwen-Image, narrow, by their names, and the shape of latents for each."""
    with contextlib.suppress(ImportError):
        frames = importlib.import_module("backend.nn.wan_vae").WanVAE
        pictures = importlib.import_module("backend.nn.wan_vae_2d").Qwen2DVAE
        sizes = {"base_dim": 16, "z_dim": 16, "num_res_blocks": 1}
        for kind, frame in ((frames, (3,)), (frames, (1,)), (pictures, (1,)), (pictures, ())):
            with _layers_of(importlib.import_module("backend.operations").ForgeOperations):
                made = kind(**sizes)
            yield f"{kind.__name__} {frame}", made, (1, 16, *frame, 19, 13)


def a1111() -> Models:
    _from_repository("stable-diffusion-stability-ai")
    with lightning_at_hand():
        vae = importlib.import_module("ldm.models.autoencoder").AutoencoderKL
    unet = importlib.import_module("ldm.modules.diffusionmodules.openaimodel").UNetModel
    made = functools.partial(unet, image_size=32, legacy=False, **RESOLUTIONS)
    return made, vae(DECODER, {"target": "torch.nn.Identity"}, 4)


def a1111_sdxl() -> Models:
    _from_repository("generative-models")
    unet = importlib.import_module("sgm.modules.diffusionmodules.openaimodel").UNetModel
    vae = importlib.import_module("sgm.models.autoencoder").AutoencoderKLInferenceWrapper
    return unet, vae(embed_dim=4, ddconfig=DECODER, lossconfig={"target": "torch.nn.Identity"})


def _from_repository(name: str) -> None:
    sys.path.insert(0, str(Path(sys.path[0]) / "repositories" / name))


def exactly(vae: Any, latents: Tensor) -> dict[str, Any]:
    """The decode and the encode of its pixels in the smallest strips, each as :func:`compared` returns it."""
    tiles = {"vae_tiles": "exact", "vae_strip_mib": 1}
    pixels = vae.decode(latents)
    return {
        "decode": compared(vae, lambda: vae.decode(latents), tiles),
        "encode": compared(vae, lambda: vae.encode(pixels), tiles),
    }


def compared(module: nn.Module, run: Callable[[], Tensor], knobs: dict[str, Any]) -> dict[str, Any]:
    """Sites hit, relative error against the plain run, and whether the module is as before afterwards."""
    expected = run()
    with attached(module, Settings(**knobs), device="cpu") as attachment:
        result = run()
    error = float((result.double() - expected.double()).norm() / expected.double().norm())
    return {"sites": attachment.sites, "error": error, "restored": torch.equal(run(), expected)}


def report(unet: Any, vae: Any, extra: dict[str, Tensor]) -> dict[str, Any]:
    noise = torch.Generator().manual_seed(1)
    latents, text = torch.randn(2, 4, 24, 32, generator=noise), torch.randn(2, 77, 32, generator=noise)
    pixels = torch.randn(1, 3, 152, 104, generator=noise)
    family = dissect(unet).family  # type: ignore[union-attr]
    inputs = StepInputs(latents, torch.tensor(500), text, labels=extra.get("y"))
    found: dict[str, Any] = {}
    for name, knobs in {**KNOBS, "together": TOGETHER}.items():
        found[name] = compared(unet, lambda: family.predict(unet, latents, inputs), knobs)
    for kept in ("held", "parked", "recomputed"):
        exact = {"vae_tiles": "exact", "vae_map": kept, "vae_strip_mib": 1}
        found[f"decode {kept}"] = compared(vae, lambda: family.decode(vae, latents[:1, :, :19, :13]), exact)
        found[f"encode {kept}"] = compared(vae, lambda: family.encode(vae, pixels), exact)
    found["decode attention"] = compared(vae, lambda: family.decode(vae, latents), KNOBS["attention"])
    return found


def loaded_in_neo(unet: nn.Module, vae: nn.Module) -> dict[int, int]:
    """Bytes of the UNet's weights that Forge Neo's loader puts on a device, by the bytes that a budget leaves for them.

    The device is torch's "meta", of 8 GiB."""
    meta, managing = torch.device("meta"), importlib.import_module("backend.memory_management")
    patcher = importlib.import_module("backend.patcher.base").ModelPatcher
    parts = {"shared": {"cmd_opts": types.SimpleNamespace()}, "devices": {"device": meta}}
    for name, held in {"": {}, **parts}.items():
        module = types.ModuleType(f"modules.{name}".rstrip("."))
        vars(module).update(held)
        sys.modules[module.__name__] = module
        setattr(sys.modules["modules"], name, module)
    loading, estimates = (importlib.import_module(f"webui_ext.{name}") for name in ("loading", "memory_estimate"))
    total, needed, weights = 8 << 30, 4 << 20, weight_bytes(unet)
    managing.vram_state, managing.lowvram_available = managing.VRAMState.NORMAL_VRAM, True
    managing.get_free_memory = lambda device=None, torch_free_too=False: (total, 0) if torch_free_too else total
    managing.soft_empty_cache = lambda *args, **kwargs: None
    loading.free_vram = lambda device: total
    stage = types.SimpleNamespace(reserved_bytes=needed + weights, weights_bytes=weights, activation_bytes=needed)
    loaded: dict[int, int] = {}
    for room in (weights // 4, weights // 2, 2 * weights):
        base = types.SimpleNamespace(diffusion_model=copy.deepcopy(unet))
        held = {"unet": types.SimpleNamespace(model=base), "vae": types.SimpleNamespace(first_stage_model=vae)}
        engine = types.SimpleNamespace(forge_objects=types.SimpleNamespace(**held))
        request = types.SimpleNamespace(fills=True, vram=needed + room)
        none = types.SimpleNamespace(overhead_bytes=0)
        plan = types.SimpleNamespace(request=request, stages=[stage], predicted=none)
        undo = [set_patch(patch) for patch in estimates.limit_weights(engine, plan)]
        model = patcher(base.diffusion_model, load_device=meta, offload_device=meta)
        managing.load_models_gpu([model], memory_required=needed, minimum_memory_required=needed // 2)
        loaded[room] = int(model.loaded_size())
        managing.current_loaded_models.clear()
        for one in reversed(undo):
            one()
    return loaded


PRECISION, HALF = ("fp16", torch.float16) if computes_on_cpu(torch.float16) else ("bf16", torch.bfloat16)
"""The type of the full-size UNet: an older torch computes in no fp16 on a CPU, and the bytes are the same."""


def peak(unet: nn.Module, size: int) -> int:
    """Bytes of activations of one guided pass of a picture of that side with the smallest settings, traced."""
    latents = torch.empty(2, 4, size // 8, size // 8, dtype=HALF, device="meta")
    text = torch.empty(2, 77, 768, dtype=HALF, device="meta")
    settings = dataclasses.replace(SMALLEST, precision=PRECISION)
    with attached(unet, settings, device="cpu"), torch.inference_mode():
        return trace(unet, latents, torch.empty(2, device="meta"), context=text).activation_peak_bytes


def main() -> None:
    host, folder = sys.argv[1:3]
    sys.argv = sys.argv[:1]
    sys.path.insert(0, folder)
    out, sys.stdout = sys.stdout, sys.stderr  # hosts print
    unet_of, vae = globals()[host]()
    answer: dict[str, Any] = {"torch": torch.__version__}
    with torch.no_grad():
        if host.endswith("sdxl"):
            unet, extra = unet_of(**SDXL), {"y": torch.randn(2, SDXL["adm_in_channels"])}
        else:
            unet, extra = unet_of(**UNET), {}
            with torch.device("meta"):
                full = unet_of(**FULL).to(HALF).eval().requires_grad_(False)
            answer["peaks"] = {size: peak(full, size) for size in BOUNDS}
        answer["hooks"] = report(with_random_weights(unet), with_random_weights(vae), extra)
        if host == "forge":
            answer["autoencoders"] = {
                name: exactly(with_random_weights(vae).eval(), torch.randn(shape))
                for name, vae, shape in autoencoders_of_neo()
            }
        if (Path(folder) / "backend" / "nn" / "anima.py").exists():
            answer["loaded"] = loaded_in_neo(unet, vae)
    print(json.dumps(answer), file=out, flush=True)
    os._exit(0)  # threads that a host has started are not waited for


if __name__ == "__main__":
    main()
