"""sd-lowvram in AUTOMATIC1111's WebUI, Forge, Forge Neo and reForge.

A panel, settings, infotext, axes of grids and arguments of the API. What is chosen is handed to the core; nothing is
computed here.
"""

from __future__ import annotations


def host_refusal() -> str:
    """Return the sentence for a WebUI that calls no extension before it samples (SD.Next); empty for the others."""
    from modules import scripts

    if hasattr(scripts.Script, "process_before_every_sampling"):
        return ""
    return (
        "[sd-lowvram] the panel is not added: this WebUI (SD.Next?) calls no extension before it samples; "
        "SD.Next runs diffusers, whose pipelines sd-lowvram plans in Python"
    )


def register() -> None:
    """Hand the host our callbacks; it forgets them at every "Reload UI" and asks again."""
    from modules import script_callbacks

    from sd_lowvram.errors import speak_plainly
    from sd_lowvram.settings import knobs

    from . import grid, hosted, optimizers, options, run

    speak_plainly(labels={name: knob.label for name, knob in knobs().items()})
    script_callbacks.on_ui_settings(options.add_options)
    script_callbacks.on_before_ui(grid.add_axes)
    script_callbacks.on_script_unloaded(run.end)
    script_callbacks.on_script_unloaded(hosted.register())
    if hasattr(script_callbacks, "on_list_optimizers"):  # reForge has none
        script_callbacks.on_list_optimizers(optimizers.add_optimizers)
