"""FID, inception score and CLIP score: torchmetrics' own values where all is at hand, else what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sd_lowvram.errors import BadInputError
from sd_lowvram.unets.published_measures import CLIP, published_measures

TOKENIZER = Path(__file__).parents[2] / "sd_lowvram" / "demo" / "model" / "tokenizer"


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Torch hub's folder and Hugging Face's, both empty."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    return tmp_path


def pictures(seed: int, count: int = 6) -> Tensor:
    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def test_what_is_missing_is_named(caches: Path) -> None:
    try:
        import torch_fidelity.feature_extractor_inceptionv3  # noqa: F401
    except ImportError:
        why = "need torchmetrics and torch-fidelity, and here No module named .*: pip install torchmetrics"
    else:
        why = "weights-inception-2015-12-05-6726825d.pth is missing"
    with pytest.raises(BadInputError, match=why):
        published_measures(pictures(0))


@pytest.mark.slow(60)
def test_the_values_are_torchmetrics_own(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With random weights of the real Inception network, and a small CLIP model."""
    inception = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    fid_module = pytest.importorskip("torchmetrics.image.fid")
    from torchmetrics.image.inception import InceptionScore
    from torchmetrics.multimodal.clip_score import CLIPScore

    weights = caches / "hub" / "checkpoints" / inception.URL_INCEPTION_V3.rsplit("/", 1)[1]
    weights.parent.mkdir(parents=True)
    monkeypatch.setattr(inception, "load_state_dict_from_url", lambda *args, **kwargs: torch.load(weights))
    torch.save(random_inception(inception), weights)
    with pytest.raises(BadInputError, match=f"the weights of {CLIP} are not in Hugging Face's cache"):
        published_measures(pictures(0))
    clip = small_clip(caches / "hf")
    prompts = ["a cat", "a dog", "an apple", "a car", "a tree", "a house"]
    measures = published_measures(pictures(0))
    for seed in (1, 2):  # the second time nothing is left of the first
        found = measures(pictures(seed), prompts)
        fid = fid_module.FrechetInceptionDistance(feature_extractor_weights_path=str(weights))
        as_bytes = {name: ((pictures(one) + 1) * 127.5).byte() for name, one in (("known", 0), ("drawn", seed))}
        fid.update(as_bytes["known"], real=True)
        fid.update(as_bytes["drawn"], real=False)
        score, clip_score = InceptionScore(), CLIPScore(lambda: clip)
        torch.manual_seed(0)
        score.update(as_bytes["drawn"])
        clip_score.update(((pictures(seed) + 1) * 127.5).round().byte(), prompts)
        assert found["fid"] == pytest.approx(float(fid.compute()), rel=1e-3)
        assert found["inception_score"] == pytest.approx(float(score.compute()[0]), rel=1e-3)
        assert found["clip_score"] == pytest.approx(float(clip_score.compute()), rel=1e-5)


def random_inception(module: object) -> dict[str, Tensor]:
    import torch_fidelity.feature_extractor_inceptionv3 as inception

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inception, "load_state_dict_from_url", lambda *args, **kwargs: {})
        patch.setattr(torch.nn.Module, "load_state_dict", lambda *args, **kwargs: None)
        torch.manual_seed(0)
        made = inception.FeatureExtractorInceptionV3("inception-v3-compat", ["2048", "logits_unbiased"])
    state: dict[str, Tensor] = made.state_dict()
    return state


def small_clip(cache: Path) -> tuple[object, object]:
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(TOKENIZER)
    narrow = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**narrow, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    config = CLIPConfig(
        text_config=text, vision_config={**narrow, "image_size": 32, "patch_size": 16}, projection_dim=16
    )
    torch.manual_seed(0)
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
