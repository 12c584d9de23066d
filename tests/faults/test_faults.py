"""Runs that are disturbed: the short form of ``make faults``, and that nothing stays behind of any of them."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import fault_table
import psutil
import pytest
import torch

from sd_lowvram import Settings, optimize, restore
from sd_lowvram.checkpoints.load import load_pipeline
from sd_lowvram.errors import LowVRAMError

OUTCOMES = {
    "out of memory": (fault_table.SAME, fault_table.SAME),
    "NaN": (fault_table.RESUMED, fault_table.SAME),
}
"""In the UNet and in the decoder; with other components each run ends and is resumed."""


WHERE = ("unet.mid_block", "vae.decoder.up_blocks.1")
SHORT = (("full disk",), ("NaN", "truncated checkpoint"))
"""Faults at each of these places."""


@pytest.mark.slow(40)
@pytest.mark.parametrize("faults", [SHORT, pytest.param((tuple(fault_table.FAULTS),) * 2, marks=pytest.mark.rare)])
def test_no_run_is_lost(forked: Callable[..., Any], faults: tuple[tuple[str, ...], ...]) -> None:
    known = {
        (place, fault) for place, some in zip(WHERE, faults, strict=True) for fault in {*fault_table.FAULTS} - {*some}
    }
    found = list(fault_table.rows(WHERE, known=known, there=forked))
    assert len(found) == sum(map(len, faults))
    for row in found:
        in_unet, in_decoder = OUTCOMES.get(row["fault"], (fault_table.RESUMED, fault_table.RESUMED))
        assert row["outcome"] == (in_unet if row["place"] == WHERE[0] else in_decoder), row
    resumed = sum(row["outcome"] == fault_table.RESUMED for row in found)
    assert "\n".join(fault_table.lines(found)).count(fault_table.RESUMED) > resumed  # its legend, too


class Fault:
    """Comes once, at a call of a layer."""

    def __init__(self, error: Callable[[], BaseException] | None) -> None:
        self.error, self.came = error, False

    def __call__(self, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        if self.came or type(output) is not torch.Tensor:  # a fake one: a plan is made
            return None
        self.came = True
        if self.error is not None:
            raise self.error()
        return output * float("nan")


ERRORS = [
    lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
    lambda: ValueError("injected"),
    KeyboardInterrupt,
    None,
]
"""Made when they are raised: an error that is raised again keeps the frames of each time."""


@pytest.mark.slow(13)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_twenty_faults_leave_nothing_behind() -> None:
    pipe: Any = load_pipeline(None, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    before = {name: tensor.clone() for name, tensor in pipe.unet.state_dict().items()}
    fixed = Settings.policy("diffusers-default")  # so that few plans are traced
    settings = dataclasses.replace(fixed, offload="layer", vae_tiles="exact", vae_strip_mib=1)
    places = [pipe.unet.mid_block.resnets[0].conv1, pipe.vae.decoder.up_blocks[1].resnets[0].conv1]
    taken = []
    for cycle in range(16):
        fault = Fault(ERRORS[cycle % 4])
        hook = places[cycle // 4 % 2].register_forward_hook(fault)
        optimize(pipe, vram="2GB", width=64, height=64, steps=1, device="cpu", settings=settings)
        try:
            pipe("a red apple", width=64, height=64, num_inference_steps=1, output_type="pt")
        except (ValueError, KeyboardInterrupt, LowVRAMError):
            pass
        finally:
            hook.remove()
            restore(pipe)
        assert fault.came
        left = [name for part in (pipe.unet, pipe.vae) for name, one in part.named_modules() if _ours(one)]
        assert left == []
        del fault, hook
        gc.collect()
        taken.append(psutil.Process().memory_info().rss)
    assert taken[-1] - taken[3] < 20 * 2**20, taken
    for name, tensor in pipe.unet.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def _ours(module: torch.nn.Module) -> bool:
    return any(name.startswith("_sd_lowvram") for name in vars(module)) or "forward" in vars(module)
