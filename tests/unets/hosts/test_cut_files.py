"""Single files of smaller UNets in the real hosts: what loads, and that it is the model that was written.

COMFYUI_DIR=... [COMFYUI_PYTHON=...] WEBUI_DIR=... [WEBUI_PYTHON=...] make test-hosts
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cut_files
import numpy
import pytest
import torch
import webui_data
from safetensors.torch import load_file, save_file
from test_comfyui_inside import COMFYUI, inside
from webui_data import KIND, PYTHON, WEBUI
from webui_server import RefusedError, Server, serving

from sd_lowvram.checkpoints.architectures import architecture
from sd_lowvram.checkpoints.load import load_pipeline

WIDTH, LEVELS = 32, (1, 2, 4, 4)


def narrow(*parts: str) -> dict[str, Any]:
    config = architecture("sd15")
    for part in parts:
        config[part]["block_out_channels"] = [WIDTH * level for level in LEVELS]
    return config


@pytest.mark.skipif(not COMFYUI, reason="set COMFYUI_DIR to a ComfyUI that runs")
def test_comfyui_loads_every_kind(tmp_path: Path) -> None:
    """Its UNet makes of noise what ours makes of the same file, and our node's knobs leave the picture as it is."""
    files = cut_files.write(narrow("unet"), tmp_path)
    found = inside(str(Path(__file__).with_name("comfyui_files.py")), str(WIDTH), *map(str, files.values()))
    assert len(found) == len(cut_files.KINDS)
    noise = torch.Generator().manual_seed(1)
    latents, text = (torch.randn(size, generator=noise) for size in ((2, 4, 8, 8), (2, 77, 768)))
    for told, file in zip(found, files.values(), strict=True):
        assert told["equal"] and told["size"] == [1, 128, 128, 3] and told["spread"] > 0.01, told
        assert told["far"] < 1e-4, told
        with cut_files.of_config(narrow("unet")), torch.no_grad():
            unet = load_pipeline(file, dtype=torch.float32).unet
            wanted, seen = unet(latents, 500, text).sample, torch.load(file.with_suffix(".seen"))
        assert (wanted - seen).norm() / wanted.norm() < 1e-4, file.name


LAYERS = {"base": [1, 1, 1, 1], "small": [1, 1, 1, 1], "tiny": [1, 1, 1], "M2": [1, 1, 2, 2]}
RESIDUAL_BLOCKS = {"base": 14, "M2": 18, "small": 14, "tiny": 11}
"""Of the UNets that hosts build, which all have a middle block."""
only_a1111 = pytest.mark.skipif(KIND != "a1111", reason="set WEBUI_DIR to an AUTOMATIC1111 that runs")
only_forge = pytest.mark.skipif(KIND != "forge", reason="set WEBUI_DIR to a Forge that runs")


@pytest.fixture(scope="module")
def webui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data = webui_data.empty(tmp_path_factory.mktemp("webui"))
    webui_data.add_extension(data)
    files = cut_files.write(narrow("unet", "vae"), data / webui_data.MODELS)
    if KIND == "a1111":
        zeros, weights = files["base"].with_name("zeros.safetensors"), load_file(files["base"])
        save_file({key: one * (".middle_block." not in key) for key, one in weights.items()}, zeros)
        for kind, file in {**files, "zeros": zeros}.items():
            file.with_suffix(".yaml").write_text(configuration(LAYERS.get(kind, LAYERS["base"])))
    with serving(Path(WEBUI), PYTHON, data, "--ckpt", str(files["base"])) as server:
        yield server


def configuration(layers: list[int]) -> str:
    """The host's own for SD1.x with what the README says to change, and narrow."""
    text = (Path(WEBUI) / "configs" / "v1-inference.yaml").read_text()
    text = text.replace("num_res_blocks: 2", f"num_res_blocks: {layers}", 1)
    if len(layers) == 3:
        text = text.replace("channel_mult: [ 1, 2, 4, 4 ]", "channel_mult: [ 1, 2, 4 ]", 1)
    return text.replace("model_channels: 320", f"model_channels: {WIDTH}").replace("ch: 128", f"ch: {WIDTH}")


def chosen(kind: str) -> dict[str, Any]:
    settings = {"sd_model_checkpoint": f"{kind}.safetensors"}
    return {"override_settings": settings, "override_settings_restore_afterwards": False}


def drawn(webui: Server, kind: str) -> numpy.ndarray:
    """The picture of a file, which is the same with every knob of ours on."""
    plain, ours = webui.make(**chosen(kind)), webui.make(ours={"preset": "smallest"}, **chosen(kind))
    assert plain.info["sd_model_name"] == kind
    off = numpy.abs(plain.picture.astype(int) - ours.picture.astype(int)).max(-1)
    assert (off > 1).mean() <= 0.001 and plain.picture.std() > 5
    return plain.picture


@only_forge
@pytest.mark.parametrize("kind", ["base", "M2"])
def test_forge_loads_what_has_a_middle_block(webui: Server, kind: str) -> None:
    begin = len(webui.told())
    drawn(webui, kind)
    assert webui.sites()["residual_strips"] == RESIDUAL_BLOCKS[kind], webui.plans()[-1]
    told = webui.told()[begin:]
    assert "IntegratedUNet2DConditionModel Missing" not in told
    assert "IntegratedUNet2DConditionModel Unexpected" not in told


@only_forge
@pytest.mark.parametrize("kind", ["small", "tiny"])
def test_forge_fails_aloud_without_a_middle_block(webui: Server, kind: str) -> None:
    """It builds a residual block there all the same, for which the file has no weights."""
    with pytest.raises(RefusedError, match=r"Tensor.*NoneType"):
        webui.make(**chosen(kind))
    assert "IntegratedUNet2DConditionModel Missing: ['middle_block.0." in webui.told()


@only_a1111
@pytest.mark.parametrize("kind", LAYERS)
def test_a1111_loads_every_kind_that_a_yaml_describes(webui: Server, kind: str) -> None:
    drawn(webui, kind)
    assert webui.sites()["residual_strips"] == RESIDUAL_BLOCKS[kind], webui.plans()[-1]


@only_a1111
def test_a_middle_block_that_a1111_adds_does_nothing(webui: Server) -> None:
    """It fills what a file lacks with zeros: a block of residual units hands its map on then."""
    assert numpy.array_equal(drawn(webui, "small"), drawn(webui, "zeros"))
    assert not numpy.array_equal(drawn(webui, "small"), drawn(webui, "base"))
