"""Single files of smaller UNets through ComfyUI's own loader: a JSON line for each, and what its UNet makes of noise.

COMFYUI_PYTHON tests/unets/hosts/comfyui_files.py COMFYUI_DIR WIDTH FILE ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "hosts"))
import comfyui_inside as inside

PIXELS = 8 * inside.SIDE


def main(host: str, width: str, *files: str) -> None:
    inside.enter(Path(host))
    import comfy.sd
    from comfy.supported_models import SD15

    SD15.unet_config["model_channels"] = int(width)  # by which the host knows SD1.5
    nodes = inside.our_nodes()
    for file in files:
        model, clip, vae, _ = comfy.sd.load_checkpoint_guess_config(file, model_options={"dtype": torch.float32})
        print(json.dumps({"file": file, **_facts(nodes, file, model, clip, vae)}), flush=True)


def _facts(nodes: dict[str, Any], file: str, model: Any, clip: Any, vae: Any) -> dict[str, Any]:
    from safetensors.torch import load_file

    unet = model.model.diffusion_model
    prefix = "model.diffusion_model."
    stored = {name.removeprefix(prefix): one for name, one in load_file(file).items() if name.startswith(prefix)}
    loaded = unet.state_dict()
    noise = torch.Generator().manual_seed(1)
    latents, text = (torch.randn(size, generator=noise) for size in ((2, 4, 8, 8), (2, 77, 768)))
    with torch.inference_mode():
        seen = unet(latents, torch.tensor([500.0, 500.0]), text)
    torch.save(seen.clone(), Path(file).with_suffix(".seen"))
    ours = inside.ours(nodes, model, **_ON)[0]
    pictures = [_drawn(one, clip, vae) for one in (model, ours)]
    return {
        "equal": loaded.keys() == stored.keys()
        and all(torch.equal(loaded[name], stored[name].float()) for name in stored),
        "far": float((pictures[0] - pictures[1]).norm() / pictures[0].norm()),
        "spread": float(pictures[0].std()),
        "size": [*pictures[0].shape],
    }


_ON = {"attention": "sliced", "attention_mib": 1, "residual_strips": 3, "feed_forward_chunks": 2, "park_skips": "on"}


def _drawn(model: Any, clip: Any, vae: Any) -> torch.Tensor:
    import nodes

    texts = [nodes.CLIPTextEncode().encode(clip, words)[0] for words in ("a red cube", "")]
    latents = {"samples": torch.zeros(1, 4, inside.SIDE, inside.SIDE)}
    with torch.inference_mode():
        (made,) = nodes.KSampler().sample(model, 7, 2, 5.0, "euler", "normal", *texts, latents)
        return vae.decode(made["samples"])


if __name__ == "__main__":
    main(*sys.argv[1:])
