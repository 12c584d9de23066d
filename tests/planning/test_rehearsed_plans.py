"""Pipelines that nobody has written down, planned by their own call: all stages, within the budget, the same bits."""

from __future__ import annotations

import dataclasses
import json
import types
from typing import Any

import families
import pytest
import rehearsed
import todays
import torch
from rehearsed import TwoExperts
from torch import Tensor, nn

import sd_lowvram
from sd_lowvram.errors import BadInputError, BudgetError
from sd_lowvram.models.recorded import Given, Rehearsal, Row, row_of
from sd_lowvram.planning import replan
from sd_lowvram.planning.request import request_for
from sd_lowvram.planning.stages import stages, stated_calls
from sd_lowvram.planning.wording import Kind
from sd_lowvram.session import anatomy_of
from sd_lowvram.settings import Fidelity
from sd_lowvram.tracing.rehearsal import rehearse
from sd_lowvram.units import MIB
from sd_lowvram.weights import weight_bytes

CALL: dict[str, Any] = {"prompt": "a red apple"}
XL = "StableDiffusionXLPipeline"
MAKE = {
    make.__name__: make
    for make in (
        todays.sd3,
        todays.flux,
        todays.z_image,
        todays.klein,
        todays.chroma,
        todays.qwen_image,
        todays.krea2,
    )
}


def picture(pipe: Any, **more: Any) -> Tensor:
    with torch.no_grad():
        made: Tensor = pipe(**CALL, generator=torch.Generator().manual_seed(3), **more)
    return made


def within(plan: Any, run: Any) -> bool:
    planned = max(stage.held_bytes for stage in plan.stages)
    return bool(run.peak_bytes <= max(planned * 1.02, planned + 2 * MIB))


def test_a_class_of_its_own_is_planned_whole() -> None:
    pipe = TwoExperts()
    expected, before = picture(pipe), {name: part.state_dict() for name, part in pipe.components.items()}
    asked = {"width": 64, "height": 64, "steps": 4, "device": "cpu", "call": CALL}
    plenty = sd_lowvram.plan(pipe, vram="1GB", **asked)
    assert [(stage.name, stage.component) for stage in plenty.stages] == [
        ("reader", "reader"), ("denoise", "early"), ("denoise", "late"), ("decode", "vae"),
    ]  # fmt: skip
    assert all(stage.activation_bytes for stage in plenty.stages) and not any("unknown" in r for r in plenty.reasons)
    assert plenty.settings.offload == "none"
    least = plenty.minimum_vram_bytes
    for vram in (f"{least} B", f"{(least + plenty.predicted.peak_bytes) // 2} B", "1GB"):
        plan = sd_lowvram.optimize(pipe, vram=vram, **asked)
        with sd_lowvram.measured(pipe) as run:
            made = picture(pipe)
        assert (made - expected).abs().max() <= (0 if plan.fidelity is Fidelity.BITWISE else 1e-5)
        assert within(plan, run) and plan.fits
    with pytest.raises(BudgetError):
        sd_lowvram.optimize(pipe, vram=f"{least // 2} B", **asked)
    sd_lowvram.restore(pipe)
    assert torch.equal(picture(pipe), expected)
    assert all("forward" not in vars(module) for part in pipe.components.values() for module in part.modules())
    after = {name: part.state_dict() for name, part in pipe.components.items()}
    assert all(
        tensor.data_ptr() == after[name][key].data_ptr() and torch.equal(tensor, after[name][key])
        for name, tensors in before.items()
        for key, tensor in tensors.items()
    )


def test_the_weights_of_each_expert_are_streamed_within_one_bound() -> None:
    pipe = TwoExperts()
    settings = sd_lowvram.Settings(offload="blocks", weights_mib=1)
    plan = sd_lowvram.optimize(pipe, vram="1GB", width=64, height=64, device="cpu", call=CALL, settings=settings)
    experts = [stage for stage in plan.stages if stage.name == "denoise"]
    assert len(experts) == 2 and all(0 < stage.weights_bytes <= MIB < weight_bytes(pipe.early) for stage in experts)
    assert torch.equal(picture(pipe), picture(TwoExperts()))


def test_a_larger_picture_than_planned_is_planned_anew() -> None:
    pipe = TwoExperts(32)
    least = sd_lowvram.plan(pipe, vram="1GB", width=256, height=256, device="cpu", call=CALL).minimum_vram_bytes
    plan = sd_lowvram.optimize(pipe, vram=f"{least} B", width=64, height=64, device="cpu", call=CALL)
    with pytest.raises(BudgetError, match=r"^early is called with .*, more than planned .*: "):
        picture(pipe, width=1024, height=1024)
    assert torch.equal(picture(pipe), picture(TwoExperts(32)))  # what was planned still runs
    sd_lowvram.optimize(pipe, vram="1GB", width=64, height=64, device="cpu", call=CALL)
    assert torch.equal(picture(pipe, width=256, height=256), picture(TwoExperts(32), width=256, height=256))
    now = sd_lowvram.session.attachments(pipe)[-1].plan
    assert now.predicted.peak_bytes > plan.predicted.peak_bytes


def test_a_call_is_looked_at_once_for_its_shapes_and_types(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = TwoExperts(32)
    sd_lowvram.optimize(pipe, vram="1GB", width=64, height=64, device="cpu", call=CALL)
    request = sd_lowvram.session.attachments(pipe)[-1].plan.request
    sd_lowvram.restore(pipe)
    larger: list[Any] = []

    def plan_once(record: Any) -> None:
        if larger:
            raise BudgetError("too little")
        larger.append(record)

    watch = next(p for p in replan.watch_calls(anatomy_of(pipe, None, request.rehearsal), request, plan_once)
                 if p.owner is pipe.early)  # fmt: skip
    call = watch.make(lambda *args, **kwargs: "called")
    (row,) = (row for row in request.rehearsal.rows if row.component == "early")
    args, kwargs, _ = row.empties(torch.float32)
    assert call(*args, **kwargs) == "called" and not larger
    with monkeypatch.context() as patched:
        patched.setattr(replan, "larger_tensors", pytest.fail)
        assert call(*args, **kwargs) == "called"
    monkeypatch.setattr(pipe.early, "forward", lambda *args, **kwargs: "planned")
    assert call(*(arg.double() for arg in args), **kwargs) == "planned" and len(larger) == 1
    with pytest.raises(BudgetError, match=r"^early is called with words of 8 KiB, more than planned \(4 KiB\): too"):
        call(*(arg.double() for arg in args), **kwargs)


class Guided(nn.Module):
    def forward(self, x: Any, mask: Any = None, guide: Any = None) -> Any:
        return x


def test_arguments_are_compared_by_name() -> None:
    model, x, records = Guided(), torch.zeros(64), list[Any]()
    row = row_of("model", "", "forward", torch.float32, (x, x), {})
    known: Any = types.SimpleNamespace(components={"model": model})
    watch = replan._CallWatch(known, "model", "forward", known, Rehearsal((row,), (0, 0)), [row], False, records.append)
    watch(model.forward, x, x)
    watch(model.forward, x, mask=x)
    assert not records
    watch(model.forward, x, guide=x)  # the same shapes, and nothing is planned for a guide
    assert len(records) == 1
    watch(model.forward, x=x.double(), mask=x.double())
    (larger,) = records[-1].rows  # in place of the row by position
    assert records[-1].order == (0, 0) and larger.given_bytes == 2 * row.given_bytes


def test_what_is_held_grows_with_the_tensor_that_is_larger() -> None:
    x = torch.zeros(1000)
    row = row_of("model", "", "forward", torch.float32, (x, x), {})
    row = dataclasses.replace(row, held=(Given((100,), torch.uint8),))
    longer = row_of("model", "", "forward", torch.float32, (x[:10], x.repeat(2)[:1900]), {})
    assert longer.given_bytes < row.given_bytes
    made = Rehearsal((row,), (0, 0)).add_larger(longer)
    assert made.order == (0, 0, 1) and made.rows[-1].held_bytes == 190


def test_a_call_that_is_larger_in_one_tensor_alone_is_planned_next_to_the_old_one() -> None:
    pipe = TwoExperts(32)
    expected = picture(pipe)
    sd_lowvram.optimize(
        pipe, vram="1GB", width=128, height=128, device="cpu", call=CALL, settings=sd_lowvram.Settings(offload="none")
    )
    record = sd_lowvram.session.attachments(pipe)[-1].plan.request.rehearsal
    (row,) = (row for row in record.rows if row.component == "early")
    (noisy, time, words), kwargs, _ = row.empties(torch.float32)
    noisy, words = noisy[..., : noisy.shape[-1] // 4].zero_(), words.repeat(1, 2, 1).zero_()
    assert noisy.nbytes + words.nbytes < row.given_bytes  # fewer bytes in all, which cannot show the longer text
    with torch.no_grad():
        pipe.early(noisy, time.zero_(), words, **kwargs)
    made = sd_lowvram.session.attachments(pipe)[-1].plan.request.rehearsal
    assert [each.given_bytes for each in made.rows if each.component == "early"] == [
        row.given_bytes, noisy.nbytes + time.nbytes + words.nbytes
    ]  # fmt: skip
    assert torch.equal(picture(pipe), expected)
    assert sd_lowvram.session.attachments(pipe)[-1].plan.request.rehearsal is made  # neither is planned once more


def test_a_pipeline_of_diffusers_without_a_family_is_planned_by_its_call() -> None:
    pipe = todays.lumina2()
    call = rehearsed.lumina2_call()
    asked = {"width": todays.SIZE, "height": todays.SIZE, "steps": 2, "device": "cpu"}

    def made(scale: int = 1) -> Tensor:
        seed = torch.Generator().manual_seed(3)
        size = {"width": scale * todays.SIZE, "height": scale * todays.SIZE, "num_inference_steps": 2}
        return torch.as_tensor(pipe(**call, **size, generator=seed, output_type="pt").images)

    expected, larger = made(), made(2)
    assert sd_lowvram.plan(pipe, vram="1GB", **asked).at_first_call  # its prompt has to be stated
    plenty = sd_lowvram.plan(pipe, vram="1GB", call=call, **asked)
    assert [stage.name for stage in plenty.stages] == ["denoise", "decode"]
    for vram in (f"{plenty.minimum_vram_bytes} B", "1GB"):
        plan = sd_lowvram.optimize(pipe, vram=vram, call=call, **asked)
        with sd_lowvram.measured(pipe) as run:
            assert (made() - expected).abs().max() <= (0 if plan.fidelity is Fidelity.BITWISE else 1e-5)
        assert within(plan, run)
    assert (made(2) - larger).abs().max() <= 1e-5  # planned anew by the values of its masks
    now = sd_lowvram.session.attachments(pipe)[-1].plan
    assert now.predicted.peak_bytes > plan.predicted.peak_bytes


def test_feed_forward_layers_of_all_denoisers_run_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So does the norm of a wide text, whose copies in float32 are larger than any map."""
    monkeypatch.setattr("sd_lowvram.models.unknown._WIDE", 512)
    make, call_of = rehearsed.KINDS["ideogram4"]
    pipe = make()
    call = {**call_of(pipe), "width": 512, "height": 512, "num_inference_steps": 2, "output_type": "pt"}

    def made() -> Tensor:
        return torch.as_tensor(pipe(**call, generator=torch.Generator().manual_seed(3)).images)

    expected = made()
    asked = {"vram": "4GB", "device": "cpu", "call": call}
    whole = sd_lowvram.plan(pipe, **asked)
    plan = sd_lowvram.optimize(pipe, **asked, settings=sd_lowvram.Settings(feed_forward_chunks=4))
    denoisers = ("transformer", "unconditional_transformer")
    layers = sum(len(getattr(pipe, name).layers) + 1 for name in denoisers)
    assert sd_lowvram.session.attachments(pipe)[-1].sites["feed_forward"] == layers == 6
    for name in denoisers:
        less, more = (next(s.activation_bytes for s in p.stages if s.component == name) for p in (plan, whole))
        assert less < more
    with sd_lowvram.measured(pipe) as run:
        assert (made() - expected).abs().max() <= 1e-5
    assert within(plan, run)
    sd_lowvram.restore(pipe)
    assert torch.equal(made(), expected)


SHORT = ("img2img",)
"""Kinds of ``make test``; ``make test-all`` has all."""


@pytest.mark.slow(30)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in SHORT else [pytest.mark.rare]) for kind in rehearsed.KINDS]
)
def test_a_stated_call_runs_with_plenty_half_and_least(kind: str) -> None:
    make, call_of = rehearsed.KINDS[kind]
    pipe = make()
    call = {**call_of(pipe), "num_inference_steps": 2, "output_type": "pt"}

    def made() -> Tensor:
        return torch.as_tensor(pipe(**call, generator=torch.Generator().manual_seed(3)).images)

    expected, places = made(), weight_places(pipe)
    plenty = sd_lowvram.plan(pipe, vram="4GB", device="cpu", call=call)
    least, most = plenty.minimum_vram_bytes, plenty.predicted.peak_bytes
    for vram in (least, (least + most) // 2, 4 << 30):
        plan = sd_lowvram.optimize(pipe, vram=f"{vram} B", device="cpu", call=call)
        assert plan.fits and not plan.at_first_call
        with sd_lowvram.measured(pipe) as run:
            assert (made() - expected).abs().max() <= (0 if plan.fidelity is Fidelity.BITWISE else 1e-4)
        assert within(plan, run)
    sd_lowvram.restore(pipe)
    assert weight_places(pipe) == places and torch.equal(made(), expected)


def weight_places(pipe: Any) -> list[tuple[int, int]]:
    models = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    return [(id(tensor), tensor.data_ptr()) for model in models for tensor in model.parameters()]


def test_a_model_that_was_removed_needs_no_plan() -> None:
    pipe = TwoExperts(32)
    sd_lowvram.optimize(pipe, vram="1GB", width=64, height=64, device="cpu", call=CALL)
    asked = sd_lowvram.session.attachments(pipe)[-1].plan.request
    record, shape = asked.rehearsal, asked.shape
    sd_lowvram.restore(pipe)
    pipe.reader = None
    anatomy = anatomy_of(pipe, None, record)
    planned = stages(anatomy, shape, encodes=False)
    assert {stage.component for stage in planned} == {"early", "late", "vae"}


def test_a_denoiser_makes_as_many_channels_as_it_takes_if_its_configuration_says_nothing_else() -> None:
    pipe = TwoExperts(16)
    pipe.vae = torch.nn.Sequential(pipe.vae.decoder)  # of no known kind
    pipe.vae.decode = lambda latents, return_dict: (pipe.vae(latents),)
    pipe.early.config = pipe.late.config = {"in_channels": 4, "out_channels": None}
    plan = sd_lowvram.plan(pipe, vram="1GB", width=64, height=64, device="cpu", call=CALL)
    assert plan.fits and "early" in [stage.component for stage in plan.stages]


class AsksForValues(TwoExperts):
    """Its call reads values that zeros do not have, so that no rehearsal gets to the end."""

    def __call__(self, prompt: str, *args: Any, **kwargs: Any) -> Tensor:
        words = self.reader(torch.tensor([[ord(letter) % 100 for letter in prompt]]))
        assert words.abs().sum(-1).nonzero()[0, 1].item() == 0
        return super().__call__(prompt, *args, **kwargs)


def test_a_pipeline_that_asks_for_values_is_planned_at_its_first_call() -> None:
    pipe, expected = AsksForValues(), picture(AsksForValues())
    asked: dict[str, Any] = {"steps": 4, "device": "cpu"}
    plan = sd_lowvram.optimize(pipe, vram="1GB", **asked)
    assert plan.at_first_call and plan.fits is None and plan.settings.offload == "layer"
    assert [stage.component for stage in plan.stages if stage.at_first_call] == ["reader", "late", "early", "vae"]
    shown = json.loads(json.dumps(plan.as_dict()))
    assert shown["at_first_call"] and shown["predicted"] is shown["fits"] is shown["minimum_vram_bytes"] is None
    assert all(stage["peak_bytes"] is stage["seconds"] is None for stage in shown["stages"])
    assert repr(plan) == "<Plan any size, batch 1, 4 steps: planned at first call, within 1 GiB>"
    assert str(plan).count("at first call\n") == 4 and "planned at first call, within 1 GiB" in plan._repr_html_()
    (reason,) = plan.reasons
    assert reason.kind is Kind.AT_FIRST_CALL and "(IndexError: " in reason
    with sd_lowvram.measured(pipe) as run:
        assert torch.equal(picture(pipe), expected)
    made = sd_lowvram.session.attachments(pipe)[-1].plan
    assert made.fits and not made.at_first_call and made.settings.offload == "none" and within(made, run)
    assert [stage.name for stage in made.stages] == ["reader", "denoise", "denoise", "decode"]
    assert [(stage.component, stage.activation_bytes > 0) for stage in made.stages[1:3]] == [
        ("early", True),
        ("late", True),
    ]
    sd_lowvram.restore(pipe)
    assert torch.equal(picture(pipe), expected) and "forward" not in vars(pipe.early)


@pytest.mark.slow(40)
def test_what_a_first_call_needs_is_refused_before_the_first_step() -> None:
    size, asked = {"height": 256, "width": 256}, {"vram": "2MiB", "steps": 4, "device": "cpu"}
    pipe, steps = AsksForValues(32), []
    expected = picture(AsksForValues(32), **size)
    pipe.early.into.register_forward_hook(lambda *given: steps.append(type(given[2]) is Tensor))  # not in traces
    sd_lowvram.optimize(pipe, **asked)
    with pytest.raises(BudgetError, match=r"^early is planned at its first call: 2 MiB cannot hold 256x256: ") as error:
        picture(pipe, **size)
    assert not any(steps) and error.value.stage == "decode"
    least = error.value.needed_bytes
    plan = sd_lowvram.optimize(pipe, **{**asked, "vram": f"{least} B"})
    assert (picture(pipe, **size) - expected).abs().max() <= 1e-5 and any(steps)
    made = sd_lowvram.session.attachments(pipe)[-1].plan
    assert plan.at_first_call and not made.at_first_call and made.request.width == 256


def test_a_model_that_cannot_be_traced_is_streamed_at_its_least() -> None:
    class Reads(TwoExperts):
        def __init__(self) -> None:
            super().__init__(16)
            self.early.forward = self._forward  # type: ignore[method-assign]

        def _forward(self, noisy: Tensor, time: Tensor, words: Tensor) -> Tensor:
            return noisy if self.early.into(noisy).sum().item() > 0 else -noisy

    pipe = Reads()
    plan = sd_lowvram.optimize(pipe, vram="1GB", device="cpu", call=CALL)
    assert plan.at_first_call and plan.settings.offload == "layer"
    assert torch.equal(picture(pipe), picture(Reads()))
    made = sd_lowvram.session.attachments(pipe)[-1].plan
    assert [stage.component for stage in made.stages if stage.at_first_call] == ["early"]
    assert made.settings.offload == "layer" and made.fits is None


def test_a_call_that_cannot_be_made_is_named() -> None:
    with pytest.raises(BadInputError, match=r"TwoExperts cannot be called with the stated promt .*promt"):
        sd_lowvram.plan(TwoExperts(16), vram="1GB", device="cpu", call={"promt": "a"})
    with pytest.raises(BadInputError, match="AutoencoderKL is not one"):
        sd_lowvram.plan(TwoExperts(16).vae, vram="1GB", device="cpu", call={})
    assert sd_lowvram.plan(TwoExperts(16).vae, vram="1GB", device="cpu").fits
    assert sd_lowvram.plan(TwoExperts(16), vram="1GB", device="cpu", call={"prompt": "a"}).fits


KNOWN = ["sd15", "sdxl", "sd3", "flux", "z_image", "klein", "chroma", "qwen_image", "krea2"]


@pytest.mark.slow(10)
@pytest.mark.parametrize("kind", KNOWN)
def test_families_state_what_a_rehearsal_records(kind: str) -> None:
    pipe = families.plain(kind, XL) if kind == "sdxl" else families.plain(kind) if kind == "sd15" else MAKE[kind]()
    call = {"prompt": "a"} if kind in ("sd15", "sdxl") else todays.prompts(pipe)
    if kind == "z_image":  # the family plans the longest prompt that is taken, and a shorter negative one
        call |= {"prompt_embeds": [torch.zeros(512, 64)], "negative_prompt_embeds": [torch.zeros(480, 64)]}
    record = rehearse(pipe, **call, width=64, height=48, num_inference_steps=3, output_type="pt")
    anatomy = anatomy_of(pipe)
    request = request_for(anatomy, width=64, height=48, steps=3)
    stated = stated_calls(anatomy, request.shape, request.encodes)
    assert stated is not None and stated.steps == record.steps
    said, seen = (
        {row.method: shapes(row) for row in rows if row.component in (record.denoiser, "vae")}
        for rows in (stated.rows, record.rows)
    )
    assert said == seen
    assert record.counts[record.denoiser] == 3 * anatomy.calls


def shapes(row: Row) -> set[tuple[int, ...]]:
    """Shapes of all tensors except those of one number for each row."""
    return {given.shape for given in row.tensors if len(given.shape) > 1}
