"""Every model that is of no family of ours is refused in one sentence, before any trace, with what works."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import diffusers
import families
import pytest
import todays
import torch
from diffusers.models.unets.unet_stable_cascade import StableCascadeUNet
from diffusers.pipelines.stable_cascade.pipeline_stable_cascade import PaellaVQModel
from diffusers.pipelines.stable_diffusion.stable_unclip_image_normalizer import StableUnCLIPImageNormalizer
from families import KINDS, SEEN, image_encoder, parts

import sd_lowvram
from sd_lowvram import Settings
from sd_lowvram.api import anatomy_for_call
from sd_lowvram.errors import BadInputError, UnsupportedModelError
from sd_lowvram.models.calls import Shape, Stage
from sd_lowvram.models.diffusers import SERVED
from sd_lowvram.planning.stages import stages
from sd_lowvram.session import anatomy_of

_TWO = {"down_block_types": ("DownEncoderBlock2D",) * 2, "block_out_channels": (32, 64)}
_FLUX = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
_FLUX |= {"joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8)}
_WAN_VAE = {"base_dim": 3, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}


def _kl(channels: int = 16) -> Any:
    made = {"latent_channels": channels, "use_quant_conv": False, "use_post_quant_conv": False}
    return diffusers.AutoencoderKL(**_TWO, up_block_types=("UpDecoderBlock2D",) * 2, **made)


def _unet(**more: Any) -> Any:
    levels = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "block_out_channels": (32, 64)}
    levels |= {"up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "layers_per_block": 1}
    return diffusers.UNet2DConditionModel(
        **{**levels, "cross_attention_dim": 32, "attention_head_dim": 8, "sample_size": 8, **more}
    )


def _motion_unet() -> Any:
    levels = {"down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"), "block_out_channels": (32, 64)}
    levels |= {"up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"), "layers_per_block": 1}
    return diffusers.UNetMotionModel(**levels, cross_attention_dim=32, num_attention_heads=4)


def _video_unet() -> Any:
    kinds = "CrossAttn{}BlockSpatioTemporal", "{}BlockSpatioTemporal"
    return diffusers.UNetSpatioTemporalConditionModel(
        down_block_types=tuple(kind.format("Down") for kind in kinds),
        up_block_types=tuple(kind.format("Up") for kind in reversed(kinds)),
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=32,
        num_attention_heads=8,
        addition_time_embed_dim=32,
        projection_class_embeddings_input_dim=96,
    )


def _deepfloyd_unet() -> Any:
    return _unet(
        in_channels=3,
        out_channels=6,
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        encoder_hid_dim=32,
        addition_embed_type="text",
        addition_embed_type_num_heads=2,
        resnet_time_scale_shift="scale_shift",
    )


def _cascade_unet() -> Any:
    twos = ("down_num_layers_per_block", "up_num_layers_per_block")
    twos += ("down_blocks_repeat_mappers", "up_blocks_repeat_mappers")
    return StableCascadeUNet(
        in_channels=4,
        conditioning_dim=16,
        block_out_channels=(16, 32),
        num_attention_heads=(-1, 4),
        block_types_per_layer=(("SDCascadeResBlock", "SDCascadeTimestepBlock"),) * 2,
        clip_text_pooled_in_channels=16,
        **dict.fromkeys(twos, (1, 1)),
    )


def _consistency_decoder() -> Any:
    return diffusers.ConsistencyDecoderVAE(
        encoder_block_out_channels=(32, 64),
        encoder_down_block_types=("DownEncoderBlock2D",) * 2,
        decoder_block_out_channels=(32, 64),
        decoder_down_block_types=("ResnetDownsampleBlock2D",) * 2,
        decoder_up_block_types=("ResnetUpsampleBlock2D",) * 2,
    )


def _asymmetric() -> Any:
    levels = {"down_block_out_channels": (32, 64), "up_block_out_channels": (32, 64)}
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return diffusers.AsymmetricAutoencoderKL(**levels, **kinds)


def _movq() -> Any:
    return diffusers.VQModel(**_TWO, up_block_types=("UpDecoderBlock2D",) * 2, norm_type="spatial")


def _wan(**more: Any) -> Any:
    sizes = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 32, "ffn_dim": 32}
    return diffusers.WanTransformer3DModel(**sizes, **more)


def _lumina2() -> Any:
    sizes = {"hidden_size": 24, "num_layers": 1, "num_refiner_layers": 1, "num_attention_heads": 3, "num_kv_heads": 1}
    return diffusers.Lumina2Transformer2DModel(**sizes, cap_feat_dim=8, axes_dim_rope=(4, 2, 2), axes_lens=(128,) * 3)


def _hunyuan() -> Any:
    sizes = {"num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2, "hidden_size": 16, "sample_size": 8}
    sizes |= {"cross_attention_dim": 16, "cross_attention_dim_t5": 16, "pooled_projection_dim": 4}
    sizes |= {"text_len": 4, "text_len_t5": 4, "in_channels": 4, "patch_size": 2}
    return diffusers.HunyuanDiT2DModel(**sizes, activation_fn="gelu-approximate")


def _pipe(name: str, **parts: Callable[[], Any]) -> Any:
    """A pipeline of these parts, all other parts None, with weights that are nowhere."""
    kind = getattr(diffusers, name)
    needed = list(inspect.signature(kind.__init__).parameters.values())[1:]
    nothing = {one.name: None for one in needed if one.default is inspect.Parameter.empty}
    with torch.device("meta"):
        return kind(**nothing | {name: make() for name, make in parts.items()})


def _flux2() -> Any:
    return diffusers.Flux2Transformer2DModel(**{**_FLUX, "axes_dims_rope": (4, 4, 4, 4)})


def _flux2_vae() -> Any:
    return diffusers.AutoencoderKLFlux2(block_out_channels=(32, 32, 64, 64))


def _temporal() -> Any:
    return diffusers.AutoencoderKLTemporalDecoder(**_TWO)


def _wan_vae() -> Any:
    return diffusers.AutoencoderKLWan(**_WAN_VAE, temperal_downsample=[False, True, True])


def _prior() -> Any:
    return diffusers.PriorTransformer(num_attention_heads=2, attention_head_dim=8, embedding_dim=8, num_layers=1)


def _vqgan() -> Any:
    return PaellaVQModel(bottleneck_blocks=1, embed_dim=8, latent_channels=4, num_vq_embeddings=12)


_TRANSFORMER, _VIDEO, _UNET = "denoises with a transformer", "makes video", "denoises with a UNet of another kind"
SLICED = Settings(attention="sliced")
PIPELINES: list[tuple[str, dict[str, Callable[[], Any]], str, str, tuple[str, ...]]] = [
    ("Flux2KleinKVPipeline", {"transformer": _flux2, "vae": _flux2_vae}, "transformer", _TRANSFORMER, ("vae",)),
    ("Lumina2Pipeline", {"transformer": _lumina2, "vae": _kl}, "transformer", _TRANSFORMER, ("vae",)),
    ("HunyuanDiTPipeline", {"transformer": _hunyuan, "vae": lambda: _kl(4)}, "transformer", _TRANSFORMER, ("vae",)),
    ("WanPipeline", {"transformer": _wan, "vae": _wan_vae}, "transformer", _TRANSFORMER, ("vae",)),
    ("StableVideoDiffusionPipeline", {"unet": _video_unet, "vae": _temporal}, "unet", _VIDEO, ()),
    ("AnimateDiffPipeline", {"unet": _motion_unet, "vae": lambda: _kl(4)}, "unet", _VIDEO, ("vae",)),
    ("KandinskyV22Pipeline", {"unet": lambda: _unet(addition_embed_type="image", encoder_hid_dim=32,
        encoder_hid_dim_type="image_proj"), "movq": _movq}, "unet", _UNET, ()),
    ("KandinskyV22PriorPipeline", {"prior": _prior}, "prior", _TRANSFORMER, ()),
    ("IFPipeline", {"unet": _deepfloyd_unet}, "unet", _UNET, ()),
    ("StableCascadeDecoderPipeline", {"decoder": _cascade_unet, "vqgan": _vqgan}, "decoder", "has a part", ()),
    ("StableDiffusionPipeline", {"unet": _unet, "vae": _consistency_decoder}, "vae",
        "has an autoencoder of another kind", ("unet",)),
    ("StableDiffusionInpaintPipeline", {"unet": _unet, "vae": _asymmetric}, "vae",
        "has an autoencoder of another kind", ("unet",)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "made_of", "part", "why", "works"), PIPELINES, ids=[row[0] for row in PIPELINES])
def test_other_pipelines_are_refused_in_one_sentence(
    kind: str,
    made_of: dict[str, Callable[[], Any]],
    part: str,
    why: str,
    works: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sd_lowvram.tracing.tracer._Tracer", None)  # nothing is traced
    pipe = _pipe(kind, **made_of)
    calls: list[Callable[[], Any]] = [
        lambda: sd_lowvram.attached(pipe, SLICED).__enter__(),
        lambda: sd_lowvram.decode(pipe, torch.zeros(1, 4, 8, 8), vram="4GB"),
    ]
    told = set()
    for call in calls:
        with pytest.raises(UnsupportedModelError) as error:
            call()
        told.add(str(error.value))
        assert (error.value.part, error.value.why, error.value.works) == (part, why, works)
    (sentence,) = told
    assert sentence.startswith(f"{kind} {why} ({part}: ") and "\n" not in sentence
    assert all(f"optimize(pipe.{name}, ...)" in sentence for name in works)
    assert ("decode(pipe.vae, latents)" in sentence) == ("vae" in works)
    for name in works:
        assert anatomy_of(getattr(pipe, name)).components.keys() == {name}


BARE: list[tuple[Callable[[], Any], str]] = [
    (_lumina2, _TRANSFORMER),
    (_temporal, _VIDEO),
    (_motion_unet, _VIDEO),
    (_video_unet, _VIDEO),
    (_deepfloyd_unet, _UNET),
    (_consistency_decoder, "is an autoencoder of another kind"),
    (_asymmetric, "is an autoencoder of another kind"),
    (_movq, "is an autoencoder of another kind"),
    (lambda: torch.nn.Linear(2, 2), "is a model of another kind"),
]


@pytest.mark.parametrize(("make", "why"), BARE, ids=[make.__name__ for make, _ in BARE])
def test_other_models_are_refused_by_themselves(make: Callable[[], Any], why: str) -> None:
    with torch.device("meta"):
        model = make()
    with pytest.raises(UnsupportedModelError, match=f"^{type(model).__name__} {why}, which"):
        sd_lowvram.plan(model, vram="4GB")
    with pytest.raises(UnsupportedModelError, match=f"^{type(model).__name__} {why}, which"):
        sd_lowvram.decode(model, torch.zeros(1, 16, 3, 8, 8))  # frames
    with pytest.raises(UnsupportedModelError):
        sd_lowvram.encode(model, torch.zeros(1, 3, 5, 64, 64))


def test_a_part_that_nobody_knows_is_refused_by_its_name() -> None:
    parts = {"unet": _unet, "vae": lambda: _kl(4), "image_normalizer": lambda: StableUnCLIPImageNormalizer(8)}
    pipe = _pipe("StableUnCLIPImg2ImgPipeline", **parts)
    told = r"has a part \(image_normalizer: StableUnCLIPImageNormalizer\).*optimize\(pipe.vae"
    with pytest.raises(UnsupportedModelError, match=told):
        sd_lowvram.attached(pipe, SLICED).__enter__()


def test_text_encoders_of_another_kind_are_planned_by_their_call_or_refused() -> None:
    from transformers import Qwen2Config, Qwen2Model, T5Config, T5EncoderModel

    pipe = families.plain("sd15")
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    pipe.register_modules(text_encoder=T5EncoderModel(T5Config(**sizes)))
    told = r"reads prompts in another way \(text_encoder: T5.*optimize\(pipe.text_encoder, "
    with pytest.raises(UnsupportedModelError, match=told):
        sd_lowvram.attached(pipe, SLICED).__enter__()
    plan = sd_lowvram.plan(pipe, vram="4GB", width=64, height=64, device="cpu")
    assert [stage.name for stage in plan.stages] == ["text", "denoise", "decode"]
    pipe.register_modules(text_encoder=Qwen2Model(Qwen2Config(vocab_size=64, hidden_size=32, num_hidden_layers=1)))
    with pytest.raises(UnsupportedModelError, match="reads prompts with a text encoder of another kind"):
        sd_lowvram.attached(pipe, SLICED).__enter__()


def test_text_encoders_of_other_pipelines_are_planned_alone() -> None:
    pipe = _pipe("PixArtSigmaPipeline", text_encoder=todays.t5)
    assert [stage.component for stage in sd_lowvram.plan(pipe, vram="4GB", device="cpu").stages] == ["text_encoder"]
    prior = _pipe("FluxPriorReduxPipeline", text_encoder_2=todays.t5)
    told = r"reads prompts in another way \(text_encoder_2: T5.*What works of it: optimize\(pipe.text_encoder_2, ...\);"
    with pytest.raises(UnsupportedModelError, match=told):
        sd_lowvram.attached(prior, SLICED).__enter__()


def test_what_edits_a_picture_is_refused_by_the_part_that_is_there() -> None:
    make = {"transformer": lambda: todays.qwen_image().transformer, "vae": todays.frames}
    told = r"denoises with a transformer \(transformer: Qwen.*What works of it: optimize\(pipe.vae, ...\), decode"
    with pytest.raises(UnsupportedModelError, match=told):
        sd_lowvram.attached(_pipe("QwenImageEditPipeline", processor=lambda: None, **make), SLICED).__enter__()
    with pytest.raises(UnsupportedModelError, match=r"with a text encoder .*Autoencoders of"):
        sd_lowvram.attached(_pipe("QwenImageEditPipeline", text_encoder=todays.qwen25_vl), SLICED).__enter__()


def test_a_pipeline_of_no_models_is_told() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^FluxPipeline.*None"):
        sd_lowvram.plan(_pipe("FluxPipeline"), vram="4GB")
    loaded = _pipe("FluxPipeline", text_encoder_2=todays.t5)
    assert [stage.component for stage in sd_lowvram.plan(loaded, vram="4GB", device="cpu").stages] == ["text_encoder_2"]


def test_a_picture_in_place_of_a_prompt_is_planned() -> None:
    components = parts("sd15")
    del components["text_encoder"], components["tokenizer"]
    kind = diffusers.StableDiffusionImageVariationPipeline
    pipe = kind(**components, image_encoder=image_encoder(), requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)

    def picture() -> torch.Tensor:
        seed = torch.Generator().manual_seed(3)
        made = pipe(SEEN, width=64, height=64, num_inference_steps=2, generator=seed, output_type="pt").images
        return torch.as_tensor(made)

    expected = picture()
    plan = sd_lowvram.optimize(pipe, vram="4GB", width=64, height=64)
    assert [stage.component for stage in plan.stages] == ["image_encoder", "unet", "vae"]
    assert torch.equal(picture(), expected)


KINDS_WITH = {"safety checker": "safety_checker", "depth": "depth_estimator", "t2i adapter": "adapter"}
KINDS_WITH |= {"controlnet": "controlnet", "ip adapter, sdxl": "image_encoder", "sdxl": "text_encoder_2"}


@pytest.mark.parametrize("kind", KINDS_WITH)
def test_every_served_part_of_a_pipeline_has_a_stage(kind: str) -> None:
    found = {stage.component for stage in planned(KINDS[kind].make())}
    assert KINDS_WITH[kind] in found and found <= SERVED.keys()


def planned(pipe: Any) -> list[Stage]:
    """The stages of a picture of 64x64."""
    anatomy = anatomy_for_call(pipe, None, {"width": 64, "height": 64}, guided=True, call=None)
    return stages(anatomy, Shape(64, 64), encodes=False)


@pytest.mark.parametrize("kind", [*KINDS_WITH, "controlnet union", "controlnet, two"])
def test_every_share_of_a_pipelines_models_has_its_stages(kind: str) -> None:
    pipe = KINDS[kind].make()
    models = anatomy_of(pipe).components
    for names in (one for count in range(1, len(models)) for one in itertools.combinations(models, count)):
        for name, part in models.items():
            setattr(pipe, name, part if name in names else None)
        assert {stage.component for stage in planned(pipe)} == set(names)


def test_all_that_is_served_is_in_these_tests() -> None:
    assert SERVED.keys() == {*KINDS_WITH.values(), "text_encoder", "unet", "vae"}


def test_frames_are_no_latents_of_a_picture() -> None:
    pipe = families.plain("sd15")
    with pytest.raises(BadInputError, match=r"\(N, 4.*width\)"):
        sd_lowvram.decode(pipe.vae, torch.zeros(1, 4, 3, 8, 8))
    with pytest.raises(BadInputError, match=r"\(N, 3.*width\)"):
        sd_lowvram.encode(pipe.vae, torch.zeros(1, 3, 3, 64, 64))
