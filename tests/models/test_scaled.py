"""Weights that stay in 8 bits as ComfyUI's files hold them: read, streamed as they are, the bits of a plain run."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import todays
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

import sd_lowvram
from sd_lowvram import Settings
from sd_lowvram.checkpoints.safetensors_header import read_header
from sd_lowvram.checkpoints.scaled_files import check_formats, convert_names, fill, split_scales
from sd_lowvram.errors import CheckpointError
from sd_lowvram.kernels.scaled import ScaledLinear
from sd_lowvram.session import attached

KINDS = ("scaled_fp8", "float8_e4m3fn", "float8_e5m2", "int8_tensorwise", "int8 by rows", "fp8 without scales")


def stored(name: str, weight: Tensor, kind: str) -> dict[str, Tensor]:
    """One layer's weight as a file of that kind has it, with all that is stored next to it."""
    if kind == "fp8 without scales":
        return {f"{name}.weight": weight.to(torch.float8_e4m3fn)}
    if kind.startswith("int8"):
        largest = weight.abs().amax(1, keepdim=True) if kind == "int8 by rows" else weight.abs().max()
        scale = largest / 127
        eight = (weight / scale).round().clamp(-128, 127).to(torch.int8)
    else:
        dtype = torch.float8_e5m2 if kind == "float8_e5m2" else torch.float8_e4m3fn
        scale = weight.abs().max() / torch.finfo(dtype).max
        eight = (weight / scale).to(dtype)
    if kind == "scaled_fp8":
        return {f"{name}.weight": eight, f"{name}.scale_weight": scale, f"{name}.scale_input": torch.ones(())}
    told = json.dumps({"format": "int8_tensorwise" if kind.startswith("int8") else kind}).encode()
    beside = {f"{name}.comfy_quant": torch.tensor(list(told), dtype=torch.uint8)}
    return {f"{name}.weight": eight, f"{name}.weight_scale": scale} | beside


def as_file(model: nn.Module, kind: str, part: str = "") -> dict[str, Tensor]:
    """The weights of a model, those of linear layers below a name with ``part`` in 8 bits."""
    made = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if type(module) is nn.Linear and part in name:
            made |= stored(name, module.weight.detach(), kind)
    return made | ({"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)} if kind == "scaled_fp8" else {})


def read(model: nn.Module, path: Path) -> nn.Module:
    """``model`` with what the file at ``path`` holds for it."""
    check_formats(path, read_header(path))
    assert not fill(model, *convert_names(*split_scales(load_file(path)), lambda weights: weights), torch.float32)
    return model.requires_grad_(False)


def as_comfy_has_it(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What ComfyUI 0.33 computes with on a card without such matrix products: its two layouts' ``dequantize``."""
    if scale is None:
        return weight.to(dtype=dtype)
    if weight.dtype == torch.int8:
        return (weight.float() * scale).to(dtype)
    return weight.to(dtype=dtype) * scale.to(dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_layer_computes_as_comfyui_does(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(48, 32), nn.SiLU(), nn.Linear(32, 16, bias=False))
    held = as_file(plain, kind)
    save_file(held, tmp_path / "a.safetensors")
    model = read(plain, tmp_path / "a.safetensors").to(dtype)
    assert [type(one) for one in model] == [ScaledLinear, nn.SiLU, ScaledLinear]
    assert sum(one.weight.nbytes for one in (model[0], model[2])) == 48 * 32 + 32 * 16
    scales = [held.get(f"{at}.scale_weight", held.get(f"{at}.weight_scale")) for at in "02"]
    first, last = (as_comfy_has_it(held[f"{at}.weight"], one, dtype) for at, one in zip("02", scales, strict=True))
    x = torch.randn(3, 5, 48, dtype=dtype)
    wanted = functional.linear(functional.silu(functional.linear(x, first, held["0.bias"].to(dtype))), last)
    assert torch.equal(model(x), wanted)


@pytest.mark.parametrize("offload", ["layer", "component"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_streamed_it_has_the_bits_of_a_resident_run(kind: str, offload: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    save_file(as_file(plain, kind), tmp_path / "a.safetensors")
    model, x = read(plain, tmp_path / "a.safetensors"), torch.randn(2, 256)
    wanted, before = model(x), [one.weight for one in model]
    with attached(model, Settings(offload=offload)):
        assert torch.equal(model(x), wanted) and torch.equal(model(x), wanted)
    assert all(one.weight is held for one, held in zip(model, before, strict=True))
    assert torch.equal(model(x), wanted)


@pytest.mark.slow(40)
@pytest.mark.parametrize(
    ("family", "kind"), [("flux", "scaled_fp8"), ("z_image", "int8 by rows"), ("sd3", "float8_e4m3fn")]
)
def test_a_pipeline_is_planned_with_what_widening_takes(family: str, kind: str, tmp_path: Path) -> None:
    few = dataclasses.replace(Settings.policy("diffusers-default"), offload=None, vae_tiles=None)
    asked: dict[str, Any] = {"width": todays.SIZE, "height": todays.SIZE, "device": "cpu", "settings": few}
    pipe = getattr(todays, family)()
    names = ("transformer", "text_encoder", "text_encoder_2")
    parts = {name: pipe.components[name] for name in names if name in pipe.components}
    for name, part in parts.items():
        save_file(as_file(part, kind, "block" if name == "transformer" else ""), tmp_path / f"{name}.safetensors")
        read(part, tmp_path / f"{name}.safetensors")
    wanted = todays.picture(pipe)
    about = sd_lowvram.plan(pipe, vram="1GB", **asked).minimum_vram_bytes
    for budget in (1 << 30, int(1.1 * about)):
        plan = sd_lowvram.optimize(pipe, vram=f"{budget} B", **asked)
        with sd_lowvram.measured(pipe) as run:
            assert todays.agrees(plan, todays.picture(pipe), wanted)
        assert todays.within(plan, run)
        sd_lowvram.restore(pipe)
    assert plan.settings.offload != "none" and torch.equal(todays.picture(pipe), wanted)


def test_the_scales_of_rows_go_where_a_converter_puts_them() -> None:
    weights = {"qkv.weight": torch.ones(6, 4).to(torch.float8_e4m3fn), "shift_scale.weight": torch.ones(4, 4)}
    scales = {"qkv.weight": torch.arange(6.0)[:, None]}

    def convert(held: dict[str, Any]) -> dict[str, Any]:
        q, k, v = held.pop("qkv.weight").chunk(3)
        shift, scale = held.pop("shift_scale.weight").chunk(2)
        return {"q.weight": q, "kv.weight": torch.cat([v, k]), "ada.weight": torch.cat([scale, shift])}

    made, moved = convert_names(weights, scales, convert)
    assert made["ada.weight"].dtype == torch.float32 and moved.keys() == {"q.weight", "kv.weight"}
    assert moved["kv.weight"].flatten().tolist() == [4, 5, 2, 3]
    alike = convert_names({**weights}, {"qkv.weight": torch.tensor([3.0])}, convert)[1]
    assert all(one.shape == () and one == 3 for one in alike.values())


REFUSED = {
    "nvfp4": {"a.weight": torch.zeros(2, 2, dtype=torch.uint8), "a.weight_scale_2": torch.ones(())},
    "nunchaku": {"a.qweight": torch.zeros(2, 2, dtype=torch.int8), "a.wscales": torch.ones(2)},
    "mxfp8": {"a.comfy_quant": torch.tensor(list(b'{"format": "mxfp8"}'), dtype=torch.uint8)},
    "convrot": {
        "a.comfy_quant": torch.tensor(list(b'{"format": "int8_tensorwise", "convrot": true}'), dtype=torch.uint8)
    },
    "nf4": {"a.weight.quant_state.bitsandbytes__nf4": torch.zeros(2, dtype=torch.uint8)},
    "not a table": {"a.comfy_quant": torch.tensor(list(b"[1"), dtype=torch.uint8)},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_kernel_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    save_file(REFUSED[kind], tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=kind):
        check_formats(tmp_path / "a.safetensors", read_header(tmp_path / "a.safetensors"))


def test_the_metadata_of_a_file_may_say_it_too(tmp_path: Path) -> None:
    layers = {"a": {"format": "float8_e4m3fn"}, "b": {"format": "nvfp4"}}
    about = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
    save_file({"a.weight": torch.zeros(2, 2)}, tmp_path / "a.safetensors", metadata=about)
    with pytest.raises(CheckpointError, match="nvfp4"):
        check_formats(tmp_path / "a.safetensors", read_header(tmp_path / "a.safetensors"))


def test_int8_without_a_scale_is_no_weight() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(CheckpointError, match="without a scale"):
        fill(model, {"0.weight": torch.zeros(4, 4, dtype=torch.int8)}, {}, torch.float32)


def test_a_lora_goes_around_such_a_layer() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16))
    held = split_scales(as_file(plain, "scaled_fp8"))
    fill(plain, *held, torch.float32)
    x = torch.randn(2, 16)
    before = plain(x)
    with_lora = peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False), copy.deepcopy(plain)
    )
    assert not torch.equal(with_lora(x), before) and torch.equal(plain(x), before)
