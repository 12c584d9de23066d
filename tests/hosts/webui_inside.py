"""A script for WebUI tests: does in a generation what other extensions do, and reports what of ours is on the model.

Its arguments are a switch that is called as Tiled VAE's, and one object:

    {"detailer": 256}          another img2img of this size after the picture is there, in ADetailer's order of calls
    {"process_batch": 256}     another txt2img of this size in this callback, with all scripts
    {"raises": true}           the sampling fails
"""

from __future__ import annotations

import copy
from typing import Any

import gradio as gr
from fastapi import FastAPI
from modules import processing, script_callbacks, scripts, shared


def _modules() -> list[Any]:
    model = shared.sd_model
    forge = getattr(model, "forge_objects", None)
    parts = [model] if forge is None else [forge.unet.model.diffusion_model, forge.vae.first_stage_model]
    return [module for part in parts for module in part.modules()]


def _hooks() -> dict[str, Any]:
    """Number of patched modules, and True if the host runs its own function."""
    patched = sum("_sd_lowvram_slots" in vars(module) for module in _modules())
    return {"patched": patched, "watched": "_sd_lowvram_slots" in vars(processing)}


def _routes(demo: Any, app: FastAPI) -> None:
    app.add_api_route("/tests/hooks", _hooks)


def _denoises(params: Any) -> None:
    height, width = params.x.shape[-2:]
    print(f"\n[inside] {8 * width}x{8 * height} hooks {_hooks()['patched']}", flush=True)


script_callbacks.on_app_started(_routes)
script_callbacks.on_cfg_denoiser(_denoises)


class _Tiles:
    """Another decode: of half the picture, and grey."""

    def __init__(self, decoder: Any) -> None:
        self.plain = decoder.forward

    def __call__(self, z: Any, *args: Any, **kwargs: Any) -> Any:
        print("\n[inside] tiles decode", flush=True)
        return 0 * self.plain(z, *args, **kwargs)


class Inside(scripts.Script):
    """Acts in the callbacks that its arguments name."""

    def title(self) -> str:
        return "inside"

    def show(self, is_img2img: bool) -> Any:
        return scripts.AlwaysVisible

    def ui(self, is_img2img: bool) -> list[Any]:
        tiles = gr.Checkbox(False, label="Enable Tiled VAE", elem_id=f"inside-{'i2i' if is_img2img else 't2i'}-tiles")
        return [tiles, gr.Textbox("", visible=False)]

    def process(self, p: Any, tiled: bool, asked: Any) -> None:
        if tiled:
            model = p.sd_model
            vae = getattr(getattr(model, "forge_objects", model), "vae", model).first_stage_model
            self.decoder = vae.decoder
            self.decoder.forward = _Tiles(self.decoder)
        if asked and asked.get("raises"):
            p.sample = self._fail

    @staticmethod
    def _fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the sampling fails")

    def postprocess(self, p: Any, processed: Any, tiled: bool, asked: Any) -> None:
        if tiled:
            self.decoder.forward = type(self.decoder).forward.__get__(self.decoder)

    def process_batch(self, p: Any, tiled: bool, asked: Any, **kwargs: Any) -> None:
        if asked and asked.get("process_batch") and not getattr(p, "inside", False):
            self._draw(p, processing.StableDiffusionProcessingTxt2Img, asked["process_batch"], copy.copy(p.scripts))

    def postprocess_image(self, p: Any, image: Any, tiled: bool, asked: Any) -> None:
        if not asked or not asked.get("detailer") or getattr(p, "inside", False):
            return
        if p.batch_index == 0:
            p.scripts.postprocess(copy.copy(p), processing.Processed(p, [], p.seed, ""))
        filtered = copy.copy(p.scripts)
        filtered.alwayson_scripts = []
        start = {"init_images": [image.image], "denoising_strength": 0.5, "inpainting_fill": 1, "resize_mode": 0}
        made = self._draw(p, processing.StableDiffusionProcessingImg2Img, asked["detailer"], filtered, **start)
        image.image = made.images[0].resize(image.image.size)
        if p.batch_index == p.batch_size - 1:
            p.scripts.before_process(copy.copy(p))
            p.scripts.process(copy.copy(p))

    def _draw(self, p: Any, kind: Any, side: int, runner: Any, **start: Any) -> Any:
        inner = kind(
            outpath_samples=p.outpath_samples, outpath_grids=p.outpath_grids, prompt=p.prompt, negative_prompt="",
            seed=p.seed, subseed=p.subseed, sampler_name=p.sampler_name, batch_size=1, n_iter=1, steps=p.steps,
            cfg_scale=p.cfg_scale, width=side, height=side, do_not_save_samples=True, do_not_save_grid=True, **start,
        )  # fmt: skip
        inner.scripts, inner.script_args, inner.inside = runner, p.script_args, True
        try:
            return processing.process_images(inner)
        finally:
            inner.close()
