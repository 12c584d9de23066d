"""The always-on script: the panel's place in the page and in every generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modules import scripts, shared
from modules.ui_components import InputAccordion

from sd_lowvram.errors import BudgetError

from . import checkpoint_preview, controls, host, hosted, infotext, run, saving
from .aloud import aloud
from .arguments import NAME, read
from .estimate import decision_in
from .grid import OVERRIDES
from .line import Line
from .options import defaults
from .picture import Generation, passes_of, requested_picture


class LowVRAMScript(scripts.Script):
    """Attaches to the host's model for the time of one generation, and only when it is enabled."""

    def title(self) -> str:
        return NAME

    def show(self, is_img2img: bool) -> Any:
        return scripts.AlwaysVisible

    def ui(self, is_img2img: bool) -> list[Any]:
        components, line, head = controls.build(
            InputAccordion, "img2img" if is_img2img else "txt2img", defaults(), host.without_effect()
        )
        self._line_of().place(list(components.values()), line, head)
        self.infotext_fields = [(component, _paste_reader(name)) for name, component in components.items()]
        self.paste_field_names = [infotext.KEY]
        return list(components.values())

    def after_component(self, component: Any, **kwargs: Any) -> None:
        self._line_of().offer(component, kwargs.get("elem_id"))

    def _line_of(self) -> Line:
        """The host makes its scripts without arguments, and calls ``show`` before it sets their tab."""
        if not hasattr(self, "_line"):
            self._line = Line("img2img" if self.is_img2img else "txt2img")
        return self._line

    def before_process(self, p: Any, *values: Any) -> None:
        if run.is_within(p):
            return
        run.end()  # what went wrong before the host's run began left the last owner
        with aloud(p, "init"):
            chosen = _read_values(p, values)
            if chosen["enabled"]:
                run.own(p, chosen)

    def process(self, p: Any, *values: Any) -> None:
        if run.is_within(p):
            p.extra_generation_params[infotext.KEY] = infotext.write(run.chosen_by_owner())
            return
        with aloud(p, "init"):
            chosen = _read_values(p, values)
            if chosen["enabled"]:
                _begin(p, chosen)

    def process_before_every_sampling(self, p: Any, *values: Any, **kwargs: Any) -> None:
        latents = kwargs.get("x")
        if latents is None:
            return
        with aloud(p.sampler, "sample", "sample_img2img"):  # perhaps the second pass of a hires fix
            model = shared.sd_model
            steps = (getattr(p, "hr_second_pass_steps", 0) or p.steps) if getattr(p, "is_hr_pass", False) else None
            longer = hosted.is_longer(model, kwargs.get("c"), kwargs.get("uc"))
            run.follow(p, model, latents.shape, passes_of(p, model), steps, anew=longer)
        if run.serves(p):
            saving.watch(p)

    def post_sample(self, p: Any, ps: Any, *values: Any) -> None:
        if run.serves(p):
            saving.save(p, ps.samples)

    def postprocess_batch(self, p: Any, *values: Any, **kwargs: Any) -> None:
        if run.fallback_steps():  # the pictures are there, and what is written into them comes next
            p.extra_generation_params[infotext.RAN_OUT] = " + ".join(step.name for step in run.fallback_steps())

    def postprocess(self, p: Any, processed: Any, *values: Any) -> None:
        run.finish_pictures(p)


def _paste_reader(name: str) -> Any:
    return lambda parameters: infotext.paste(parameters, name)


def _read_values(p: Any, values: Any) -> Mapping[str, Any]:
    chosen = read(values, defaults())
    axes = getattr(p, OVERRIDES, {})
    return read([{**chosen, **axes}], chosen) if axes else chosen


def _begin(p: Any, chosen: Mapping[str, Any]) -> None:
    if not run.serves(p):
        run.own(p, chosen)
    model = shared.sd_model
    picture = requested_picture(p, model)
    _foresee_refiner(p, chosen, picture)
    tiled = host.is_tiled_elsewhere(model)
    plan, _ = run.start(model, {**chosen, "tiled": True} if tiled else chosen, picture)
    saving.begin(p, chosen["save_latents"])
    p.extra_generation_params[infotext.KEY] = infotext.write(chosen)
    if (decides := decision_in(plan)) and decides.values["over_budget"]:
        p.comment(f"{NAME}: {decides}")
        p.extra_generation_params.update(infotext.NOT_KEPT)
    if host.moves_weights(model) and any(chosen[name] not in ("auto", 0) for name in host.WEIGHTS):
        p.comment(f"{NAME}: this WebUI moves the model itself; the settings for the model in VRAM have no effect")


def _foresee_refiner(p: Any, chosen: Mapping[str, Any], picture: Generation) -> None:
    """Refuse, before the first step, a refiner that will not fit.

    Raises:
        BudgetError: it names the refiner.
    """
    checkpoint = getattr(p, "refiner_checkpoint_info", None)
    drawn = checkpoint_preview.preview_model(checkpoint)
    if checkpoint is None or drawn is None:
        return
    try:
        run.plan_for(drawn, chosen, picture)
    except BudgetError as error:
        raise BudgetError(f"the refiner {checkpoint.title}: {error}") from None
