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
    found = inside("comfyui_files.py", str(WIDTH), *map(str, files.values()))
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


only_forge = pytest.mark.skipif(KIND != "forge", reason="set WEBUI_DIR to a Forge that runs")


@pytest.fixture(scope="module")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data = webui_data.empty(tmp_path_factory.mktemp("forge"))
    webui_data.add_extension(data)
    files = cut_files.write(narrow("unet", "vae"), data / webui_data.MODELS)
    with serving(Path(WEBUI), PYTHON, data, "--ckpt", str(files["base"])) as server:
        yield server


@only_forge
@pytest.mark.parametrize("kind", ["base", "M2"])
def test_forge_loads_what_has_a_middle_block(forge: Server, kind: str) -> None:
    begin = len(forge.told())
    chosen = {"override_settings": {"sd_model_checkpoint": f"{kind}.safetensors"}}
    plain, ours = forge.make(**chosen), forge.make(ours={"preset": "smallest"}, **chosen)
    assert "IntegratedUNet2DConditionModel Missing" not in forge.told()[begin:]
    assert "IntegratedUNet2DConditionModel Unexpected" not in forge.told()[begin:]
    off = numpy.abs(plain.picture.astype(int) - ours.picture.astype(int)).max(-1)
    assert (off > 1).mean() <= 0.001 and plain.picture.std() > 5
    residual_blocks = {"base": 14, "M2": 18}[kind]
    assert forge.sites()["residual_strips"] == residual_blocks, forge.plans()[-1]


@only_forge
@pytest.mark.parametrize("kind", ["small", "tiny"])
def test_forge_fails_aloud_without_a_middle_block(forge: Server, kind: str) -> None:
    """It builds a residual block there all the same, for which the file has no weights."""
    with pytest.raises(RefusedError, match="must be Tensor, not NoneType"):
        forge.make(override_settings={"sd_model_checkpoint": f"{kind}.safetensors"})
    assert "IntegratedUNet2DConditionModel Missing: ['middle_block.0." in forge.told()
