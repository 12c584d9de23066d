"""Planning is proof against what tools leave on a model: what cannot be copied is shared with the fake copy, and so is
what must not be."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import torch

import sd_lowvram
from sd_lowvram.errors import PlanningError


class Refusing:
    """What refuses to be copied in its own way."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise NotImplementedError("no copies")


class Unbuilt:
    """Its copy cannot be built: the arguments that it gives are none that it takes."""

    def __reduce__(self) -> Any:
        return type(self), (1, 2, 3)


LEAVES: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock,
    "thread-local": threading.local,
    "event": threading.Event,
    "torch generator": torch.Generator,
    "iterator": lambda: (one for one in range(3)),
    "open file": lambda: Path(__file__).open(),  # noqa: SIM115 (the test closes it)
    "python module": lambda: sys,
    "tensor with a history": lambda: torch.ones(2, requires_grad=True) * 2,
    "refusing": Refusing,
    "unbuilt": Unbuilt,
}


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path))
    return families.plain("sd15")


def in_a_dictionary(unet: Any, make: Callable[[], Any]) -> None:
    unet.left = {"args": {"list": [make()], "other": make()}}


def on_every_layer(unet: Any, make: Callable[[], Any]) -> None:
    for module in unet.modules():
        module.left = make()


FIXED = sd_lowvram.Settings.policy("diffusers-default")
"""All knobs: one plan is traced."""


def planned(pipe: Any) -> Any:
    plan = sd_lowvram.optimize(pipe.unet, vram="2GB", width=64, height=64, device="cpu", settings=FIXED)
    sd_lowvram.restore(pipe.unet)
    return plan.predicted


CASES = [(kind, in_a_dictionary) for kind in LEAVES] + [("lock", on_every_layer), ("torch generator", on_every_layer)]


@pytest.mark.parametrize(("kind", "leave"), CASES)
def test_what_cannot_be_copied_is_shared(pipe: Any, kind: str, leave: Callable[..., None]) -> None:
    with contextlib.closing(_left(pipe, kind, leave)) as leaving:
        next(leaving)
        left = pipe.unet.left
        plan = planned(pipe)
        assert pipe.unet.left is left and plan.peak_bytes > 0


def _left(pipe: Any, kind: str, leave: Callable[..., None]) -> Iterator[None]:
    with contextlib.ExitStack() as files:

        def make() -> Any:
            one = LEAVES[kind]()
            return files.enter_context(one) if kind == "open file" else one

        leave(pipe.unet, make)
        yield


def test_a_generator_that_a_layer_draws_from_stays_as_it_is(pipe: Any) -> None:
    """As tomesd's blocks draw the tokens that they merge."""
    drawn = pipe.unet.drawn = torch.Generator().manual_seed(7)
    before = drawn.get_state()
    seen: list[Any] = []

    def draw(module: Any, given: Any) -> None:
        seen.append(module.drawn)
        torch.randint(4, (3, 3), generator=module.drawn)

    with pipe.unet.register_forward_pre_hook(draw):
        planned(pipe)
    assert seen and torch.equal(drawn.get_state(), before)


class Buffer:
    """Native memory, which is freed when its owner goes."""

    freed = 0

    def __init__(self) -> None:
        self.pointer = ctypes.c_void_p(1)

    def __del__(self) -> None:
        Buffer.freed += 1


class Lora:
    """A function on a weight that holds tensors, as a host hangs it on layers."""

    def __init__(self, patches: dict[str, Any]) -> None:
        self.patches = patches

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.patches["up"] @ self.patches["down"]


def test_new_sizes_free_no_buffer_in_use_and_clone_no_tensor(pipe: Any, monkeypatch: Any) -> None:
    """As ComfyUI's dynamic VRAM hangs buffers, pinned weights and LoRAs on layers."""
    state = {"weights": (Buffer(), [], [-1]), "patches": (Buffer(), [], [-1])}
    for module in pipe.unet.modules():
        module._pin_state, module._pins = state, {"weights": {"pin": torch.ones(1 << 10), "registered": True}}
        module.weight_lowvram_function = Lora({"up": torch.ones(8, 2), "down": torch.ones(2, 8)})
        state["weights"][1].append((module, 0))
    cloned: list[int] = []
    clone = torch.UntypedStorage.clone
    monkeypatch.setattr(torch.UntypedStorage, "clone", lambda one: cloned.append(one.nbytes()) or clone(one))
    before = Buffer.freed
    for side in (64, 128):
        sd_lowvram.plan(pipe.unet, vram="2GB", width=side, height=side, device="cpu")
        gc.collect()
    assert (Buffer.freed - before, sum(cloned)) == (0, 0)


def test_any_other_error_names_what_was_planned(pipe: Any) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("of a stranger")

    with pipe.unet.register_forward_pre_hook(fail), pytest.raises(PlanningError) as told:
        planned(pipe)
    said = str(told.value)
    assert "unet (UNet2DConditionModel)" in said and "64x64" in said and "ZeroDivisionError: of a stranger" in said
    assert "\n" not in said and isinstance(told.value.__cause__, ZeroDivisionError)
    pipe.unet.conv_in.__reduce_ex__ = fail  # no code of theirs copies a module
    assert planned(pipe)  # as the error advises, without what was left on the model
