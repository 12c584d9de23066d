"""Small pipelines of every kind of the family, each with a call that makes its picture: the rows of test_families."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import tiny
import torch
from torch import Tensor

from sd_lowvram.checkpoints.architectures import build_components

SIZE = 64
WIDTH = 32
"""Of the tiny image encoder's embeddings, as of its patches."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of pipeline.

    Attributes:
        make: a new pipeline.
        options: what it is called with besides prompt, seed and steps.
        sized: True if it gets width and height.
    """

    make: Callable[[], Any]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    sized: bool = True


def picture(pipe: Any, kind: Kind, size: int = SIZE, **options: Any) -> Tensor:
    """The pipeline's picture (1, 3, size, size), the same for the same seed."""
    sized = {"width": size, "height": size} if kind.sized else {}
    given = {"num_inference_steps": 2, "guidance_scale": 5.0, "output_type": "pt", **sized, **kind.options, **options}
    with torch.no_grad():
        made = pipe(prompt="a red apple", generator=torch.Generator().manual_seed(3), **given).images
    return made.float() if isinstance(made, Tensor) else torch.from_numpy(made).movedim(-1, 1)


def noise(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(7))


def mask(size: int = SIZE) -> Tensor:
    half = torch.zeros(1, 1, size, size)
    half[..., : size // 2] = 1
    return half


_SHALLOW: dict[str, Any] = {
    "block_out_channels": [32, 64],
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "layers_per_block": 1,
}
SHALLOW = {
    "sd15": _SHALLOW,
    "sd21": {**_SHALLOW, "attention_head_dim": [2, 4]},
    "sdxl": {
        **_SHALLOW,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
        "attention_head_dim": [2, 4],
        "transformer_layers_per_block": [1, 2],
    },
}
"""Of the UNets, two levels with one block each: a run has many calls, and they are the same with more."""


SHALLOW_VAE = {"layers_per_block": 1}


def config(name: str) -> dict[str, Any]:
    """The architecture of :func:`parts`."""
    full = tiny.config(name)
    return full | {"unet": {**full["unet"], **SHALLOW[name]}, "vae": {**full["vae"], **SHALLOW_VAE}}


def parts(name: str, seed: int = 0, **unet: Any) -> dict[str, Any]:
    """What a pipeline of family ``name`` is made of, its UNet changed."""
    return tiny.components(name, seed, unet={**SHALLOW[name], **unet}, vae=SHALLOW_VAE)


def made(kind: str, components: dict[str, Any], **more: Any) -> Any:
    """A diffusers pipeline of the class ``kind``, without a bar."""
    import diffusers

    plain = {"requires_safety_checker": False} if "XL" not in kind and "Latent" not in kind else {}
    pipe = getattr(diffusers, kind)(**components, **plain, **more)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def plain(name: str, kind: str = "StableDiffusionPipeline", **unet: Any) -> Any:
    return made(kind, parts(name, **unet))


def image_encoder() -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    config = CLIPVisionConfig(
        hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=32,
        patch_size=8, projection_dim=WIDTH,
    )  # fmt: skip
    torch.manual_seed(1)
    return CLIPVisionModelWithProjection(config).eval().requires_grad_(False)


def refiner() -> Any:
    from diffusers import StableDiffusionXLImg2ImgPipeline

    components = parts("sdxl", projection_class_embeddings_input_dim=5 * 8 + 32, cross_attention_dim=32)
    components |= {"text_encoder": None, "tokenizer": None}
    pipe = StableDiffusionXLImg2ImgPipeline(**components, requires_aesthetics_score=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def controlled(nets: int) -> Any:
    from diffusers import ControlNetModel

    components = parts("sd15")
    torch.manual_seed(1)
    made_nets = [
        ControlNetModel.from_unet(components["unet"], conditioning_embedding_out_channels=(8,) * 4) for _ in range(nets)
    ]
    for net in made_nets:
        for zero in (*net.controlnet_down_blocks, net.controlnet_mid_block, net.controlnet_cond_embedding.conv_out):
            torch.nn.init.normal_(zero.weight, std=0.05)
        net.eval().requires_grad_(False)
    components["controlnet"] = made_nets[0] if nets == 1 else made_nets
    return made("StableDiffusionControlNetPipeline", components)


def adapted() -> Any:
    from diffusers import T2IAdapter

    components = parts("sd15")
    torch.manual_seed(1)
    channels = list(components["unet"].config.block_out_channels)
    adapter = T2IAdapter(channels=channels, num_res_blocks=1, adapter_type="full_adapter")
    return made("StableDiffusionAdapterPipeline", {**components, "adapter": adapter.eval().requires_grad_(False)})


def with_ip_adapters(*kinds: str, name: str = "sd15") -> Any:
    pipe = plain(name, "StableDiffusionXLPipeline" if name == "sdxl" else "StableDiffusionPipeline")
    load_ip_adapters(pipe, *kinds)
    return pipe


def load_ip_adapters(pipe: Any, *kinds: str) -> None:
    """Load IP-Adapters with random weights, each "plain" or "plus"."""
    from diffusers.models.embeddings import IPAdapterPlusImageProjection

    if pipe.image_encoder is None:
        pipe.register_modules(image_encoder=image_encoder())
    count, text = len(kinds), pipe.unet.config.cross_attention_dim
    weights = [_ip_adapter(pipe.unet, seed) for seed in range(count)]
    pipe.load_ip_adapter(weights, [""] * count, [""] * count)
    pipe.set_ip_adapter_scale([0.6] * count)
    projections = pipe.unet.encoder_hid_proj.image_projection_layers
    for number, kind in enumerate(kinds):
        if kind == "plus":
            torch.manual_seed(number)
            plus = IPAdapterPlusImageProjection(WIDTH, text, 16, depth=1, dim_head=8, heads=2, num_queries=4)
            projections[number] = plus.eval().requires_grad_(False)


def _ip_adapter(unet: Any, seed: int) -> dict[str, dict[str, Tensor]]:
    """The weights of a plain IP-Adapter for ``unet``, in the format of its files."""
    text, random = unet.config.cross_attention_dim, torch.Generator().manual_seed(seed)
    crossing = [unet.get_submodule(name.removesuffix(".processor")) for name in unet.attn_processors if "attn2" in name]
    adapter = {
        f"{2 * number + 1}.{name}.weight": 0.2 * torch.randn(attention.to_k.out_features, text, generator=random)
        for number, attention in enumerate(crossing)
        for name in ("to_k_ip", "to_v_ip")
    }
    projection = {
        "proj.weight": 0.2 * torch.randn(4 * text, WIDTH, generator=random),
        "proj.bias": torch.zeros(4 * text),
    }
    norm = {"norm.weight": torch.ones(text), "norm.bias": torch.zeros(text)}
    return {"image_proj": projection | norm, "ip_adapter": adapter}


def with_taesd() -> Any:
    from diffusers import AutoencoderTiny

    torch.manual_seed(1)
    small = {"encoder_block_out_channels": (16,) * 4, "decoder_block_out_channels": (16,) * 4}
    return made(
        "StableDiffusionPipeline", {**parts("sd15"), "vae": AutoencoderTiny(**small).eval().requires_grad_(False)}
    )


def upscaler() -> Any:
    from diffusers import DDPMScheduler

    components = parts("sd15", in_channels=7, num_class_embeds=1000, only_cross_attention=[True, False], sample_size=16)
    config = tiny.config("sd15")["vae"]
    vae = {
        "block_out_channels": [16, 32, 32],
        "down_block_types": ["DownEncoderBlock2D"] * 3,
        "up_block_types": ["UpDecoderBlock2D"] * 3,
    }
    components["vae"] = build_components({"vae": {**config, **vae, "layers_per_block": 1}}, only=("vae",))["vae"]
    del components["safety_checker"], components["feature_extractor"]
    from diffusers import StableDiffusionUpscalePipeline

    pipe = StableDiffusionUpscalePipeline(**components, low_res_scheduler=DDPMScheduler(), max_noise_level=350)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def lcm() -> Any:
    from diffusers import LatentConsistencyModelPipeline, LCMScheduler

    components = parts("sd15", time_cond_proj_dim=16)
    components["scheduler"] = LCMScheduler()
    pipe = LatentConsistencyModelPipeline(**components, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def checked() -> Any:
    from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker
    from transformers import CLIPConfig, CLIPImageProcessor

    vision = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CLIPConfig(vision_config={**vision, "image_size": 32, "patch_size": 8}, projection_dim=WIDTH)
    torch.manual_seed(1)
    checker = StableDiffusionSafetyChecker(config).eval().requires_grad_(False)
    torch.nn.init.constant_(checker.concept_embeds_weights, 2.0)  # above every cosine
    looks = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return made("StableDiffusionPipeline", {**parts("sd15"), "safety_checker": checker, "feature_extractor": looks})


def with_depth() -> Any:
    from diffusers import StableDiffusionDepth2ImgPipeline
    from transformers import DPTConfig, DPTForDepthEstimation, DPTImageProcessor

    components = parts("sd15", in_channels=5)
    del components["safety_checker"], components["feature_extractor"]
    config = DPTConfig(
        hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, image_size=32,
        patch_size=8, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=8,
    )  # fmt: skip
    torch.manual_seed(1)
    looks = DPTImageProcessor(size={"height": 32, "width": 32})
    depth = DPTForDepthEstimation(config).eval().requires_grad_(False)
    pipe = StableDiffusionDepth2ImgPipeline(**components, depth_estimator=depth, feature_extractor=looks)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def united() -> Any:
    from diffusers import ControlNetUnionModel

    components = parts("sdxl")
    like = set(inspect.signature(ControlNetUnionModel).parameters) & set(components["unet"].config)
    config = {name: components["unet"].config[name] for name in like}
    config |= dict.fromkeys(("num_trans_channel", "num_proj_channel"), config["block_out_channels"][0])
    torch.manual_seed(1)
    net = ControlNetUnionModel(**config, conditioning_embedding_out_channels=(8,) * 4)
    components["controlnet"] = net.eval().requires_grad_(False)
    return made("StableDiffusionXLControlNetUnionPipeline", components)


XL = "StableDiffusionXL"

IMAGE = {"image": noise(1, 3, SIZE, SIZE)}
STARTED = {**IMAGE, "strength": 0.9}
MASKED = {**STARTED, "mask_image": mask()}
SEEN = noise(1, 3, 32, 32)

KINDS: dict[str, Kind] = {
    "sd15": Kind(lambda: plain("sd15")),
    "sd21 v": Kind(lambda: plain("sd21")),
    "sdxl": Kind(lambda: plain("sdxl", XL + "Pipeline")),
    "refiner": Kind(refiner, STARTED, sized=False),
    "img2img": Kind(lambda: plain("sd15", "StableDiffusionImg2ImgPipeline"), STARTED, sized=False),
    "inpaint, 4 channels": Kind(lambda: plain("sd15", "StableDiffusionInpaintPipeline"), MASKED),
    "inpaint, 9 channels": Kind(lambda: plain("sd15", "StableDiffusionInpaintPipeline", in_channels=9), MASKED),
    "instruct, 8 channels": Kind(
        lambda: plain("sd15", "StableDiffusionInstructPix2PixPipeline", in_channels=8), IMAGE, sized=False
    ),
    "controlnet": Kind(lambda: controlled(1), IMAGE),
    "controlnet, two": Kind(lambda: controlled(2), {"image": [noise(1, 3, SIZE, SIZE)] * 2}),
    "t2i adapter": Kind(adapted, IMAGE),
    "ip adapters, plain and plus": Kind(lambda: with_ip_adapters("plain", "plus"), {"ip_adapter_image": [SEEN, SEEN]}),
    "ip adapter, sdxl": Kind(lambda: with_ip_adapters("plain", name="sdxl"), {"ip_adapter_image": SEEN}),
    "pag": Kind(lambda: plain("sd15", "StableDiffusionPAGPipeline")),
    "pag without guidance": Kind(lambda: plain("sd15", "StableDiffusionPAGPipeline"), {"guidance_scale": 1.0}),
    "x4 upscaler": Kind(upscaler, {"image": noise(1, 3, SIZE // 4, SIZE // 4)}, sized=False),
    "lcm": Kind(lcm),
    "taesd": Kind(with_taesd),
    "safety checker": Kind(checked),
    "depth": Kind(with_depth, STARTED, sized=False),
    "controlnet union": Kind(united, {"control_image": [noise(1, 3, SIZE, SIZE)], "control_mode": [0]}),
}
