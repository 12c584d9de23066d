"""ComfyUI's own classes in one process, without its server: narrow checkpoints of the real architectures, its samplers
and its stock nodes, with our pack imported as ComfyUI imports it.

Run by ComfyUI's Python; :func:`enter` comes first.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
import logging
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
STEPS, SIDE = 1, 16
FP8 = torch.float8_e4m3fn
STORAGE = {"fp32": (torch.float32, None), "fp16": (torch.float16, torch.float32), "fp8": (FP8, torch.float32)}
"""Type of the weights, and the type that the host computes in where it is another."""

_SD15 = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 64,
    "num_res_blocks": [2, 2, 2, 2],
    "channel_mult": [1, 1, 2, 2],
    "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
    "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
    "transformer_depth_middle": 1,
    "context_dim": 64,
    "use_linear_in_transformer": False,
    "use_spatial_transformer": True,
    "legacy": False,
    "adm_in_channels": None,
    "use_temporal_attention": False,
    "use_temporal_resblock": False,
}
_SD2 = {**_SD15, "use_linear_in_transformer": True}
_SDXL = {
    **_SD2,
    "num_res_blocks": [2, 2, 2],
    "channel_mult": [1, 1, 2],
    "transformer_depth": [0, 0, 2, 2, 3, 3],
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 3, 3, 3],
    "transformer_depth_middle": 3,
    "num_classes": "sequential",
    "adm_in_channels": 6 * 256 + 64,
}
_REFINER = {
    **_SDXL,
    "num_res_blocks": [2, 2, 2, 2],
    "channel_mult": [1, 1, 2, 2],
    "transformer_depth": [0, 0, 2, 2, 2, 2, 0, 0],
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 2, 2, 2, 0, 0, 0],
    "transformer_depth_middle": 2,
    "adm_in_channels": 5 * 256 + 64,
}
_BASE = {
    **_SD15,
    "num_res_blocks": [1, 1, 1, 1],
    "transformer_depth": [1, 1, 1, 0],
    "transformer_depth_output": [1, 1, 1, 1, 1, 1, 0, 0],
}
"""As `unet prune --kind base` leaves it."""
KINDS = {
    "sd15": ("SD15", _SD15),
    "base": ("SD15", _BASE),
    "inpaint": ("SD15", {**_SD15, "in_channels": 9}),
    "instruct": ("SD15_instructpix2pix", {**_SD15, "in_channels": 8}),
    "sd2": ("SD20", _SD2),
    "sd2v": ("SD20", _SD2),
    "sdxl": ("SDXL", _SDXL),
    "refiner": ("SDXLRefiner", _REFINER),
}
"""Name of the host's configuration and a narrow UNet of it."""

_MMDIT = {
    "in_channels": 16,
    "patch_size": 2,
    "out_channels": 16,
    "depth": 2,
    "input_size": None,
    "adm_in_channels": 128,
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 64, "out_features": 128}},
    "num_patches": 4096,
    "pos_embed_max_size": 64,
    "pos_embed_scaling_factor": None,
}
_FLUX = {
    "in_channels": 16,
    "out_channels": 16,
    "vec_in_dim": 64,
    "context_in_dim": 64,
    "hidden_size": 128,
    "mlp_ratio": 4.0,
    "num_heads": 2,
    "depth": 1,
    "depth_single_blocks": 1,
    "axes_dim": [16, 24, 24],
    "theta": 10000,
    "patch_size": 2,
    "qkv_bias": True,
    "guidance_embed": True,
    "image_model": "flux",
}
_LUMINA = {
    "image_model": "lumina2",
    "patch_size": 2,
    "in_channels": 16,
    "dim": 128,
    "cap_feat_dim": 64,
    "n_layers": 1,
    "n_refiner_layers": 1,
    "n_heads": 1,
    "n_kv_heads": 1,
    "axes_dims": [32, 48, 48],
    "axes_lens": [300, 512, 512],
    "qk_norm": True,
}
_FLUX2 = {
    **_FLUX,
    "image_model": "flux2",
    "in_channels": 128,
    "out_channels": 128,
    "patch_size": 1,
    "vec_in_dim": None,
    "axes_dim": [16, 16, 16, 16],
    "txt_ids_dims": [3],
    "qkv_bias": False,
    "ops_bias": False,
    "global_modulation": True,
    "mlp_silu_act": True,
}
_CHROMA = {
    **_FLUX,
    "image_model": "chroma",
    "guidance_embed": False,
    "in_channels": 64,
    "out_channels": 64,
    "in_dim": 64,
    "out_dim": 128,
    "hidden_dim": 128,
    "n_layers": 1,
}
_QWEN = {
    "image_model": "qwen_image",
    "in_channels": 64,
    "num_layers": 1,
    "attention_head_dim": 64,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "axes_dims_rope": [16, 24, 24],
}
_WAN = {
    "image_model": "wan2.1",
    "model_type": "t2v",
    "dim": 128,
    "ffn_dim": 256,
    "num_heads": 2,
    "num_layers": 1,
    "text_dim": 64,
}
TODAY = {
    "sd3": ("SD3", _MMDIT),
    "flux": ("Flux", _FLUX),
    "flux2": ("Flux2", _FLUX2),
    "z-image": ("ZImage", {**_LUMINA, "z_image_modulation": True, "dim": 256, "n_heads": 2, "n_kv_heads": 2}),
    "lumina2": ("Lumina2", _LUMINA),
    "chroma": ("Chroma", _CHROMA),
    "qwen-image": ("QwenImage", _QWEN),
    "wan": ("WAN21_T2V", _WAN),
}
"""Models that our hooks do not know: what they take is traced plain."""


def enter(host: Path) -> None:
    """Make this process one of ComfyUI's, on the CPU."""
    sys.path[:0] = [str(host)]
    sys.argv = ["main.py"]
    from comfy.cli_args import args

    args.cpu = args.use_pytorch_cross_attention = True
    torch.set_num_threads(1)
    logging.getLogger().setLevel(logging.WARNING)


def pack_name() -> str:
    """The name under which ComfyUI imports our pack."""
    return str(ROOT).replace(".", "_x_")


def our_nodes() -> dict[str, Any]:
    """Our nodes by their ids."""
    name = pack_name()
    spec = importlib.util.spec_from_file_location(name, ROOT / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.NODE_CLASS_MAPPINGS)


def ours(nodes: dict[str, Any], model: Any, **knobs: Any) -> tuple[Any, Any]:
    """What Low VRAM makes of a MODEL within more than it can use, and its record."""
    settings = nodes["LowVRAMSettings"]().choose(**knobs)[0]
    made, _, record, _ = nodes["LowVRAM"]().optimize(model, _some_vae(), "1024GB", settings)["result"]
    return made, record


@functools.cache
def _some_vae() -> Any:
    return autoencoder("sd15")


def model(kind: str, storage: str = "fp32", seed: int = 0) -> Any:
    """A MODEL as the host's loader makes it: a ModelPatcher of its own class, with random weights."""
    import comfy.model_patcher
    import comfy.supported_models

    name, config = {**KINDS, **TODAY}[kind]
    if kind in ("flux", "flux2", "chroma"):
        config = _as_this_host_takes(kind, config)
    made = getattr(comfy.supported_models, name)(config)
    made.set_inference_dtype(*STORAGE[storage])
    keys = {"v_pred": torch.zeros(0)} if kind == "sd2v" else {}
    if kind in ("sd2", "sd2v"):  # the host looks at these statistics to find which prediction it makes
        spread = 1.0 if kind == "sd2v" else 0.01
        keys["output_blocks.11.1.transformer_blocks.0.norm1.bias"] = spread * torch.randn(64)
    base = made.get_model(keys, "", device=torch.device("cpu"))
    fill(base.diffusion_model, seed)
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(base, load_device=cpu, offload_device=cpu)


def _as_this_host_takes(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """A configuration of FLUX's kin without the fields that this ComfyUI does not know, and with those it wants."""
    from comfy.ldm.chroma.model import ChromaParams
    from comfy.ldm.flux.model import FluxParams

    fields = (ChromaParams if kind == "chroma" else FluxParams).__dataclass_fields__
    added = {"txt_ids_dims": []} if "txt_ids_dims" in fields and "txt_ids_dims" not in config else {}
    kept = {name: value for name, value in config.items() if name in fields or name in ("image_model", "patch_size")}
    return kept | added


_PICTURES = {"double_z": True, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch_mult": [1, 2, 4, 4]}
_PICTURES |= {"num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0}
_WIDTH = 128


def autoencoder(kind: str, seed: int = 0, width: int = _WIDTH) -> Any:
    """A VAE as the host's loader makes it of a state dict: of "sd15", "flux" with 16 channels, "flux2", "wan" and so
    Qwen-Image, narrow, or "taesd".

    Args:
        width: channels of the widest maps of those for pictures. The host loads one width, another takes its place.
    """
    import comfy.sd

    model = _autoencoder(kind, seed, width)
    fill(model, seed)
    if width == _WIDTH or kind in ("wan", "taesd"):
        return comfy.sd.VAE(sd=model.state_dict())
    vae = autoencoder(kind, seed)
    vae.first_stage_model = model.to(vae.vae_dtype)
    vae.patcher = type(vae.patcher)(model, load_device=vae.device, offload_device=vae.device)
    return vae


def _autoencoder(kind: str, seed: int, width: int) -> torch.nn.Module:
    from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine
    from comfy.taesd.taesd import TAESD

    parts = "comfy.ldm.modules.diffusionmodules.model"
    pictures = {**_PICTURES, "ch": width}
    model: torch.nn.Module
    if kind == "taesd":
        model = TAESD()
    elif kind == "flux":
        config = {**pictures, "z_channels": 16}
        model = AutoencodingEngine(
            regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
            encoder_config={"target": f"{parts}.Encoder", "params": config},
            decoder_config={"target": f"{parts}.Decoder", "params": config},
        )
    elif kind == "wan":
        from comfy.ldm.wan.vae import WanVAE

        dim = 16 if knows_flux2() else 96  # an older ComfyUI loads no other
        model = WanVAE(dim=dim, z_dim=16, temperal_downsample=[False, True, True])
    elif kind == "flux2":
        model = AutoencoderKL(ddconfig={**pictures, "z_channels": 32, "batch_norm_latent": True}, embed_dim=32)
        model.bn.running_mean.normal_(generator=torch.Generator().manual_seed(seed))
        model.bn.running_var.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(seed))
    else:
        model = AutoencoderKL(ddconfig={**pictures, "z_channels": 4}, embed_dim=4)
    return model


def is_known(kind: str) -> bool:
    """Whether this ComfyUI has the host's configuration of one of ``TODAY``."""
    import comfy.supported_models

    return hasattr(comfy.supported_models, TODAY[kind][0])


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    """The relative error of ``b``."""
    return float((a.double() - b.double()).norm() / a.double().norm())


def error_of(work: Any) -> str:
    """What ``work`` raises, as its class and sentence; empty: nothing."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def knows_flux2() -> bool:
    """Whether this ComfyUI has FLUX.2's model, and so its autoencoder."""
    import comfy.supported_models

    return hasattr(comfy.supported_models, "Flux2")


def fill(module: torch.nn.Module, seed: int) -> None:
    """Random weights that keep the size of what passes through them, the same in every storage type that holds them."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            if tensor.dim() < 2:
                value = torch.full(tensor.shape, 0.0 if name.endswith("bias") else 1.0)
            else:
                bound = (3 / tensor[0].numel()) ** 0.5
                value = torch.empty(tensor.shape).uniform_(-bound, bound, generator=noise)
            tensor.copy_(value.to(tensor.dtype))
    module.eval().requires_grad_(False)


def conditions(model: Any, seed: int = 1) -> tuple[Any, Any]:
    """Positive and negative CONDITIONING of the width that the model wants."""
    noise = torch.Generator().manual_seed(seed)
    made = []
    pooled = 128 if type(model.model).__name__ == "SD3" else 64
    for _ in range(2):
        extra = {"pooled_output": torch.randn(1, pooled, generator=noise)}
        if type(model.model).__name__ == "Lumina2":
            extra["attention_mask"] = torch.ones(1, 77, dtype=torch.int64)
        if model.model.concat_keys:
            extra["concat_latent_image"] = torch.randn(1, 4, SIDE, SIDE, generator=noise)
            extra["concat_mask"] = (torch.rand(1, 1, SIDE, SIDE, generator=noise) > 0.5).float()
        made.append([[torch.randn(1, 77, 64, generator=noise), extra]])
    return made[0], made[1]


def sample(
    model: Any,
    *,
    cfg: float = 5.0,
    batch: int = 1,
    side: int = SIDE,
    steps: int = STEPS,
    sampler: str = "euler",
    scheduler: str = "normal",
    denoise: float = 1.0,
    start: dict[str, torch.Tensor] | None = None,
    control: Any = None,
    several: str | None = None,
) -> torch.Tensor:
    """Latents as the stock KSampler makes them; the process's random numbers start anew, as ToMe draws from them.

    Args:
        start: LATENT to begin from; None: zeros of ``batch`` and ``side``.
        control: of :func:`control_net`.
        several: one of ``SEVERAL``.
    """
    import nodes

    given = conditions(model)
    CALLS.clear()
    watched = model.clone()
    watched.set_model_unet_function_wrapper(_call)
    model = watched
    if several == "masks":
        given = (_masked(nodes, model, side), given[1])
    if control is not None:
        hint = torch.rand(1, 8 * side, 8 * side, 3, generator=torch.Generator().manual_seed(5))
        given = nodes.ControlNetApplyAdvanced().apply_controlnet(*given, control, hint, 1.0, 0.0, 1.0)
    form = model.model.latent_format
    pictures = 1 if type(model.model).__name__ == "QwenImage" else 2
    frames = (pictures,) if form.latent_dimensions == 3 else ()
    zeros = torch.zeros(batch, form.latent_channels, *frames, side, side)
    latents = {"samples": zeros} if start is None else start
    torch.manual_seed(0)
    if several in ("Perp-Neg", "DualCFG"):
        return _guided(several, model, given, latents, steps)
    with torch.inference_mode():
        (made,) = nodes.KSampler().sample(model, 7, steps, cfg, sampler, scheduler, *given, latents, denoise)
    return made["samples"]


SEVERAL = ("masks", "Perp-Neg", "DualCFG")
"""Ways to sample with more prompts than two."""
CALLS: list[int] = []
"""Rows of the model's calls in the latest sampling."""


def _call(apply: Any, told: dict[str, Any]) -> Any:
    CALLS.append(len(told["input"]))
    return apply(told["input"], told["timestep"], **told["c"])


def _masked(nodes: Any, model: Any, side: int) -> Any:
    """Four prompts, each for a quarter of the picture."""
    found = []
    for number in range(4):
        mask = torch.zeros(1, 8 * side, 8 * side)
        mask[:, (number // 2) * 4 * side :][:, : 4 * side, (number % 2) * 4 * side :][:, :, : 4 * side] = 1.0
        prompt = conditions(model, seed=number + 2)[0]
        found += nodes.ConditioningSetMask().append(prompt, mask, "default", 1.0)[0]
    return found


def _guided(way: str, model: Any, given: tuple[Any, Any], latents: Any, steps: int) -> torch.Tensor:
    from comfy_extras import nodes_custom_sampler as custom
    from comfy_extras.nodes_perpneg import PerpNegGuider

    third = conditions(model, seed=2)[0]
    if way == "Perp-Neg":
        guider = first_output(PerpNegGuider, model, *given, third, 5.0, 1.0)
    else:
        guider = first_output(custom.DualCFGGuider, model, given[0], third, given[1], 5.0, 3.0, "regular")
    noise, sampler = first_output(custom.RandomNoise, 7), first_output(custom.KSamplerSelect, "euler")
    sigmas = first_output(custom.BasicScheduler, model, "normal", steps, 1.0)
    with torch.inference_mode():
        made = first_output(custom.SamplerCustomAdvanced, noise, guider, sampler, sigmas, latents)
    return made["samples"]


def first_output(kind: Any, *inputs: Any, **newer: Any) -> Any:
    """The first output of a stock node; in ComfyUI 0.3.64 some have no ``execute``, but a method that they name.

    Args:
        newer: inputs that are left out where the node does not have them yet.
    """
    if hasattr(kind, "execute"):
        has = inspect.signature(kind.execute).parameters
        return kind.execute(*inputs, **{name: value for name, value in newer.items() if name in has}).result[0]
    return getattr(kind(), kind.FUNCTION)(*inputs)[0]


def control_net() -> Any:
    """A CONTROL_NET for "sd15" as the host's loader makes it, with random weights."""
    import comfy.cldm.cldm
    import comfy.controlnet

    config = {name: value for name, value in _SD15.items() if name != "out_channels"}
    made = comfy.cldm.cldm.ControlNet(**config, hint_channels=3, num_heads=8)
    fill(made, 3)
    return comfy.controlnet.ControlNet(made, load_device=torch.device("cpu"))


STOCK: dict[str, tuple[str, str, dict[str, Any]]] = {
    "HyperTile": ("hypertile", "HyperTile", {"tile_size": 64, "swap_size": 2, "max_depth": 1, "scale_depth": False}),
    "FreeU_V2": ("freelunch", "FreeU_V2", {"b1": 1.3, "b2": 1.4, "s1": 0.9, "s2": 0.2}),
    "PAG": ("pag", "PerturbedAttentionGuidance", {"scale": 3.0}),
    "SAG": ("sag", "SelfAttentionGuidance", {"scale": 0.5, "blur_sigma": 2.0}),
    "PatchModelAddDownscale": (
        "model_downscale",
        "PatchModelAddDownscale",
        {
            "block_number": 3,
            "downscale_factor": 2.0,
            "start_percent": 0.0,
            "end_percent": 0.9,
            "downscale_after_skip": True,
            "downscale_method": "bicubic",
            "upscale_method": "bicubic",
        },
    ),
    "LCM": ("model_advanced", "ModelSamplingDiscrete", {"sampling": "lcm", "zsnr": False}),
    "RescaleCFG": ("model_advanced", "RescaleCFG", {"multiplier": 0.7}),
    "ToMe": ("tomesd", "TomePatchModel", {"ratio": 0.3}),
}
"""Module among the host's own extras, class, and inputs of the stock nodes that patch a MODEL."""


def patched(model: Any, name: str | None) -> Any:
    """``model`` through a stock node; None: as it is."""
    if name is None:
        return model
    module, kind, inputs = STOCK[name]
    node = getattr(importlib.import_module(f"comfy_extras.nodes_{module}"), kind)
    run = node.execute if hasattr(node, "execute") else getattr(node(), node.FUNCTION)
    made = run(model, **inputs)
    if inspect.isawaitable(made):
        made = asyncio.run(made)
    return getattr(made, "result", made)[0]


def compiled(model: Any) -> Any:
    """``model`` as the stock TorchCompileModel makes it, by a backend that is quick: Dynamo follows all alike."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    made = model.clone()
    set_torch_compile_wrapper(made, backend="eager")
    return made
