"""Today's transformers from the prompt to the picture: planned, the same bits, in the memory that was planned."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import todays
import torch
from torch import Tensor

import sd_lowvram
from sd_lowvram.errors import BudgetError
from sd_lowvram.models.calls import Shape
from sd_lowvram.planning.stages import stages
from sd_lowvram.session import anatomy_of, attachments
from sd_lowvram.units import GIB

ASKED: dict[str, Any] = {"width": todays.SIZE, "height": todays.SIZE, "device": "cpu"}
FIXED = sd_lowvram.Settings.policy("diffusers-default")
"""All knobs, so that of each size that comes one way alone is traced."""
SEEN = torch.rand(1, 3, todays.SIZE, todays.SIZE, generator=torch.Generator().manual_seed(5))


def reads(encoder: Any, tokens: int, hidden: bool = True, masked: bool = False, **options: Any) -> Tensor:
    """What a pipeline takes of a text encoder."""
    prompt = torch.arange(tokens)[None] % 1000
    told = {"attention_mask": torch.ones_like(prompt)} if masked else {}
    with torch.no_grad():
        out = encoder(prompt, output_hidden_states=hidden, **told, **options)
    return torch.as_tensor(out.hidden_states[-2] if hidden else out[0])


@dataclasses.dataclass(frozen=True)
class Case:
    """A family by one of its pipelines.

    Attributes:
        reads: of its text encoders by name.
        passes, calls: as the pipeline guides by itself.
    """

    make: Callable[[], Any]
    reads: dict[str, Callable[[Any], Tensor]]
    passes: int = 1
    calls: int = 1


CASES = {
    "flux": Case(
        todays.flux,
        {
            "text_encoder": functools.partial(reads, tokens=77, hidden=False),
            "text_encoder_2": functools.partial(reads, tokens=512, hidden=False),
        },
    ),
    "sd3": Case(
        todays.sd3,
        {
            "text_encoder": functools.partial(reads, tokens=77),
            "text_encoder_2": functools.partial(reads, tokens=77),
            "text_encoder_3": functools.partial(reads, tokens=256, hidden=False),
        },
        passes=2,
    ),
    "z-image": Case(todays.z_image, {"text_encoder": functools.partial(reads, tokens=512, masked=True)}, passes=2),
    "chroma": Case(
        todays.chroma, {"text_encoder": functools.partial(reads, tokens=512, hidden=False, masked=True)}, calls=2
    ),
    "klein": Case(
        todays.klein, {"text_encoder": functools.partial(reads, tokens=512, masked=True, use_cache=False)}, calls=2
    ),
    "krea2": Case(todays.krea2, {"text_encoder": functools.partial(reads, tokens=546, masked=True)}, calls=2),
    "qwen-image": Case(
        todays.qwen_image, {"text_encoder": functools.partial(reads, tokens=1058, masked=True)}, calls=2
    ),
}


PIPES: dict[str, Any] = {}


def loaded(name: str) -> Any:
    """The family's pipeline, one for all tests."""
    if name not in PIPES:
        PIPES[name] = CASES[name].make()
    return PIPES[name]


@functools.cache
def plain(name: str) -> Tensor:
    return todays.picture(loaded(name))


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Each test leaves the pipelines that were loaded as they came."""
    yield
    for pipe in PIPES.values():
        sd_lowvram.restore(pipe)


@pytest.fixture(params=list(CASES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def least_of(pipe: Any) -> int:
    """Bytes with which it runs; a plan predicts about how many."""
    about = sd_lowvram.plan(pipe, vram="1GB", **ASKED).minimum_vram_bytes
    try:
        sd_lowvram.plan(pipe, vram=f"{about} B", **ASKED)
    except BudgetError as error:
        assert error.needed_bytes < 1.1 * about
        return error.needed_bytes
    return about


def test_every_budget_makes_the_same_picture_in_the_memory_that_was_planned(name: str) -> None:
    case, pipe, expected = CASES[name], loaded(name), plain(name)
    read = [look(getattr(pipe, part)) for part, look in case.reads.items()]
    plenty = sd_lowvram.plan(pipe, vram=f"{GIB} B", **ASKED)
    assert [stage.component for stage in plenty.stages] == [*case.reads, "transformer", "vae"]
    assert (plenty.request.passes, plenty.request.calls) == (case.passes, case.calls)
    least = least_of(pipe)
    assert least < plenty.predicted.peak_bytes
    ways = set()
    for budget in (GIB, (least + plenty.predicted.peak_bytes) // 2, least):
        plan = sd_lowvram.optimize(pipe, vram=f"{budget} B", **ASKED)
        ways.add(plan.settings.offload)
        with sd_lowvram.measured(pipe) as run:
            assert todays.agrees(plan, todays.picture(pipe), expected)
            for look, before in zip(case.reads.items(), read, strict=True):
                assert torch.equal(look[1](getattr(pipe, look[0])), before)
        assert attachments(pipe)[0].plan is plan  # the guard saw what was planned
        assert todays.within(plan, run)
    assert len(ways) > 1 and (case.passes > 1 or not plan.settings.guidance_in_turn)
    sd_lowvram.restore(pipe)
    assert torch.equal(todays.picture(pipe), expected) and "forward" not in vars(pipe.transformer)


@pytest.fixture
def models(name: str) -> Iterator[dict[str, Any]]:
    """The models of the pipeline, which has all of them again when the test ends."""
    pipe = loaded(name)
    found = {part: getattr(pipe, part) for part in (*CASES[name].reads, "transformer", "vae")}
    yield found
    sd_lowvram.restore(pipe)
    share(pipe, found, tuple(found))


def share(pipe: Any, models: dict[str, Any], names: tuple[str, ...]) -> Any:
    """``pipe`` with these of its models alone."""
    pipe.register_modules(**{name: part if name in names else None for name, part in models.items()})
    return pipe


def test_every_share_of_a_pipelines_models_has_its_stages(name: str, models: dict[str, Any]) -> None:
    pipe = loaded(name)
    family = anatomy_of(pipe).family
    shares = (names for count in range(1, len(models) + 1) for names in itertools.combinations(models, count))
    for names in shares:
        anatomy = anatomy_of(share(pipe, models, names))
        assert [stage.component for stage in stages(anatomy, Shape(64, 64), encodes=False)] == list(names)
        assert anatomy.family is family or names == ("vae",)


def test_the_stages_of_a_script_run_each_within_its_plan(name: str, models: dict[str, Any]) -> None:
    """Prompts by the text encoders alone, then latents by the transformer alone: that of FLUX.2 asks its autoencoder
    for their scale."""
    pipe, reads = loaded(name), CASES[name].reads
    latents = todays.picture(pipe, output_type="latent")
    read = {part: look(models[part]) for part, look in reads.items()}

    def within(*names: str) -> Any:
        first = sd_lowvram.plan(share(pipe, models, names), vram="1GB", **ASKED)
        half = (first.minimum_vram_bytes + first.predicted.peak_bytes) // 2
        plan = sd_lowvram.optimize(pipe, vram=f"{half} B", **ASKED)
        assert [stage.component for stage in plan.stages] == list(names)
        with sd_lowvram.measured(pipe) as run:
            yield plan
        assert todays.within(plan, run) and attachments(pipe)[0].plan is plan
        sd_lowvram.restore(pipe)

    for _ in within(*reads):
        assert all(torch.equal(look(models[part]), read[part]) for part, look in reads.items())
    for plan in within("transformer", *(["vae"] if hasattr(models["vae"], "bn") else [])):
        assert todays.agrees(plan, todays.picture(pipe, output_type="latent"), latents)
    with pytest.raises(BudgetError, match=r"^64 KiB.*text_encoder\w*.*Give"):
        sd_lowvram.plan(share(pipe, models, tuple(reads)), vram="64KiB", device="cpu")


def test_a_larger_picture_is_planned_anew_before_its_first_step_or_refused_there(name: str) -> None:
    pipe = loaded(name)
    expected = todays.picture(pipe, 160, 128)
    plan = sd_lowvram.optimize(pipe, vram="1GB", settings=FIXED, **ASKED)
    sizes: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        step = pipe.scheduler.step
        patched.setattr(
            pipe.scheduler, "step",
            lambda *given, **more: sizes.append(attachments(pipe)[0].plan.request.width) or step(*given, **more),
        )  # fmt: skip
        assert torch.equal(todays.picture(pipe, 160, 128), expected)
    assert sizes == [160, 160] and attachments(pipe)[0].plan.request.height == 128
    sd_lowvram.restore(pipe)
    sd_lowvram.optimize(pipe, vram=f"{plan.minimum_vram_bytes} B", settings=FIXED, **ASKED)
    with pytest.MonkeyPatch.context() as patched, pytest.raises(BudgetError, match="1024x1024"):
        patched.setattr(pipe.scheduler, "step", None)
        todays.picture(pipe, 1024, 1024)
    assert todays.picture(pipe).shape == (1, 3, todays.SIZE, todays.SIZE)


@pytest.mark.parametrize("name", ["flux", "z-image"])
def test_a_lora_acts_whether_it_is_loaded_before_or_after_the_plan(name: str) -> None:
    """Under streaming; under chunks, in every family: tests/hooks/test_joint_chunks.py."""
    from peft import LoraConfig

    pipe = CASES[name].make()
    plain, least = todays.picture(pipe), least_of(pipe)
    lora = LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_v"], init_lora_weights=False)
    torch.manual_seed(9)
    pipe.transformer.add_adapter(lora)
    expected = todays.picture(pipe)
    assert not torch.equal(expected, plain)
    plan = sd_lowvram.optimize(pipe, vram=f"{2 * least} B", **ASKED)
    assert todays.agrees(plan, todays.picture(pipe), expected)
    sd_lowvram.restore(pipe)
    pipe.transformer.delete_adapters("default")
    plain = todays.picture(pipe)  # peft's layers stay, and some processors round otherwise in them
    plan = sd_lowvram.optimize(pipe, vram=f"{least} B", **ASKED)
    assert todays.agrees(plan, todays.picture(pipe), plain)
    torch.manual_seed(9)
    pipe.transformer.add_adapter(lora)
    picture = todays.picture(pipe)
    sd_lowvram.restore(pipe)
    assert todays.agrees(plan, picture, todays.picture(pipe))


def test_sd3s_table_of_positions_stays_in_host_memory() -> None:
    """Only the part that is cut from it comes to the device."""
    pipe, expected = loaded("sd3"), plain("sd3")
    table = pipe.transformer.pos_embed.pos_embed
    whole = sum(tensor.nbytes for tensor in pipe.transformer.parameters())  # it is a buffer
    for way in ("component", "halves", "blocks", "layer"):
        streamed = dataclasses.replace(FIXED, offload=way)
        plan = sd_lowvram.optimize(pipe, vram="1GB", settings=streamed, **ASKED)
        denoise = next(stage for stage in plan.stages if stage.name == "denoise")
        assert way == "component" or denoise.weights_bytes < whole + table.nbytes // 2
        assert torch.equal(todays.picture(pipe), expected) and pipe.transformer.pos_embed.pos_embed is table
    split = dataclasses.replace(FIXED, offload="layer", split_layers=True)
    sd_lowvram.optimize(pipe, vram="1GB", settings=split, **ASKED)
    assert torch.allclose(todays.picture(pipe), expected, atol=1e-4)


def test_sd3_guides_by_skipped_layers_too() -> None:
    pipe = loaded("sd3")
    skips: dict[str, Any] = {"skip_guidance_layers": [1, 2], "skip_layer_guidance_stop": 0.9, "steps": 4}
    expected = todays.picture(pipe, **skips)
    assert not torch.equal(expected, todays.picture(pipe, steps=4))
    least = least_of(pipe)
    plan = sd_lowvram.optimize(pipe, vram=f"{least} B", **ASKED)
    with sd_lowvram.measured(pipe) as run:
        assert todays.agrees(plan, todays.picture(pipe, **skips), expected)
    assert todays.within(plan, run) and attachments(pipe)[0].plan is plan


def test_runs_without_guidance_are_planned_for_fewer_rows_or_calls_and_anew_where_guidance_comes() -> None:
    pipe = loaded("z-image")
    asked = {"settings": FIXED, **ASKED}
    guided, plain = (sd_lowvram.plan(pipe, vram="4GB", guided=guides, **asked) for guides in (True, False))
    held = [next(one.activation_bytes for one in each.stages if one.name == "denoise") for each in (guided, plain)]
    assert (guided.request.passes, plain.request.passes) == (2, 1) and held[1] < 0.75 * held[0]
    assert sd_lowvram.plan(loaded("chroma"), guided=False, **asked).request.calls == 1
    expected = todays.picture(pipe, guidance_scale=5.0)
    plan = sd_lowvram.optimize(pipe, vram="4GB", guided=False, **asked)
    todays.picture(pipe, **todays.prompts(pipe, guided=False))
    assert attachments(pipe)[0].plan is plan
    assert todays.agrees(plan, todays.picture(pipe, guidance_scale=5.0), expected)
    assert attachments(pipe)[0].plan is not plan


def test_z_image_guides_above_0_and_stops_on_the_way() -> None:
    pipe = loaded("z-image")
    rows: list[int] = []
    call = pipe.transformer.forward
    ways: list[tuple[dict[str, Any], list[int]]] = [
        ({"cfg_truncation": 0.5, "guidance_scale": 0.5, "steps": 4}, [2, 2, 2, 1]),
        (todays.prompts(pipe, guided=False), [1, 1]),
    ]
    for options, expected_rows in ways:
        expected = todays.picture(pipe, **options)
        least = least_of(pipe)
        plan = sd_lowvram.optimize(pipe, vram=f"{least} B", **ASKED)
        rows.clear()
        with pytest.MonkeyPatch.context() as patched, sd_lowvram.measured(pipe) as run:
            patched.setattr(pipe.transformer, "patchify_and_embed", counted(pipe.transformer.patchify_and_embed, rows))
            assert todays.agrees(plan, todays.picture(pipe, **options), expected)
        assert rows == expected_rows and todays.within(plan, run) and attachments(pipe)[0].plan is plan
        sd_lowvram.restore(pipe)
    assert pipe.transformer.forward == call


def counted(original: Callable[..., Any], rows: list[int]) -> Callable[..., Any]:
    """``original``, which notes the length of the list that it is given first."""
    return lambda maps, *more: rows.append(len(maps)) or original(maps, *more)  # type: ignore[func-returns-value]


KINDS: list[tuple[Callable[[], Any], dict[str, Any]]] = [
    (functools.partial(todays.sd3, "StableDiffusion3Img2ImgPipeline"), {"image": SEEN, "strength": 1.0}),
    (
        functools.partial(todays.sd3, "StableDiffusion3InpaintPipeline", 33),
        {"image": SEEN, "mask_image": torch.ones(1, 1, todays.SIZE, todays.SIZE), "strength": 1.0},
    ),
    (functools.partial(todays.z_image, "ZImageImg2ImgPipeline"), {"image": SEEN, "strength": 1.0}),
    (functools.partial(todays.chroma, "ChromaImg2ImgPipeline"), {"image": SEEN, "strength": 1.0}),
]


@pytest.mark.parametrize(
    ("make", "options"), KINDS, ids=["sd3 img2img", "sd3 inpaint", "z-image img2img", "chroma img2img"]
)
def test_pipelines_that_are_given_pictures(make: Callable[[], Any], options: dict[str, Any]) -> None:
    pipe = make()
    expected = todays.picture(pipe, **options)
    plan = sd_lowvram.optimize(pipe, vram=f"{least_of(pipe)} B", **ASKED)
    assert plan.stages[0].name == "encode"
    with sd_lowvram.measured(pipe) as run:
        assert todays.agrees(plan, todays.picture(pipe, **options), expected)
    assert attachments(pipe)[0].plan is plan
    assert todays.within(plan, run)


def test_pictures_that_klein_looks_at_are_planned_before_its_first_step() -> None:
    """They are joined to the latents as more tokens."""
    from PIL import Image

    pipe = loaded("klein")
    seen = Image.fromarray((SEEN[0].permute(1, 2, 0) * 255).byte().numpy())
    seen = seen.resize((128, 128))  # smaller ones are refused by the pipeline
    expected = todays.picture(pipe, image=seen)
    assert not torch.equal(expected, plain("klein"))
    plan = sd_lowvram.optimize(pipe, vram="1GB", settings=FIXED, **ASKED)
    with sd_lowvram.measured(pipe) as run:
        assert torch.equal(todays.picture(pipe, image=seen), expected)
    anew = attachments(pipe)[0].plan
    assert anew is not plan and todays.within(anew, run)
    sd_lowvram.restore(pipe)
    sd_lowvram.optimize(pipe, vram=f"{plan.minimum_vram_bytes} B", settings=FIXED, **ASKED)
    seen = seen.resize((512, 512))  # the text encoder has the peak of less
    with pytest.MonkeyPatch.context() as patched, pytest.raises(BudgetError):
        patched.setattr(pipe.scheduler, "step", None)
        todays.picture(pipe, image=seen)


def test_klein_is_guided_unless_it_is_distilled() -> None:
    assert sd_lowvram.plan(todays.klein(is_distilled=True), settings=FIXED, **ASKED).request.calls == 1
