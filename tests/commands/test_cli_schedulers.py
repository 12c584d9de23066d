"""Every scheduler that the command line names, on a small model; their names in a picture's parameters."""

from __future__ import annotations

import families
import pytest
import tiny
import torch

from sd_lowvram.checkpoints.schedulers import SCHEDULERS, find_scheduler, label_of, set_scheduler
from sd_lowvram.errors import BadInputError


@pytest.fixture(scope="module")
def pipes():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {name: families.plain(name) for name in ("sd15", "sd21")}
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("family", ["sd15", "sd21"])
def test_runs_and_is_named(pipes, family, name):
    pipe = pipes[family]
    set_scheduler(pipe, name)
    assert tiny.run(pipe, steps=3).isfinite().all()
    assert label_of(pipe.scheduler) == (SCHEDULERS[name].label, SCHEDULERS[name].schedule)
    assert pipe.scheduler.config.prediction_type == ("v_prediction" if family == "sd21" else "epsilon")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("Euler a", "euler-a"),
        ("EULER_A", "euler-a"),
        ("EulerAncestralDiscreteScheduler", "euler-a"),
        ("DPM++ 2M Karras", "dpm++-2m-karras"),
        ("DPMSolverMultistepScheduler", "dpm++-2m"),
    ],
)
def test_other_spellings(typed, meant):
    assert find_scheduler(typed) == meant


def test_nearest():
    with pytest.raises(BadInputError, match="unipc"):
        find_scheduler("unpic")
    with pytest.raises(BadInputError, match="euler, "):
        find_scheduler("")


def test_options_of_the_scheduler_before_do_not_stay(pipes):
    set_scheduler(pipes["sd15"], "dpm++-2m-sde-karras")
    set_scheduler(pipes["sd15"], "ddim")
    config = pipes["sd15"].scheduler.config
    assert not config["clip_sample"] and config["beta_schedule"] == "scaled_linear" and config["steps_offset"] == 1
