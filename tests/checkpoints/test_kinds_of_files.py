"""Files as other programs write them: read whole, or refused by what is in them, and never with weights made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler
from safetensors.torch import load_file, save_file
from small import narrow, single_file_state
from torch import Tensor, nn
from typer.testing import CliRunner

from sd_lowvram import Settings, optimize
from sd_lowvram.checkpoints import inspection
from sd_lowvram.checkpoints.architectures import build_components
from sd_lowvram.checkpoints.inspection import configuration
from sd_lowvram.checkpoints.load import load_pipeline
from sd_lowvram.checkpoints.load_autoencoder import load_autoencoder
from sd_lowvram.cli import app
from sd_lowvram.commands.inputs import Job
from sd_lowvram.commands.paint import schedule
from sd_lowvram.errors import BadInputError, CheckpointError

Weights = dict[str, Tensor]
UNET, VAE, TEXT = "model.diffusion_model.", "first_stage_model.", "cond_stage_model.transformer.text_model."
OPEN = "cond_stage_model.model."
HALF = torch.float16


@pytest.fixture(autouse=True)
def small_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "architecture", lambda name: narrow(name, vocabulary=600))


@pytest.fixture(scope="module")
def made() -> Callable[[str], tuple[dict[str, nn.Module], Weights]]:
    """Name -> models of an architecture, and their weights by the names of a single file."""
    known: dict[str, tuple[dict[str, nn.Module], Weights]] = {}

    def make(name: str) -> tuple[dict[str, nn.Module], Weights]:
        if name not in known:
            models = build_components(narrow(name, 600), HALF)
            known[name] = models, {key: one.clone() for key, one in single_file_state(models).items()}
        models, state = known[name]
        return models, dict(state)

    return make


def saved(state: Weights, path: Path) -> Path:
    save_file(state, path)
    return path


def loads_equal(path: Path, models: dict[str, nn.Module]) -> None:
    pipe = load_pipeline(path, dtype=HALF)
    for name, model in models.items():
        found = getattr(pipe, name).state_dict()
        assert all(torch.equal(found[key], weight) for key, weight in model.state_dict().items()), name


def scaled(state: Weights, begins: tuple[str, ...], kind: str) -> Weights:
    """Weights of linear layers in 8 bits with scales next to them, as ComfyUI's users have them."""
    made: Weights = {}
    for name, weight in state.items():
        if not (name.startswith(begins) and name.endswith(".weight") and weight.ndim == 2 and "embedding" not in name):
            made[name] = weight
            continue
        stem, most = name.removesuffix("weight"), 127 if kind == "int8" else 448
        rows = kind == "int8"
        scale = weight.float().abs().amax(1, keepdim=True) / most if rows else weight.float().abs().max() / most
        small = weight.float() / scale.clamp(min=1e-12)
        made[name] = small.round().to(torch.int8) if kind == "int8" else small.to(torch.float8_e4m3fn)
        made[stem + ("scale_weight" if kind == "scaled_fp8" else "weight_scale")] = scale
        if kind != "scaled_fp8":
            said = {"format": "int8_tensorwise" if kind == "int8" else "float8_e4m3fn"}
            made[stem + "comfy_quant"] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
        else:
            made[stem + "scale_input"] = torch.ones(())
    if kind == "scaled_fp8":
        made[begins[0] + "scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    return made


@pytest.mark.parametrize("kind", ["scaled_fp8", "comfy_quant", "int8"])
@pytest.mark.parametrize("name", ["sd15", "sd21", "sdxl"])
def test_weights_are_read_times_their_scales(name: str, kind: str, made: Any, tmp_path: Path) -> None:
    models, state = made(name)
    texts = ("cond_stage_model.", "conditioner.embedders.0.", "conditioner.embedders.1.model.transformer.resblocks")
    pipe = load_pipeline(saved(scaled(state, (UNET, *texts), kind), tmp_path / "m.safetensors"))
    for part, model in models.items():
        found = getattr(pipe, part).state_dict()
        for key, weight in model.state_dict().items():
            right = weight.float()
            assert (found[key] - right).norm() <= 0.05 * right.norm(), (part, key)


def with_mark(state: Weights, mark: str, value: Tensor) -> Weights:
    name = next(key for key in state if key.startswith(UNET) and key.endswith("attn1.to_q.weight"))
    return {**state, name.removesuffix(".weight") + mark: value}


def said(**what: Any) -> Tensor:
    return torch.tensor(list(json.dumps(what).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("mark", "value", "named"),
    [
        (".weight_scale_2", torch.ones(()), "nvfp4"),
        (".weight.quant_state.bitsandbytes__nf4", torch.zeros(8, dtype=torch.uint8), "nf4 of bitsandbytes"),
        (".comfy_quant", said(format="mxfp8"), "mxfp8"),
        (".comfy_quant", said(format="int8_tensorwise", convrot=True), "convrot"),
    ],
)
def test_a_format_without_a_kernel_is_refused_by_name(
    mark: str, value: Tensor, named: str, made: Any, tmp_path: Path
) -> None:
    path = saved(with_mark(made("sd15")[1], mark, value), tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=named):
        load_pipeline(path)
    for command in ("plan", "generate"):
        arguments = ["an apple"] if command == "generate" else []
        told = CliRunner().invoke(app, [command, *arguments, "--model", str(path), "--vram", "2GB"])
        assert told.exit_code == 2 and named in " ".join(told.output.split()), told.output


@pytest.mark.parametrize(
    ("mark", "value", "message"),
    [
        (".weight_scale", torch.ones(2, 3), "scales of shape"),
        (".weight_scale_inv", torch.ones(()), "has no place for"),
        (".lora_down.weight", torch.ones(4, 4), "has no place for"),
        (".alpha", torch.ones(()), "has no place for"),
    ],
)
def test_what_lies_beside_a_weight_and_is_not_read_is_refused(
    mark: str, value: Tensor, message: str, made: Any, tmp_path: Path
) -> None:
    path = saved(with_mark(made("sd15")[1], mark, value), tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_pipeline(path)


def test_int8_without_a_scale_is_refused(made: Any, tmp_path: Path) -> None:
    state = scaled(made("sd15")[1], (UNET,), "int8")
    bare = {name: one for name, one in state.items() if not name.endswith(("weight_scale", "comfy_quant"))}
    with pytest.raises(CheckpointError, match="8 bits without a scale"):
        load_pipeline(saved(bare, tmp_path / "m.safetensors"))


def test_a_folder_with_scales_is_refused(made: Any, tmp_path: Path) -> None:
    load_pipeline(None).save_pretrained(tmp_path)
    file = tmp_path / "text_encoder" / "model.safetensors"
    state = load_file(file)
    save_file(state | {"text_model.encoder.layers.0.mlp.fc1.scale_weight": torch.ones(())}, file, {"format": "pt"})
    for read in (load_pipeline, lambda path: configuration(str(path))):
        with pytest.raises(CheckpointError, match="separate scales"):
            read(tmp_path)


GONE = {
    "sd15": [TEXT + "encoder.layers.1.self_attn.k_proj.bias", UNET + "time_embed.2.weight", VAE + "quant_conv.bias"],
    "sd21": [OPEN + "transformer.resblocks.0.attn.in_proj_weight", OPEN + "positional_embedding"],
    "sdxl": ["conditioner.embedders.1.model.text_projection", UNET + "label_emb.0.2.bias"],
}


@pytest.mark.parametrize(("name", "gone"), [(name, gone) for name, many in GONE.items() for gone in many])
def test_a_single_file_that_lacks_a_weight_is_refused(name: str, gone: str, made: Any, tmp_path: Path) -> None:
    _, state = made(name)
    del state[gone]
    with pytest.raises(CheckpointError, match=f"1 weight .*{gone.replace('.', '[.]')}"):
        load_pipeline(saved(state, tmp_path / "m.safetensors"))


def test_an_autoencoder_that_lacks_a_weight_is_refused(made: Any, tmp_path: Path) -> None:
    state = {name.removeprefix(VAE): one for name, one in made("sd15")[1].items() if name.startswith(VAE)}
    whole = load_autoencoder(saved(state, tmp_path / "whole.safetensors"), HALF).state_dict()
    assert all(torch.equal(whole[name], one) for name, one in made("sd15")[0]["vae"].state_dict().items())
    del state["decoder.mid.attn_1.q.weight"]
    with pytest.raises(CheckpointError, match=r"1.*AutoencoderKL: .*attn_1\.q\.weight"):
        load_autoencoder(saved(state, tmp_path / "m.safetensors"), HALF)


@pytest.mark.parametrize("part", ["text_encoder", "unet", "vae"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_folder_that_lacks_weights_is_refused(part: str, count: int, tmp_path: Path) -> None:
    load_pipeline(None).save_pretrained(tmp_path)
    file = next((tmp_path / part).glob("*.safetensors"))
    state = load_file(file)
    for gone in sorted(state)[-count:]:
        del state[gone]
    save_file(state, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"lacks {count} weight"):
        load_pipeline(tmp_path)
    told = CliRunner().invoke(app, ["generate", "an apple", "--model", str(tmp_path), "--steps", "1", "--vram", "2GB"])
    assert told.exit_code == 2 and "lacks" in told.output


def test_a_unet_by_itself_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    from sd_lowvram.unets.checkpoints.load_unet import load_unet

    load_pipeline(None).unet.save_pretrained(tmp_path, variant="bf16")
    file = next(tmp_path.glob("*.safetensors"))
    load_unet(tmp_path, None)
    save_file({name: one for name, one in load_file(file).items() if name != "conv_out.bias"}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1.*UNet2DConditionModel: conv_out\.bias"):
        load_unet(tmp_path, None)


def renamed(old: str, new: str) -> Callable[[Weights], Weights]:
    return lambda state: {
        (new + name.removeprefix(old) if name.startswith(old) else name): one for name, one in state.items()
    }


def more(**tensors: Tensor) -> Callable[[Weights], Weights]:
    return lambda state: state | {name.replace("__", "."): one for name, one in tensors.items()}


def without(*ends: str) -> Callable[[Weights], Weights]:
    return lambda state: {name: one for name, one in state.items() if not name.endswith(ends)}


def matrices(state: Weights) -> Weights:
    """The autoencoder's attention as matrices, as newer programs write it."""
    return {
        name: one[:, :, 0, 0].clone() if ".attn_1." in name and one.ndim == 4 else one for name, one in state.items()
    }


def of_training(state: Weights) -> Weights:
    extra = {f"model_ema.{name.replace('.', '')}": one.clone() for name, one in state.items() if name.startswith(UNET)}
    extra |= {"betas": torch.ones(9), "alphas_cumprod": torch.ones(9), "model_ema.decay": torch.ones(())}
    return state | extra | {VAE + "loss.discriminator.main.0.weight": torch.ones(3), "loss.logvar": torch.ones(())}


POSITIONS = torch.arange(77)[None]
CLIP_XL, OPEN_XL = "conditioner.embedders.0.transformer.text_model.", "conditioner.embedders.1.model."
REAL = {
    "pruned": ("sd15", lambda state: state),
    "with position ids": ("sd15", lambda state: state | {TEXT + "embeddings.position_ids": POSITIONS}),
    "of training": ("sd15", of_training),
    "old CLIP names": ("sd15", renamed(TEXT, "cond_stage_model.transformer.")),
    "whole CLIP": (
        "sd15",
        lambda state: (
            state
            | {
                "cond_stage_model.transformer.vision_model.post_layernorm.bias": torch.ones(8),
                "cond_stage_model.transformer.logit_scale": torch.ones(()),
                "cond_stage_model.transformer.text_projection.weight": torch.ones(8, 8),
            }
        ),
    ),
    "attention as matrices": ("sd15", matrices),
    "diffusion_model.": ("sd15", renamed(UNET, "diffusion_model.")),
    "model.": ("sd15", renamed(UNET, "model.")),
    "wrapped in model.": ("sd15", renamed("", "model.")),
    "vae.": ("sd15", renamed(VAE, "vae.")),
    "Stability's SD2": (
        "sd21",
        lambda state: state | {OPEN + "logit_scale": torch.ones(()), OPEN + "attn_mask": torch.ones(77, 77)},
    ),
    "Kohya's SD2": ("sd21", without("text_projection", "logit_scale")),
    "SD2 by transformers' names": ("sd21", None),
    "Stability's SDXL": (
        "sdxl",
        lambda state: state | {CLIP_XL + "embeddings.position_ids": POSITIONS, OPEN_XL + "logit_scale": torch.ones(())},
    ),
    "Kohya's SDXL": ("sdxl", without("position_ids", "logit_scale")),
    "SDXL with old CLIP names": ("sdxl", renamed(CLIP_XL, "conditioner.embedders.0.transformer.")),
    "SDXL with a projection by rows": (
        "sdxl",
        lambda state: (
            without(".text_projection")(state)
            | {OPEN_XL + "text_projection.weight": state[OPEN_XL + "text_projection"].t().contiguous()}
        ),
    ),
    "SDXL under diffusion_model.": ("sdxl", renamed(UNET, "diffusion_model.")),
}
"""Names as real files have them."""


@pytest.mark.parametrize("kind", REAL)
def test_files_as_other_programs_write_them_load(kind: str, made: Any, tmp_path: Path) -> None:
    name, change = REAL[kind]
    models, state = made(name)
    if change is None:
        texts = models["text_encoder"].state_dict()
        text = {
            "cond_stage_model.transformer.text_model." + key.removeprefix("text_model."): texts[key] for key in texts
        }
        state = {key: one for key, one in state.items() if not key.startswith(OPEN)} | text
    else:
        state = change(state)
    path = saved(state, tmp_path / "m.safetensors")
    assert configuration(str(path))["unet"]["cross_attention_dim"] == narrow(name)["unet"]["cross_attention_dim"]
    loads_equal(path, models)


@pytest.mark.parametrize("text", [TEXT + "embeddings.position_embedding.weight"])
def test_long_clip_is_refused_by_name(text: str, made: Any, tmp_path: Path) -> None:
    _, state = made("sd15")
    state[text] = torch.zeros(248, 768, dtype=HALF)
    with pytest.raises(CheckpointError, match=r"Long-CLIP .* 248 tokens"):
        configuration(str(saved(state, tmp_path / "m.safetensors")))


@pytest.mark.parametrize(
    ("name", "looks"),
    [
        ("model.diffusion_model.double_blocks.0.img_mod.lin.weight", "FLUX"),
        ("single_transformer_blocks.0.attn.to_q.weight", "FLUX"),
        ("model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight", "SD3"),
        ("noise_refiner.0.attention.qkv.weight", "Z-Image"),
        ("transformer_blocks.0.attn.add_q_proj.weight", "Qwen-Image"),
    ],
)
def test_todays_models_in_one_file_are_pointed_to_their_option(name: str, looks: str, tmp_path: Path) -> None:
    more = {
        "vae.decoder.conv_in.weight": torch.zeros(1),
        "text_encoders.t5xxl.transformer.shared.weight": torch.zeros(1),
    }
    path = saved({name: torch.zeros(1), **more}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=f"{looks}: .*--transformer"):
        configuration(str(path))


def test_a_gguf_file_is_pointed_to_its_option(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(CheckpointError, match="--transformer"):
        configuration(str(path))


@pytest.mark.parametrize(("variant", "shards"), [("fp16", "10GB"), ("fp16", "1MB"), ("bf16", "10GB"), ("bf16", "1MB")])
def test_a_folder_of_one_variant_loads(variant: str, shards: str, tmp_path: Path) -> None:
    whole = load_pipeline(None)
    whole.save_pretrained(tmp_path, variant=variant, max_shard_size=shards)
    found = load_pipeline(tmp_path)
    for part in ("unet", "vae", "text_encoder"):
        ours, theirs = getattr(found, part).state_dict(), getattr(whole, part).state_dict()
        assert all(torch.equal(ours[name], one) for name, one in theirs.items())


def test_a_folder_whose_parts_have_other_variants_loads(tmp_path: Path) -> None:
    load_pipeline(None).save_pretrained(tmp_path)
    for part, variant in (("unet", "bf16"), ("text_encoder", "fp16")):
        file = next((tmp_path / part).glob("*.safetensors"))
        file.rename(file.with_name(f"{file.stem}.{variant}.safetensors"))
    assert load_pipeline(tmp_path).unet.dtype == torch.float32


def test_a_deleted_feature_extractor_and_image_encoder_are_none(tmp_path: Path) -> None:
    load_pipeline(None).save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    index |= {"feature_extractor": ["transformers", "CLIPImageProcessor"]}
    index |= {"image_encoder": ["transformers", "CLIPVisionModelWithProjection"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    pipe = load_pipeline(tmp_path)
    assert pipe.feature_extractor is None and pipe.image_encoder is None


ZERO = {"v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)}
COSXL = {"edm_vpred.sigma_max": torch.tensor(120.0), "edm_vpred.sigma_min": torch.tensor(0.002)}
RESCALED = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing", "prediction_type": "v_prediction"}
MEAN = [-1.7, 1.9, -1.4, 2.5]
PLAYGROUND = {"edm_mean": torch.tensor(MEAN).reshape(1, 4, 1, 1), "edm_std": torch.full((1, 4, 1, 1), 6.0)}


@pytest.mark.parametrize("name", ["sd15", "sd21", "sdxl"])
def test_zero_terminal_snr_is_read_of_the_file(name: str, made: Any, tmp_path: Path) -> None:
    path = saved(made(name)[1] | ZERO, tmp_path / "m.safetensors")
    scheduler = load_pipeline(path).scheduler
    assert scheduler.config.prediction_type == "v_prediction" and scheduler.config.timestep_spacing == "trailing"
    assert scheduler.alphas_cumprod[-1] < 1e-6
    noise = load_pipeline(path, prediction="epsilon").scheduler.config
    assert noise.prediction_type == "epsilon" and not noise.get("rescale_betas_zero_snr")


@pytest.mark.parametrize(("scheduler", "keeps"), [("ddim", True), ("euler-a", True), ("heun", False), ("plms", False)])
def test_another_scheduler_keeps_zero_terminal_snr_or_says_that_it_does_not(
    scheduler: str, keeps: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe: Any = load_pipeline(None)
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, **RESCALED)
    schedule(Job(prompt="", steps=3, scheduler=scheduler), pipe)
    assert ("zero terminal SNR" in capsys.readouterr().err) != keeps
    assert bool(pipe.scheduler.config.get("rescale_betas_zero_snr")) == keeps
    assert pipe.scheduler.config.prediction_type == "v_prediction"


@pytest.mark.parametrize(("marks", "kind"), [(COSXL, "EDMEuler"), (PLAYGROUND, "EDMDPMSolverMultistep")])
def test_models_of_noise_levels_have_their_own_scheduler(marks: Weights, kind: str, made: Any, tmp_path: Path) -> None:
    path = saved(made("sdxl")[1] | marks, tmp_path / "m.safetensors")
    pipe: Any = load_pipeline(path)
    assert type(pipe.scheduler).__name__ == f"{kind}Scheduler"
    wanted = {"sigma_max": 80.0, "sigma_data": 0.5, "prediction_type": "epsilon"}
    if marks is COSXL:
        wanted = {"sigma_max": 120.0, "sigma_data": 1.0, "prediction_type": "v_prediction"}
    assert wanted.items() <= dict(pipe.scheduler.config).items()
    if marks is PLAYGROUND:
        assert pipe.vae.config.latents_mean == pytest.approx(MEAN)
        assert pipe.vae.config.latents_std == [6.0] * 4 and pipe.vae.config.scaling_factor == 0.5
    with pytest.raises(BadInputError, match="leave it out"):
        schedule(Job(prompt="", steps=2, scheduler="euler"), pipe)
    texts = {"prompt_embeds": torch.zeros(1, 77, 2048), "pooled_prompt_embeds": torch.zeros(1, 1280)}
    texts |= {f"negative_{name}": one for name, one in texts.items()}
    call = {**texts, "width": 64, "height": 64, "num_inference_steps": 2, "output_type": "pt"}
    plain = pipe(**call, generator=torch.Generator().manual_seed(0)).images
    optimize(pipe, vram="2GB", width=64, height=64, device="cpu", settings=Settings.smallest())
    assert torch.allclose(pipe(**call, generator=torch.Generator().manual_seed(0)).images, plain, atol=1e-4)


@pytest.mark.parametrize("shape", [(0,), (2,)])
def test_a_noise_level_that_is_no_number_is_refused(shape: tuple[int, ...], made: Any, tmp_path: Path) -> None:
    path = saved(made("sdxl")[1] | {"edm_vpred.sigma_max": torch.ones(shape)}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"sigma_max.*1"):
        configuration(str(path))


@pytest.mark.parametrize("scheduler", ["plms", "heun", "euler"])
def test_no_more_steps_are_shown_than_were_asked_for(
    scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sd_lowvram.commands.show import Bars

    shown: list[tuple[int, int]] = []
    own = Bars.update

    def update(self: Bars, stage: str, done: int, total: int) -> None:
        if stage == "steps":
            shown.append((done, total))
        own(self, stage, done, total)

    monkeypatch.setattr(Bars, "update", update)
    asked = ("--steps", "3", "--scheduler", scheduler, "--output", str(tmp_path / "a.png"))
    asked += ("--width", "64", "--height", "64")
    told = CliRunner().invoke(app, ["generate", "a red apple", *asked, "--device", "cpu", "--vram", "2GB"])
    assert told.exit_code == 0, told.output
    assert shown[-1] == (3, 3) and all(done <= total == 3 for done, total in shown)
