"""The attention hook: under the host's own processors, in every mode, and off again without a trace."""

from __future__ import annotations

import contextlib

import pytest
import tiny
import torch
from diffusers.models import attention_processor as processors
from diffusers.models.attention_processor import Attention
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sd_lowvram import Settings, attached
from sd_lowvram.errors import LowVRAMError, NoSiteError, SettingsError
from sd_lowvram.hooks.numbers.attention import Redirect, attention, kernel_counts
from sd_lowvram.kernels.attention import registry as kernels
from sd_lowvram.kernels.attention.backend import AttentionBackend
from sd_lowvram.memory import kernels_of, measured_peak
from sd_lowvram.models.anatomy import Anatomy, Site
from sd_lowvram.models.diffusers import FAMILY
from sd_lowvram.patches import refuse_conflicts, set_patch
from sd_lowvram.tracing import trace

CPU = torch.device("cpu")
SDPA = torch.nn.functional.scaled_dot_product_attention
BACKENDS = ["sdpa", "flash", "fused-softmax", "sliced"]


def anatomy(*modules: nn.Module) -> Anatomy:
    named = tuple(Site(f"site{index}", module) for index, module in enumerate(modules))
    return Anatomy(FAMILY, {}, {}, None, None, named, (), (), ())


@contextlib.contextmanager
def hooked(settings, *modules):
    patches = list(attention(anatomy(*modules), settings, CPU))
    refuse_conflicts(patches)
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.callback(set_patch(patch))
        yield
    assert torch.nn.functional.scaled_dot_product_attention is SDPA


def ran(*modules):
    return dict(kernel_counts(anatomy(*modules).attentions))


def self_attention(processor=None, **options):
    torch.manual_seed(0)
    return Attention(query_dim=32, heads=4, dim_head=8, processor=processor, **options).eval().requires_grad_(False)


def tokens(count=60, width=32, seed=1):
    return torch.randn(2, count, width, generator=torch.Generator().manual_seed(seed))


def snapshot(model):
    return [dict(vars(module)) for module in model.modules()]


@pytest.fixture(scope="module")
def unet():
    return tiny.pipeline("sd15").unet


def step(unet):
    noise = torch.Generator().manual_seed(3)
    latents, text = torch.randn(2, 4, 16, 16, generator=noise), torch.randn(2, 77, 32, generator=noise)
    with torch.inference_mode():
        return unet(latents, torch.tensor(10), text).sample


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_32_attentions_of_a_unet_are_hit_and_left_as_they_were(unet, backend):
    expected, before = step(unet), snapshot(unet)
    with attached(unet, Settings(attention=backend, attention_mib=1), device="cpu") as attachment:
        assert tiny.relative_error(step(unet), expected) < 1e-5
        sites = attachment.anatomy.attentions
        kernel = "flash" if backend == "sdpa" else backend
        assert kernel_counts(sites) == {kernel: 32}
        assert all(kernel_counts([site]) == {kernel: 1} for site in sites)
    assert torch.equal(step(unet), expected)
    assert snapshot(unet) == before


def test_it_is_our_function_that_runs(monkeypatch):
    """Silent no-ops would pass the comparison above."""

    def zeros(q, k, v, mask, scale, **options):
        return torch.zeros_like(q)

    monkeypatch.setitem(kernels.BACKENDS, "sliced", AttentionBackend(zeros))
    layer, hidden = self_attention(), tokens()
    with hooked(Settings(attention="sliced"), layer):
        assert torch.equal(layer(hidden), layer.to_out[0].bias.expand_as(hidden))


OLD = [
    processors.AttnProcessor,
    lambda: processors.SlicedAttnProcessor(1),
    processors.XFormersAttnProcessor,
]


@pytest.mark.parametrize("make", OLD)
@pytest.mark.parametrize("masked", [False, True])
def test_processors_from_before_torch_2_are_stood_in_for(make, masked):
    layer, hidden, text = self_attention(cross_attention_dim=16), tokens(), tokens(77, 16)
    # as the UNet hands a mask over: (batch, 1, keys), additive
    mask = torch.zeros(2, 1, 77).masked_fill(torch.rand(2, 1, 77) > 0.7, -10000.0) if masked else None
    layer.set_processor(processors.AttnProcessor())
    expected = layer(hidden, text, attention_mask=mask)
    old = make()
    layer.set_processor(old)
    with hooked(Settings(attention="sliced"), layer):
        assert tiny.relative_error(layer(hidden, text, attention_mask=mask), expected) < 1e-5
        assert layer.processor is old
    assert layer.processor is old and ran(layer) == {"sliced": 1}


def test_added_keys_are_stood_in_for_too():
    layer = self_attention(
        processors.AttnAddedKVProcessor(),
        added_kv_proj_dim=16,
        norm_num_groups=8,
        only_cross_attention=False,
        bias=True,
    )
    hidden, text = torch.randn(2, 32, 6, 6), tokens(10, 16)
    expected = layer(hidden, text)
    with hooked(Settings(attention="fused-softmax"), layer):
        assert tiny.relative_error(layer(hidden, text), expected) < 1e-5


def test_a_scale_of_its_own_is_kept():
    layer, hidden = self_attention(scale_qk=False), tokens()
    assert type(layer.processor) is processors.AttnProcessor and layer.scale == 1.0
    expected = layer(hidden)
    with hooked(Settings(attention="sliced"), layer):
        assert tiny.relative_error(layer(hidden), expected) < 1e-5


class Foreign:
    """A processor that computes attention by itself."""

    def __call__(self, attn, hidden_states, **kwargs):
        q, k, v = (one(hidden_states) for one in (attn.to_q, attn.to_k, attn.to_v))
        return attn.to_out[0](torch.softmax(q @ k.mT, -1) @ v)


class AttnProcessor(Foreign):
    """Somebody's own class by the name of a known one."""


@pytest.mark.parametrize("processor", [Foreign, AttnProcessor])
def test_a_processor_out_of_reach_is_named(processor):
    layer = self_attention(processor())
    with hooked(Settings(attention="sliced"), layer):
        with pytest.raises(LowVRAMError, match=rf"site0: {processor.__name__}.*AttnProcessor2_0"):
            layer(tokens())
        layer.set_processor(processors.AttnProcessor2_0())  # what the message advises
        layer(tokens())
    layer.set_processor(processor())
    layer(tokens())


def test_an_error_in_the_layer_leaves_its_processor(monkeypatch):
    old = processors.AttnProcessor()
    layer = self_attention(old)
    monkeypatch.setattr(layer.to_q, "forward", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with hooked(Settings(attention="sliced"), layer):
        with pytest.raises(KeyboardInterrupt):
            layer(tokens())
        assert layer.processor is old


@pytest.mark.parametrize(
    "name", ["IPAdapterAttnProcessor2_0", "FusedAttnProcessor2_0", "PAGIdentitySelfAttnProcessor2_0"]
)
def test_other_processors_keep_working(name):
    if name.startswith("IP"):
        layer = self_attention(cross_attention_dim=16)
        layer.set_processor(
            processors.IPAdapterAttnProcessor2_0(32, 16, num_tokens=(4,), scale=0.7).requires_grad_(False)
        )
        arguments, calls = (tokens(), (tokens(77, 16), [torch.randn(2, 1, 4, 16)])), 2
    else:
        layer = self_attention()
        if name.startswith("Fused"):
            layer.fuse_projections()
        layer.set_processor(getattr(processors, name)())
        layer.requires_grad_(False)
        arguments, calls = (tokens(),), 1
    expected = layer(*arguments)
    before = snapshot(layer)
    with hooked(Settings(attention="fused-softmax"), layer):
        assert tiny.relative_error(layer(*arguments), expected) < 1e-5
    assert ran(layer) == {"fused-softmax": calls}
    assert snapshot(layer) == before


def test_upcast_attention_is_obeyed():
    """AttnProcessor2_0 leaves it to the kernel; plain scores in fp16 would overflow here."""
    seen = {}
    layer = self_attention(upcast_attention=True).half()
    hidden = tokens().half() * 30
    plain = kernels.BACKENDS["sliced"].attend

    def spy(*args, **options):
        seen.update(options)
        return plain(*args, **options)

    with pytest.MonkeyPatch.context() as patch, hooked(Settings(attention="sliced"), layer):
        patch.setitem(kernels.BACKENDS, "sliced", AttentionBackend(spy))
        layer(hidden)
        assert seen["upcast"] is True
        layer.upcast_attention = False
        layer(hidden)
        assert seen["upcast"] is False


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(backend):
    layer, hidden = self_attention(), tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = layer(hidden)
        with hooked(Settings(attention=backend), layer):
            result = layer(hidden)
        queries = torch.randn(1, 2, 8, 8)
        with Redirect(backend, 1 << 20):
            assert torch.nn.functional.scaled_dot_product_attention(queries, queries, queries).dtype == torch.bfloat16
            assert torch.is_autocast_enabled("cpu")
    assert result.dtype == expected.dtype == torch.bfloat16
    assert tiny.relative_error(result.float(), expected.float()) < 1e-2


def test_inside_fake_tensors():
    with FakeTensorMode():
        layer = self_attention()
        for backend in ("sdpa", "sliced", "fused-softmax"):
            with hooked(Settings(attention=backend), layer):
                assert layer(torch.empty(1, 100_000, 32)).shape == (1, 100_000, 32)


@pytest.mark.parametrize("backend", ["sdpa", "sliced", "fused-softmax"])
def test_a_trace_sees_what_the_allocator_sees(backend):
    layer, hidden = self_attention(), tokens(1500)
    with torch.inference_mode(), hooked(Settings(attention=backend, attention_mib=1), layer):
        with kernels_of("cpu"):
            traced = trace(layer, hidden).allocated_peak_bytes
        assert ran(layer) == {}  # predicted, not run
        measured = measured_peak(lambda: layer(hidden))
    assert abs(traced - measured) <= 0.02 * measured
    assert measured < 1500 * 1500 * 4  # one head's scores


def test_all_arguments_of_torchs_function():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9, 8)
    few = torch.randn(2, 2, 9, 8)
    mask = torch.rand(2, 1, 9, 9) > 0.3
    redirect = Redirect("fused-softmax", 1 << 20)

    def both(*args, **kwargs):
        expected = SDPA(*args, **kwargs)
        with redirect:
            return torch.allclose(
                torch.nn.functional.scaled_dot_product_attention(*args, **kwargs), expected, atol=1e-6
            )

    assert both(q, k, v, is_causal=True)
    assert both(q, k, v, mask, 0.0, False, scale=0.2)
    assert both(query=q, key=k, value=v, attn_mask=mask)
    if torch.__version__ >= "2.5":
        assert both(q, few, few, enable_gqa=True) and both(q, few, few, is_causal=True, enable_gqa=True)
    assert redirect.ran == {"fused-softmax": redirect.calls}
    assert both(q[0], k[0], v[0])  # not four dimensions: torch's own
    with redirect:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert redirect.ran["torch"] == 2


def test_gradients_still_flow():
    layer, hidden = self_attention(), tokens()
    layer.requires_grad_(True)
    layer(hidden).sum().backward()
    expected = layer.to_q.weight.grad.clone()
    layer.zero_grad()
    with hooked(Settings(attention="sliced"), layer):
        layer(hidden).sum().backward()
    assert torch.allclose(layer.to_q.weight.grad, expected, atol=1e-6) and ran(layer) == {"torch": 1}


def test_attached_twice_the_last_one_runs():
    layer, hidden = self_attention(), tokens()
    expected = layer(hidden)
    with hooked(Settings(attention="sliced"), layer):
        with hooked(Settings(attention="fused-softmax"), layer):
            assert tiny.relative_error(layer(hidden), expected) < 1e-5
            assert ran(layer) == {"fused-softmax": 1}
        layer(hidden)
        assert ran(layer) == {"fused-softmax": 1, "sliced": 1}


def test_an_attention_within_an_attention():
    inner = self_attention()

    class Around(processors.AttnProcessor2_0):
        def __call__(self, attn, hidden_states, *args, **kwargs):
            return super().__call__(attn, inner(hidden_states), *args, **kwargs)

    outer, hidden = self_attention(Around()), tokens()
    expected = outer(hidden)
    with hooked(Settings(attention="sliced"), outer, inner):
        assert tiny.relative_error(outer(hidden), expected) < 1e-5
    assert ran(outer) == ran(inner) == {"sliced": 1}


def test_another_librarys_function_in_torchs_place_is_overruled(monkeypatch):
    layer, hidden = self_attention(), tokens()
    expected = layer(hidden)

    def foreign(q, k, v, **kwargs):
        return torch.zeros_like(q)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", foreign)
    with contextlib.ExitStack() as stack:
        for patch in attention(anatomy(layer), Settings(attention="sliced"), CPU):
            stack.callback(set_patch(patch))
        assert tiny.relative_error(layer(hidden), expected) < 1e-5
        assert torch.nn.functional.scaled_dot_product_attention is foreign


def test_bad_requests():
    with pytest.raises(NoSiteError):
        list(attention(anatomy(), Settings(attention="sliced"), CPU))
    with pytest.raises(SettingsError, match="efficient"):
        list(attention(anatomy(self_attention()), Settings(attention="efficient"), CPU))


def test_deterministic_alone_chooses_a_proved_backend():
    layer, hidden = self_attention(), tokens()
    with hooked(Settings(deterministic=True), layer):
        first = layer(hidden)
        assert torch.equal(layer(hidden), first)
    assert ran(layer) == {"flash": 2}
