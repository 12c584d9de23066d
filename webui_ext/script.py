"""The always-on script: the panel's place in the page and in every generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException
from modules import scripts, shared
from modules.ui_components import InputAccordion

from sd_lowvram.errors import LowVRAMError
from sd_lowvram.units import format_size

from . import controls, host, infotext, run
from .arguments import TITLE, read
from .grid import OVERRIDES
from .line import Line
from .options import defaults

NAME = "sd-lowvram"


class Refused(HTTPException):
    """A generation that was not begun; the page shows the reason, and an API call is answered with it."""

    def __init__(self, reason: str) -> None:
        super().__init__(422, reason)

    def __str__(self) -> str:
        return str(self.detail)


class LowVRAMScript(scripts.Script):
    """Attaches to the host's model for the time of one generation, and only when it is enabled."""

    def title(self) -> str:
        return NAME

    def show(self, is_img2img: bool) -> Any:
        return scripts.AlwaysVisible

    def ui(self, is_img2img: bool) -> list[Any]:
        made, line = controls.build(InputAccordion, "img2img" if is_img2img else "txt2img", defaults())
        self._line_of().place(list(made.values()), line)
        self.infotext_fields = [(component, _pasted(name)) for name, component in made.items()]
        self.paste_field_names = [infotext.KEY]
        return list(made.values())

    def after_component(self, component: Any, **kwargs: Any) -> None:
        self._line_of().offer(component, kwargs.get("elem_id"))

    def _line_of(self) -> Line:
        """The host makes its scripts without arguments, and asks ``show`` before it tells them their tab."""
        if not hasattr(self, "_line"):
            self._line = Line("img2img" if self.is_img2img else "txt2img")
        return self._line

    def before_process(self, p: Any, *values: Any) -> None:
        run.stop()  # a generation that failed never told us

    def process(self, p: Any, *values: Any) -> None:
        try:
            chosen = _chosen(p, values)
            if chosen["enabled"]:
                _begin(p, chosen, self.is_img2img)
        except LowVRAMError as error:
            _refuse(p, str(error))

    def process_batch(self, p: Any, *values: Any, **kwargs: Any) -> None:
        if run.current() is not None and getattr(shared, "loaded_hypernetworks", None):
            _refuse(
                p,
                "a hypernetwork changes what attention sees, and sd-lowvram's attention would leave it out: take it "
                f"out of the prompt, or turn {TITLE} off",
                "sample",
            )

    def process_before_every_sampling(self, p: Any, *values: Any, **kwargs: Any) -> None:
        latents = kwargs.get("x")
        if latents is None:
            return
        try:  # the second pass of a hires fix, perhaps of another checkpoint
            run.follow(shared.sd_model, 8 * latents.shape[3], 8 * latents.shape[2], len(latents))
        except LowVRAMError as error:
            for way in ("sample", "sample_img2img"):
                _refuse(p.sampler, str(error), way)

    def postprocess(self, p: Any, processed: Any, *values: Any) -> None:
        run.stop()


def _pasted(name: str) -> Any:
    return lambda parameters: infotext.paste(parameters, name)


def _chosen(p: Any, values: Any) -> Mapping[str, Any]:
    chosen = read(values, defaults())
    axes = getattr(p, OVERRIDES, {})
    return read([{**chosen, **axes}], chosen) if axes else chosen


def _begin(p: Any, chosen: Mapping[str, Any], encodes: bool) -> None:
    picture = run.Picture(
        width=p.width,
        height=p.height,
        batch=p.batch_size,
        steps=p.steps,
        passes=2 if p.cfg_scale != 1 else 1,
        encodes=encodes or bool(getattr(p, "enable_hr", False)),
    )
    plan, attachment = run.start(shared.sd_model, chosen, picture)
    p.extra_generation_params[infotext.KEY] = infotext.write(chosen)
    predicted = plan.predicted
    sites = ", ".join(f"{hook} {count}" for hook, count in attachment.sites.items())
    peak = format_size(predicted.peak_bytes + predicted.overhead_bytes)
    print(f"[{NAME}] {p.width}x{p.height}, batch {p.batch_size}: peak {peak} of {format_size(plan.request.vram)}, "
          f"about {predicted.seconds:.0f} s; sites: {sites or 'none'}")  # fmt: skip
    if host.moves_weights(shared.sd_model) and any(chosen[name] not in ("auto", 0) for name in host.WEIGHTS):
        p.comment(f"{NAME}: this WebUI moves the weights itself; the settings for weights have no effect")


def _refuse(owner: Any, reason: str, at: str = "init") -> None:
    """Let the generation fail where the host calls ``owner.at`` next: what a callback raises, it only logs."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise Refused(reason)

    setattr(owner, at, fail)
