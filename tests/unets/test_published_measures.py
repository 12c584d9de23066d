"""FID, inception score and CLIP score: torchmetrics' own values where all is at hand, else what is missing."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from sd_lowvram.cli import app
from sd_lowvram.errors import BadInputError
from sd_lowvram.unets.published_measures import CLIP, clip_of, published_measures, weight_paths

TOKENIZER = Path(__file__).parents[2] / "sd_lowvram" / "demo" / "model" / "tokenizer"
PROMPTS = 2 * ["a cat", "a dog", "an apple", "a car", "a tree", "a house"]
"""More than ten: the inception score is of ten groups, and one of groups of one picture."""


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Torch hub's folder and Hugging Face's, both empty."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    return tmp_path


def pictures(seed: int) -> Tensor:
    """One a prompt, each of a colour of its own."""
    generator = torch.Generator().manual_seed(seed)
    colours = torch.rand(len(PROMPTS), 3, 1, 1, generator=generator)
    return (colours + torch.rand(len(PROMPTS), 3, 32, 32, generator=generator)) - 1


def test_what_is_missing_is_told_before_anything_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    asked = ["unet", "evaluate", "--student", "nowhere", "--data", "nowhere", "--torchmetrics"]
    run = CliRunner().invoke(app, asked)
    why = 'need torchmetrics and torch-fidelity, and here .*: pip install "torchmetrics>=1.8" torch-fidelity'
    assert run.exit_code == 2 and re.search(why, " ".join(run.output.split()))


def test_weights_that_are_missing_are_named(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for the packages: of what they have only the address is asked for."""
    inception = ModuleType("torch_fidelity.feature_extractor_inceptionv3")
    monkeypatch.setattr(inception, "URL_INCEPTION_V3", "https://example.com/inception.pth", raising=False)
    for module in (ModuleType("torchmetrics"), ModuleType("torch_fidelity"), inception):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    file = caches / "hub" / "checkpoints" / "inception.pth"
    both = f"Inception network are looked for at {re.escape(str(file))} .*; those of {CLIP} are looked for in Hugging"
    with pytest.raises(BadInputError, match=both):
        weight_paths()
    file.parent.mkdir(parents=True)
    file.touch()
    small_clip(caches / "hf")
    folder = weight_paths().clip
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadInputError, match=f"{CLIP} .*Hugging Face"):
        weight_paths()
    (folder / "model.safetensors").touch()
    file.unlink()
    with pytest.raises(BadInputError, match="Inception") as told:
        weight_paths()
    assert CLIP not in str(told.value)


def test_the_clip_score_is_that_of_the_model_itself(caches: Path) -> None:
    """Whatever this release of transformers calls the features."""
    model, processor = small_clip(caches / "hf")
    snapshot = next((caches / "hf").glob("models--*/snapshots/*"))
    theirs, _ = clip_of(snapshot)
    drawn = [*((pictures(1) + 1) * 127.5).round().byte()]
    inputs = processor(text=PROMPTS, images=drawn, return_tensors="pt", padding=True)
    with torch.inference_mode():
        wanted = model(**inputs)
        images = theirs.get_image_features(inputs["pixel_values"])
        texts = theirs.get_text_features(inputs["input_ids"], inputs["attention_mask"])
    for found, embeds in ((images, wanted.image_embeds), (texts, wanted.text_embeds)):
        torch.testing.assert_close(torch.nn.functional.normalize(found), embeds)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_text("{", encoding="utf-8")
    with pytest.raises(BadInputError, match=f"{CLIP} in "):
        clip_of(snapshot)


@pytest.mark.rare
@pytest.mark.slow(60)
def test_the_values_are_torchmetrics_own(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With random weights of the real Inception network, and a small CLIP model; nothing is fetched."""
    inception = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    fid_module = pytest.importorskip("torchmetrics.image.fid")
    from torchmetrics.image.inception import InceptionScore

    monkeypatch.setattr(torch.hub, "download_url_to_file", None)
    file = caches / "hub" / "checkpoints" / inception.URL_INCEPTION_V3.rsplit("/", 1)[1]
    file.parent.mkdir(parents=True)
    torch.save(random_inception(inception), file)
    model, processor = small_clip(caches / "hf")
    measures = published_measures(pictures(0).split(5), weight_paths())
    for seed in (1, 2):  # the second time nothing is left of the first
        found = measures(pictures(seed), PROMPTS)
        assert found == measures(pictures(seed), PROMPTS)
        fid = fid_module.FrechetInceptionDistance()
        known, drawn = (((pictures(one) + 1) * 127.5).byte() for one in (0, seed))
        fid.update(known, real=True)
        fid.update(drawn, real=False)
        score = InceptionScore()
        score.update(drawn)
        torch.manual_seed(0)
        inputs = processor(
            text=PROMPTS, images=[*((pictures(seed) + 1) * 127.5).round().byte()], return_tensors="pt", padding=True
        )
        with torch.inference_mode():
            seen = model(**inputs)
            wanted = {"fid": fid.compute(), "inception_score": score.compute()[0]}
        wanted["clip_score"] = 100 * (seen.image_embeds * seen.text_embeds).sum(dim=1).mean().clamp_min(0)
        assert found == pytest.approx({name: float(value) for name, value in wanted.items()}, rel=1e-3)
        assert found["fid"] > 1 and found["inception_score"] > 1.01 and found["clip_score"] > 0
    for content in (b"", b"no weights", file.read_bytes()[:1000]):
        file.write_bytes(content)
        with pytest.raises(BadInputError, match=re.escape(str(file))):
            published_measures(pictures(0).split(5), weight_paths())


def random_inception(module: object) -> dict[str, Tensor]:
    import torch_fidelity.feature_extractor_inceptionv3 as inception

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inception, "load_state_dict_from_url", lambda *args, **kwargs: {})
        patch.setattr(torch.nn.Module, "load_state_dict", lambda *args, **kwargs: None)
        torch.manual_seed(0)
        made = inception.FeatureExtractorInceptionV3("inception-v3-compat", ["2048", "logits_unbiased"])
    for layer in made.modules():
        if isinstance(layer, torch.nn.Conv2d):  # as drawn first, features fade on the way
            torch.nn.init.kaiming_normal_(layer.weight)
    torch.nn.init.normal_(made.fc.weight, std=0.1)
    state: dict[str, Tensor] = made.state_dict()
    return state


def small_clip(cache: Path) -> tuple[Any, Any]:
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(TOKENIZER)
    narrow = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**narrow, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    config = CLIPConfig(
        text_config=text, vision_config={**narrow, "image_size": 32, "patch_size": 16}, projection_dim=16
    )
    torch.manual_seed(2)  # of some the scores are below zero, which counts as zero
    model = CLIPModel(config).eval()
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    processor = CLIPProcessor(CLIPImageProcessor(**sizes), tokenizer)
    repository = cache / f"models--{CLIP.replace('/', '--')}"
    folder = repository / "snapshots" / "0123456789abcdef"
    for part in (model, processor):
        part.save_pretrained(folder)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123456789abcdef", encoding="utf-8")
    return model, processor
