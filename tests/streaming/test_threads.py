"""A second thread waits its turn, and what one thread traces another does not notice."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import families
import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sd_lowvram
from sd_lowvram import Settings, attached
from sd_lowvram.compat.private import BUILTIN_ATTENTION
from sd_lowvram.devices.performance import profile
from sd_lowvram.errors import LowVRAMError
from sd_lowvram.memory.threads import Switch, place_of, turn
from sd_lowvram.models import anatomy_of_components
from sd_lowvram.planning.request import Request
from sd_lowvram.planning.search import make_plan
from sd_lowvram.session import anatomy_of
from sd_lowvram.tracing import trace
from sd_lowvram.units import GIB

WAYS = {
    "smallest": Settings.smallest(),
    "blocks": Settings(offload="blocks", weights_mib=1),
    "layer": Settings(offload="layer"),
    "layers split": Settings(offload="layer", split_layers=True),
    "halves": Settings(offload="halves"),
    "component": Settings(offload="component"),
    "decoder on the CPU": Settings(offload="layer", decoder_device="cpu"),
    "exact tiles": Settings(vae_tiles="exact", vae_map="parked", attention="sliced", attention_mib=1),
    "widened": Settings(precision="fp16-storage", offload="layer"),
    "8 bits": Settings(weight_storage="int8"),
}


@contextlib.contextmanager
def beside(*calls: Callable[[], Any]) -> Iterator[list[Any]]:
    """Inside, each call is made again and again in a thread of its own; what it gave, and what it raised."""
    stop, given = threading.Event(), []

    def again(call: Callable[[], Any]) -> None:
        while not stop.is_set():
            try:
                given.append(call())
            except BaseException as error:
                given.append(error)
                return

    threads = [threading.Thread(target=again, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    try:
        yield given
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def decode(pipe: Any) -> Tensor:
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return pipe.vae.decode(latents).sample


@pytest.fixture(scope="module")
def pipe() -> Any:
    return families.plain("sd15")


@pytest.fixture(scope="module")
def plain(pipe: Any) -> Tensor:
    return tiny.run(pipe)


@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
def test_a_preview_decodes_while_the_unet_samples(pipe: Any, plain: Tensor, settings: Settings) -> None:
    """As AUTOMATIC1111's live preview does; two of them, so that decodes meet each other too."""
    with attached(pipe, settings, device="cpu"):
        preview, picture = decode(pipe), tiny.run(pipe)
        with beside(lambda: decode(pipe), lambda: decode(pipe)) as given:
            pictures = [tiny.run(pipe) for _ in range(3)]
        assert all(torch.equal(one, picture) for one in pictures)
        assert given and all(isinstance(one, Tensor) and torch.equal(one, preview) for one in given), given
    assert torch.equal(tiny.run(pipe), plain)


def test_hooks_come_and_go_while_a_preview_decodes(pipe: Any, plain: Tensor) -> None:
    expected = decode(pipe)
    with (
        attached(pipe, Settings(offload="layer"), device="cpu"),
        beside(lambda: decode(pipe)) as given,
    ):
        for settings in (Settings(offload="layer"), Settings(vae_tiles="exact"), Settings.smallest()):
            with attached(pipe, settings, device="cpu"):
                assert tiny.relative_error(tiny.run(pipe), plain) < 1e-4
    assert given and all(isinstance(one, Tensor) and tiny.relative_error(one, expected) < 1e-4 for one in given), given
    assert torch.equal(tiny.run(pipe), plain)


def test_a_call_that_waited_while_hooks_came_off_leaves_nothing_behind(pipe: Any) -> None:
    """The preview comes while a step runs in which the size grows, and the plan is made anew."""
    expected = decode(pipe)
    before = {name: list(vars(module)) for name, module in pipe.vae.named_modules()}
    given: list[Tensor] = []
    with contextlib.ExitStack() as stack:
        attachment = stack.enter_context(attached(pipe, Settings(offload="layer"), device="cpu"))
        preview = threading.Thread(target=lambda: given.append(decode(pipe)))

        def step(module: nn.Module, args: Any) -> None:
            handle.remove()
            preview.start()
            while not waits(preview):
                pass
            sd_lowvram.restore(pipe)

        handle = pipe.unet.conv_in.register_forward_pre_hook(step)
        with contextlib.suppress(Exception):  # a step whose hooks go has no weights
            tiny.run(pipe)
        preview.join()
        assert attachment not in sd_lowvram.session.attachments(pipe)
    assert len(given) == 1 and torch.equal(given[0], expected)
    assert {name: list(vars(module)) for name, module in pipe.vae.named_modules()} == before


def waits(thread: threading.Thread) -> bool:
    """Whether ``thread`` has come to where it waits."""
    import sys

    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "_call_alone":
            return True
        frame = frame.f_back
    return False


def settled() -> tuple[Any, ...]:
    """What of the whole process a trace exchanges."""
    hooks = nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks
    return (F.scaled_dot_product_attention, "resize_" in vars(torch.UntypedStorage), *map(len, hooks), gc.isenabled())


def planned(components: Mapping[str, nn.Module], size: int = 64) -> Any:
    """What a plan decides and predicts, traced anew."""
    anatomy = anatomy_of_components("diffusers", components)
    request = Request(size, size, 1, GIB, GIB, torch.device("cpu"), profile("rtx2070"))
    plan = make_plan(anatomy, request, Settings())
    return plan.settings, plan.predicted.peak_bytes, plan.predicted.seconds, plan.minimum_peak_bytes


def test_two_plans_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SD_LOWVRAM_CACHE", "")
    before = settled()
    parts = {"unet": tiny.tiniest().unet}
    expected = planned(parts)
    with beside(lambda: planned(parts), lambda: planned(parts)) as given:
        assert planned(parts) == expected
    assert len(given) >= 2 and all(one == expected for one in given), given
    assert settled() == before


@pytest.mark.parametrize("settings", [None, Settings(attention="sdpa"), Settings.smallest()])
def test_a_plan_while_the_same_pipeline_samples(
    pipe: Any, settings: Settings | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SD_LOWVRAM_CACHE", "")
    before = settled()
    with contextlib.nullcontext() if settings is None else attached(pipe, settings, device="cpu"):
        picture, expected = tiny.run(pipe), planned({"vae": pipe.vae})
        with beside(lambda: planned({"vae": pipe.vae})) as given:
            pictures = [tiny.run(pipe) for _ in range(3)]
        assert given and all(one == expected for one in given), given
        assert all(torch.equal(one, picture) for one in pictures)
    assert settled() == before


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", "sliced"])
def test_traces_beside_a_running_attention_hook(pipe: Any, backend: str) -> None:
    before = settled()
    other = families.plain("sd15").vae
    latents, text = torch.randn(2, 4, 8, 8), torch.randn(2, 77, 32)
    peak = trace(other.decode, latents).peak_bytes
    with attached(pipe.unet, Settings(attention=backend, attention_mib=1), device="cpu") as attachment:
        expected = pipe.unet(latents, 3, text).sample
        with beside(lambda: trace(other.decode, latents).peak_bytes) as given:
            for _ in range(8):
                assert torch.equal(pipe.unet(latents, 3, text).sample, expected)
        assert attachment.sites["attention"] == len(anatomy_of(pipe.unet).attentions)
    assert given and all(one == peak for one in given), given
    assert settled() == before and F.scaled_dot_product_attention is BUILTIN_ATTENTION


@torch.no_grad()
@pytest.mark.parametrize("offload", ["layer", "component"])
def test_a_trace_of_the_model_that_runs(pipe: Any, offload: str) -> None:
    latents = torch.randn(1, 4, 8, 8)
    with attached(pipe, Settings(offload=offload), device="cpu"):
        tiny.run(pipe, steps=1)
        peak, expected = trace(pipe.vae.decode, latents).peak_bytes, pipe.vae.decode(latents).sample
        with pytest.raises(LowVRAMError, match="hidden from trace"):  # a tuple's attribute: nobody looks there
            trace(lambda x, hidden=pipe: hidden.vae.decode(x), latents)
        with beside(lambda: trace(pipe.vae.decode, latents).peak_bytes) as given:
            for _ in range(8):
                assert torch.equal(pipe.vae.decode(latents).sample, expected)
    assert given and all(one == peak for one in given), given


def test_attention_leaves_torchs_switches_alone(pipe: Any) -> None:
    """They are the whole process's: another model that attends meanwhile would find no kernel."""
    seen: set[bool] = set()
    latents, text = torch.randn(2, 4, 8, 8), torch.randn(2, 77, 32)

    def look() -> None:
        seen.add(torch.backends.cuda.math_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled())

    with torch.no_grad(), attached(pipe.unet, Settings(attention="sdpa"), device="cpu"), beside(look):
        for _ in range(8):
            pipe.unet(latents, 3, text)
        trace(pipe.unet, latents, 3, text)
    assert seen == {True}


def test_somebody_elses_function_put_on_top_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 8, 8)
    monkeypatch.setattr(F, "scaled_dot_product_attention", F.scaled_dot_product_attention)  # is put back in the end

    def theirs(*args: Any, **kwargs: Any) -> Tensor:
        return within(*args, **kwargs) + 1

    def run(x: Tensor) -> Tensor:
        monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
        return x

    expected = F.scaled_dot_product_attention(q, q, q)
    within: Any = None

    def begun(x: Tensor) -> Tensor:
        nonlocal within
        within = F.scaled_dot_product_attention
        return run(x)

    trace(begun, q)
    assert F.scaled_dot_product_attention is theirs
    assert torch.equal(F.scaled_dot_product_attention(q, q, q), expected + 1)
    trace(lambda x: F.scaled_dot_product_attention(x, x, x), q)
    assert F.scaled_dot_product_attention is theirs


def in_threads(*calls: Callable[[], Any]) -> list[BaseException]:
    """Make each call in a thread of its own; what they raised. Who waits for ever is an error."""
    raised: list[BaseException] = []

    def make(call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=make, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(1200)
    assert not any(thread.is_alive() for thread in threads)
    return raised


CARDS = [{place_of(torch.device("cuda", index))} for index in range(2)]
CPU = {place_of(torch.device("cpu"))}


def test_threads_on_two_devices_do_not_wait_for_each_other() -> None:
    together = threading.Barrier(2, timeout=600)

    def run(places: Any) -> None:
        with turn(places):
            together.wait()

    assert in_threads(*(lambda places=places: run(places) for places in CARDS)) == []


def test_what_takes_two_devices_takes_them_in_one_order() -> None:
    def run(*places: Any) -> None:
        for _ in range(2000):
            with turn([*places[0], *places[1]]):
                pass

    assert (
        in_threads(*(lambda ways=ways: run(*ways) for ways in [(CPU, CARDS[0]), (CARDS[0], CPU), (CARDS[1], CPU)]))
        == []
    )


def test_calls_within_calls_that_would_wait_for_each_other_are_refused() -> None:
    together = threading.Barrier(2, timeout=600)
    ended: list[Any] = []

    def run(outer: Any, inner: Any) -> None:
        with turn(outer):
            together.wait()
            with turn(inner):
                ended.append(inner)

    raised = in_threads(lambda: run(*CARDS), lambda: run(*CARDS[::-1]))
    assert len(ended) == 1 and len(raised) == 1
    assert isinstance(raised[0], LowVRAMError) and "one model after the other" in str(raised[0])


def test_a_switch_is_not_set_while_others_read_it() -> None:
    switch, seen, state = Switch(), set[tuple[str, ...]](), list[str]()

    @contextlib.contextmanager
    def holding(name: str) -> Iterator[None]:
        state.append(name)
        yield
        state.remove(name)

    def read() -> None:
        for _ in range(500):
            with switch.hold_unset():
                seen.add(tuple(state))

    def change(name: str) -> None:
        for _ in range(500):
            with switch.set_by(holding(name)):
                seen.add(tuple(state) if tuple(state) != (name,) else ())

    assert in_threads(read, read, lambda: change("flash"), lambda: change("efficient")) == []
    assert seen == {()}
