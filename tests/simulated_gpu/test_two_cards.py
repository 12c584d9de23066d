"""Two pipelines on two cards in two threads: neither waits for the other, and each is as it is alone."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import families
import pytest
import torch
from test_hooks_on_the_card import WAYS
from test_threads import beside, in_threads
from torch import Tensor, nn

from sd_lowvram import Settings, attached, restore
from sd_lowvram.session import attach, attachments

CARDS = torch.device("cuda", 0), torch.device("cuda", 1)
CPU = torch.device("cpu")
TIMES = 15


@pytest.fixture(scope="module")
def pipes() -> list[Any]:
    return [families.plain("sd15") for _ in range(3)]


def inputs(unet: nn.Module, device: torch.device) -> tuple[Tensor, int, Tensor]:
    drawn = torch.Generator().manual_seed(7)
    shapes = (2, 4, 16, 16), (2, 77, unet.config.cross_attention_dim)
    latents, text = (torch.randn(shape, generator=drawn).to(device) for shape in shapes)
    return latents, 3, text


def denoise(pipe: Any, device: torch.device) -> Tensor:
    with torch.inference_mode():
        return pipe.unet(*inputs(pipe.unet, device), return_dict=False)[0].cpu()


def decode(pipe: Any, device: torch.device) -> Tensor:
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        return pipe.vae.decode(latents.to(device), return_dict=False)[0].cpu()


@contextlib.contextmanager
def meeting(*modules: nn.Module) -> Iterator[None]:
    """Inside, calls of ``modules`` go on when each of them is called, in threads of their own, at the same time."""
    together = threading.Barrier(len(modules), timeout=600)
    with contextlib.ExitStack() as stack:
        for module in modules:
            handle = module.register_forward_pre_hook(lambda *_: (together.wait(), None)[1])
            stack.callback(handle.remove)
        yield


@pytest.mark.parametrize("way", ["blocks, skips parked", "in turn, skips parked", "smallest"])
def test_both_run_at_the_same_time(gpu: Any, pipes: list[Any], way: str) -> None:
    got: dict[torch.device, Tensor] = {}
    both = [*zip(pipes, CARDS, strict=False)]
    with gpu.watched("random") as seen, contextlib.ExitStack() as stack:
        for pipe, card in both:
            stack.enter_context(attached(pipe, WAYS[way], device=card))
        expected = {card: denoise(pipe, card) for pipe, card in both}

        def run(pipe: Any, card: torch.device) -> None:
            got[card] = denoise(pipe, card)

        with meeting(*(pipe.unet.conv_in for pipe, _ in both)):
            assert in_threads(*(lambda one=one: run(*one) for one in both)) == []
        assert all(torch.equal(got[card], expected[card]) for card in CARDS)
    assert seen.clean, seen


def test_two_on_one_card_take_turns(pipes: list[Any]) -> None:
    inside, most = set[int](), list[int]()

    def run(pipe: Any) -> None:
        def entering(*_: Any) -> None:
            inside.add(id(pipe))
            most.append(len(inside))

        handles = [pipe.unet.conv_in.register_forward_pre_hook(entering)]
        handles += [pipe.unet.conv_out.register_forward_hook(lambda *_: inside.discard(id(pipe)))]
        try:
            for _ in range(10):
                denoise(pipe, CARDS[0])
        finally:
            for handle in handles:
                handle.remove()

    with attached(pipes[0], WAYS["blocks"], device=CARDS[0]), attached(pipes[1], WAYS["blocks"], device=CARDS[0]):
        assert in_threads(lambda: run(pipes[0]), lambda: run(pipes[1])) == []
    assert set(most) == {1}


@pytest.mark.slow(60)
def test_a_decoder_on_the_cpu_beside_runs_on_the_cpu_and_on_the_other_card(gpu: Any, pipes: list[Any]) -> None:
    first, second, third = pipes
    with contextlib.ExitStack() as stack:
        stack.enter_context(attached(first, Settings(offload="layer", decoder_device="cpu"), device=CARDS[0]))
        stack.enter_context(attached(second, WAYS["smallest"], device=CPU))
        stack.enter_context(attached(third, WAYS["blocks, skips parked"], device=CARDS[1]))
        calls: list[Callable[[], Tensor]] = [
            lambda: denoise(first, CARDS[0]),
            lambda: decode(first, CARDS[0]),
            lambda: denoise(second, CPU),
            lambda: decode(third, CARDS[1]),
            lambda: denoise(third, CARDS[1]),
        ]
        expected = [call() for call in calls]

        def again(numbers: list[int]) -> None:
            for _ in range(TIMES // 5):
                for number in numbers:
                    assert torch.equal(calls[number](), expected[number]), number

        assert in_threads(lambda: again([0, 1]), lambda: again([2, 3, 4]), lambda: again([4, 2])) == []


@pytest.mark.slow(60)
def test_one_comes_and_goes_while_the_other_runs(gpu: Any, pipes: list[Any]) -> None:
    running, coming = pipes[:2]
    before = {name: tensor.clone() for name, tensor in coming.unet.state_dict().items()}
    with gpu.watched("random") as seen:
        with attached(running, WAYS["blocks, skips parked"], device=CARDS[0]):
            expected = denoise(running, CARDS[0])
            with beside(lambda: torch.equal(denoise(running, CARDS[0]), expected)) as given:
                for number in range(TIMES):
                    attach(coming, WAYS["layer" if number % 2 else "blocks, skips parked"], CARDS[1])
                    restore(coming)
        assert len(given) > 1 and all(one is True for one in given), given
        assert attachments(coming) == []
        after = coming.unet.state_dict()
        assert all(torch.equal(after[name].cpu(), tensor) for name, tensor in before.items())
        del given
        gc.collect()
    assert seen.clean, seen
