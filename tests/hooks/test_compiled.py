"""Compiled blocks: which, the same picture, what is compiled anew, and what is refused; the knob on a real pipeline.

But for one test dynamo's own backend stands in for inductor: all is traced, guarded and called as always, and no C++
compiler is waited for.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from run_log import logged

from sd_lowvram import Settings, attached, progress, restore
from sd_lowvram.api import optimize
from sd_lowvram.compat.private import compiled_graphs
from sd_lowvram.errors import ConflictError, SettingsError
from sd_lowvram.kernels import compiler
from sd_lowvram.memory import measured_peak

pytestmark = pytest.mark.skipif(
    compiler.why_not(torch.device("cpu")) is not None, reason=f"{compiler.why_not(torch.device('cpu'))}"
)
REGIONAL = Settings(compile="regional")


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch._dynamo

    monkeypatch.setattr(compiler, "BACKEND", "eager")
    compiler.compile_private.cache_clear()
    torch._dynamo.reset()  # which remembers the sizes that it has seen
    yield
    compiler.compile_private.cache_clear()


def draw(pipe: Any, size: int = 64, batch: int = 1) -> torch.Tensor:
    seed = torch.Generator().manual_seed(0)
    sizes = {"width": size, "height": size, "num_images_per_prompt": batch}
    return pipe("a red apple", num_inference_steps=2, generator=seed, output_type="pt", **sizes).images


@pytest.mark.slow(20)
@pytest.mark.usefixtures("traced_only")
def test_optimised_run_and_restored() -> None:
    pipe, told = tiny.tiniest(), list[tuple[Any, ...]]()
    plain = draw(pipe)
    before = compiled_graphs()
    plan = optimize(pipe, width=64, height=64, device="cpu", settings=REGIONAL)
    assert plan.settings.compile == "regional"
    sites = pipe._sd_lowvram[-1].sites
    assert sites["compiled"] == 22, "8 residual and 3 transformer blocks of the UNet, 11 blocks of the autoencoder"
    with progress.listen(lambda *one: told.append(one)), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tiny.relative_error(draw(pipe), plain) < 1e-5
        first = compiled_graphs() - before
        assert tiny.relative_error(draw(pipe), plain) < 1e-5
    assert compiled_graphs() - before == first >= 11
    assert told[0] == ("compile", 0, 8) and ("compile", 8, 8) in told, "kinds of block in the UNet"
    restore(pipe)
    assert torch.equal(draw(pipe), plain)
    assert not any("forward" in vars(module) for module in pipe.unet.modules())


@pytest.mark.slow(20)
@pytest.mark.usefixtures("traced_only")
def test_another_size_and_batch_are_compiled_once() -> None:
    pipe, start = tiny.tiniest(), compiled_graphs()
    # maps so small that torch's convolutions go the same way for all of them, which compiled code looks at
    plain = draw(pipe, 40), draw(pipe, 48), draw(pipe, 32, 2)
    with attached(pipe.unet, REGIONAL, device="cpu"):
        draw(pipe, 32)
        before = compiled_graphs()
        with logged(r"compile: \d+ pieces of code were compiled again .*another size or batch"):
            assert tiny.relative_error(draw(pipe, 40), plain[0]) < 1e-5
        again = compiled_graphs()
        assert again <= before + before - start, "each once"
        assert tiny.relative_error(draw(pipe, 48), plain[1]) < 1e-5
        assert compiled_graphs() == again
        assert tiny.relative_error(draw(pipe, 32, 2), plain[2]) < 1e-5
        assert compiled_graphs() <= again + before - start


@pytest.mark.slow(15)
@pytest.mark.usefixtures("traced_only")
def test_a_lora_after_compiling_acts_and_is_told() -> None:
    peft = pytest.importorskip("peft")
    pipe = tiny.tiniest()

    def load() -> None:
        config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["to_q", "to_v"])
        torch.manual_seed(1)
        pipe.unet.add_adapter(config)

    plain = draw(pipe)
    with attached(pipe.unet, REGIONAL, device="cpu"):
        draw(pipe)
        load()
        with logged("its layers have changed, as by a LoRA"):
            during = draw(pipe)
    after = draw(pipe)
    assert tiny.relative_error(after, plain) > 1e-4
    assert tiny.relative_error(during, after) < 1e-5
    with attached(pipe.unet, REGIONAL, device="cpu"):  # and one that was there before
        assert tiny.relative_error(draw(pipe), after) < 1e-5


@pytest.mark.slow(15)
@pytest.mark.usefixtures("traced_only")
def test_the_whole_model() -> None:
    pipe = tiny.tiniest()
    plain = draw(pipe)
    with attached(pipe, Settings(compile="whole"), device="cpu") as attachment:
        assert attachment.sites["compiled"] == 3
        assert tiny.relative_error(draw(pipe), plain) < 1e-5
    assert torch.equal(draw(pipe), plain)


@pytest.mark.slow(60)
def test_inductors_code_gives_the_same_picture_and_its_files_lie_in_our_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import AutoencoderKL

    monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path))
    compiler.compile_private.cache_clear()
    vae = AutoencoderKL(block_out_channels=(4,), norm_num_groups=2).eval()
    latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain, held = vae.decode(latents).sample, measured_peak(lambda: vae.decode(latents))
        named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        with attached(vae, REGIONAL, device="cpu"):
            assert tiny.relative_error(vae.decode(latents).sample, plain) < 1e-5
            assert measured_peak(lambda: vae.decode(latents)) <= 1.02 * held, (
                "plans count what the model holds as it is"
            )
        assert torch.equal(vae.decode(latents).sample, plain)
    assert any((tmp_path / "compiled").rglob("*.so"))
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (named, None)
    compiler.limit_folder(tmp_path / "compiled", 1000)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 1000


def test_a_compiler_that_fails_is_told_and_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(compiler, "BACKEND", broken)
    compiler.compile_private.cache_clear()
    pipe = tiny.tiniest()
    plain = draw(pipe)
    with (
        attached(pipe.unet, REGIONAL, device="cpu"),
        logged(r"compiler fails here \(.*no such instruction.*\)\. The model runs as it is"),
    ):
        assert torch.equal(draw(pipe), plain)
    compiler.compile_private.cache_clear()


def test_without_a_compiler_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    pipe = tiny.tiniest()
    plain = draw(pipe)
    with pytest.warns(UserWarning, match=r"C\+\+.*CPUs.*no-such-compiler") as told:
        plan = optimize(pipe, width=64, height=64, device="cpu", settings=REGIONAL)
    assert len(told) == 1 and plan.settings.compile == "off"
    assert torch.equal(draw(pipe), plain)
    restore(pipe)


@pytest.mark.parametrize(
    "other", [{"residual_strips": 2}, {"offload": "layer"}, {"attention": "sliced"}, {"precision": "fp16-storage"}]
)
def test_what_acts_inside_the_blocks_is_refused(other: dict[str, Any]) -> None:
    name = next(iter(other))
    with (
        pytest.raises(SettingsError, match=f"compile='regional' .*{name}="),
        attached(tiny.tiniest(), Settings(compile="regional", **other), device="cpu"),
    ):
        pass


def test_what_is_compiled_already_is_refused() -> None:
    pipe = tiny.tiniest()
    pipe.unet.mid_block.compile()
    with (
        pytest.raises(ConflictError, match=r"unet.*torch\.compile.*compile"),
        attached(pipe, REGIONAL, device="cpu"),
    ):
        pass
