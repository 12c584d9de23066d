"""The trace against the allocator, and what a trace must leave alone."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from measure import CASES, CONVOLUTIONS, THREADS, measure
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from sd_lowvram.kernels.cpu_convolutions import has_tiles
from sd_lowvram.memory import (
    Parked,
    fetch,
    host_account,
    host_empty,
    kernels_of,
    mark_host,
    measured_peak,
    park,
    to_device,
    to_host,
    weights_account,
)
from sd_lowvram.tracing import trace, tracer

MIB = 1 << 20


@pytest.fixture(scope="module")
def measured(request):
    """Peaks of the cases that run."""
    names = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    return measure(*CONVOLUTIONS, *(name for name in CASES if name in names))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow(1)
@pytest.mark.parametrize("name", CASES)
def test_the_trace_agrees_with_the_allocator(name, measured, threads):
    if name not in measured:
        pytest.skip("this processor's kernels convolve in layouts of their own choice")
    call = CASES[name]()
    with call.attached(), kernels_of("cpu"):
        traced = trace(call.function, *call.args).allocated_peak_bytes
    if "bfloat16" in name and has_tiles():  # what AMX's kernels hold differs by generation: a bound
        assert measured[name] <= 1.02 * traced <= 2 * measured[name]
        return
    assert abs(traced - measured[name]) <= max(0.02 * measured[name], MIB // 4), f"{traced} and {measured[name]} bytes"


def net(width=8):
    return nn.Sequential(nn.Conv2d(4, width, 3, padding=1), nn.GroupNorm(2, width), nn.SiLU(), nn.Conv2d(width, 4, 1))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_give_the_same_peak(mode):
    with torch.no_grad():
        expected = trace(net(), torch.empty(1, 4, 32, 32))
    with mode():
        traced = trace(net(), torch.empty(1, 4, 32, 32))
    assert (traced.peak_bytes, traced.activation_peak_bytes) == (expected.peak_bytes, expected.activation_peak_bytes)


@torch.no_grad()
def test_what_a_small_net_holds():
    traced = trace(net(), torch.empty(1, 4, 32, 32))
    one = 8 * 32 * 32 * 4
    assert traced.weights_bytes == sum(p.numel() * 4 for p in net().parameters())
    assert traced.input_bytes == one // 2
    assert traced.largest_bytes == one
    assert one * 2 <= traced.activation_peak_bytes <= one * 2 + 64  # and the mean and deviation of each group
    assert traced.peak_bytes == traced.weights_bytes + traced.input_bytes + traced.activation_peak_bytes
    assert traced.host_peak_bytes == 0
    assert isinstance(traced.output, FakeTensor) and traced.output.shape == (1, 4, 32, 32)
    top = traced.timeline.top()
    assert (top.device_bytes, top.path, top.operator) == (traced.peak_bytes, "1", "aten.native_group_norm")
    assert traced.flops == 2 * 32 * 32 * (8 * 4 * 9 + 4 * 8)
    work = {span.path: (span.flops, span.operators) for span in traced.spans}
    assert list(work) == ["0", "1", "2", "3"]
    assert work["0"] == (2 * 32 * 32 * 8 * 4 * 9, 1) and work["2"] == (0, 1)
    assert sum(span.moved_bytes for span in traced.spans) == traced.moved_bytes


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_model_is_left_as_it_was(device):
    model = net().to(device).eval()
    model.register_buffer("table", torch.zeros(3, device=device))
    before = {name: (tensor, tensor._version) for name, tensor in model.state_dict(keep_vars=True).items()}
    attributes = [dict(vars(module)) for module in model.modules()]
    registries = [list(module._parameters) + list(module._buffers) for module in model.modules()]
    with torch.no_grad():
        trace(model, torch.empty(1, 4, 8, 8))
    for error in (RuntimeError, KeyboardInterrupt):

        def fail(model, image, error=error):
            model[0].weight.add_(1)
            del model[1].bias
            model[3].weight = nn.Parameter(model[3].weight * 2)
            raise error

        with pytest.raises(error), torch.no_grad():
            trace(fail, model, torch.empty(1, 4, 8, 8))
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(after[name] is tensor and tensor._version == version for name, (tensor, version) in before.items())
    assert registries == [list(module._parameters) + list(module._buffers) for module in model.modules()]
    assert attributes == [dict(vars(module)) for module in model.modules()]
    assert type(F.scaled_dot_product_attention).__name__ == "builtin_function_or_method"
    assert "resize_" not in vars(torch.UntypedStorage)


@torch.no_grad()
def test_inside_a_fake_mode_of_the_caller():
    expected = trace(net(), torch.empty(1, 4, 32, 32))
    with FakeTensorMode():
        model, image = net(), torch.empty(1, 4, 32, 32)
        traced = trace(model, image)
        assert traced.output.fake_mode is image.fake_mode
    assert traced.peak_bytes == expected.peak_bytes
    assert trace(model, image).peak_bytes == expected.peak_bytes  # and outside, with its tensors


@torch.no_grad()
def test_a_map_that_is_written_by_rows_is_counted_whole() -> None:
    """A storage of meta tensors is cut where a view is set on it, in torch 2.1 to 2.3."""

    def by_rows(x: torch.Tensor) -> torch.Tensor:
        rows = x.new_empty(64, 1024)
        for row in reversed(range(64)):
            rows[row : row + 1].copy_(x)
        return rows + 1

    assert trace(by_rows, torch.empty(1024)).peak_bytes == 4 * 1024 * (1 + 2 * 64)


K = 1024  # elements of float32: 4 KiB


def views(x):
    y = x + 1
    return y.view(2, -1).t().unsqueeze(0).expand(3, -1, -1)[0].chunk(2)[1]


def in_place(x):
    y = torch.zeros(K)
    y.add_(1).mul_(2).clamp_(0, 1)
    y[: K // 2] = 3
    return y


def resized(x):
    y = torch.empty(K)
    y.resize_(3 * K)
    y.untyped_storage().resize_(0)
    return torch.empty(K)


def freed(x):
    for _ in range(5):
        y = x + 1
        del y
    return x * 2


def moved(x):
    return x.to(torch.float16).to(torch.float32)


def listed(x):
    a, b = torch.split(x + 1, K // 2)
    return torch.cat([a, b, a])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("function", "kib"),
    [(views, 4), (in_place, 4), (resized, 12), (freed, 4), (moved, 6), (listed, 10)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_lives_of_storages(function, kib, mode):
    with mode():
        twice = [trace(lambda x: (function(x), function(x))[1], torch.empty(K)) for _ in range(2)]
        traced = trace(function, torch.empty(K))
        assert traced.activation_peak_bytes == kib << 10
        assert {one.activation_peak_bytes for one in twice} != {0}
        assert traced.peak_bytes == (kib + 4) << 10
        if function is not resized:
            assert measured_peak(lambda: function(torch.empty(K))) - 4096 == pytest.approx(kib << 10, abs=256)


@torch.no_grad()
def test_recipes_keep_shapes_strides_and_aliases():
    """The second time an operator meets the same shapes its results come from a recipe, and must be the same."""

    def run(x):
        results = []
        for _ in range(2):
            y = F.conv2d(x[:, :, 2:9:3], torch.ones(3, 4, 1, 1)).transpose(1, 2)
            z = y.reshape(1, -1)
            parts = z.split(5, dim=1)
            z.add_(1)
            w = torch.add(parts[0], 1), parts[1].half(), x.amax((2, 3), keepdim=True), torch.add(parts[0], 1.5), x[0, 1]
            results.append((y, z, *parts, *w))
        return results

    x = torch.randn(1, 4, 10, 10)
    first, second = trace(run, x).output
    for a, b, real in zip(first, second, run(x)[0], strict=True):
        assert (a.shape, a.dtype, a.storage_offset()) == (b.shape, b.dtype, b.storage_offset())
        assert (a.shape, a.stride(), a.dtype) == (real.shape, real.stride(), real.dtype)
        assert b.stride() == real.stride()
    owners = [{t.untyped_storage()._cdata for t in results} for results in (first, second)]
    assert len(owners[0]) == len(owners[1]) == len({t.untyped_storage()._cdata for t in run(x)[0]})


def composites(x):
    """Operators made of other operators: views, themselves, one kernel, several."""
    a = F.linear(x, torch.ones(5, 10), torch.ones(5))
    b = F.layer_norm(a, (5,)).transpose(1, 2)
    c = b.reshape(1, -1)
    d, e = c.chunk(2, dim=1)
    f = F.dropout(x, training=False).narrow(1, 2, 6).contiguous()
    g = x.as_strided((3, 2), (10, 1), 4).flatten().to(torch.float64)
    h = x.matmul(torch.ones(10, 3)), F.silu(x), x.to(torch.float32), x.unflatten(2, (2, 5)), F.linear(x[0], x[0])
    return a, b, c, d, e, f, g, *h


@torch.inference_mode()  # elsewhere torch takes composite operators apart before anyone sees them
def test_composite_operators_do_the_same_again():
    x = torch.randn(1, 8, 10)
    traced = [trace(composites, x) for _ in range(2)]
    for a, b, real in zip(traced[0].output, traced[1].output, composites(x), strict=True):
        for one in (a, b):
            assert (one.shape, one.stride(), one.dtype) == (real.shape, real.stride(), real.dtype)
            assert (one.storage_offset(), one.untyped_storage().nbytes()) == (
                real.storage_offset(),
                real.untyped_storage().nbytes(),
            )
    owners = [len({one.untyped_storage()._cdata for one in results.output}) for results in traced]
    assert owners[0] == owners[1] == len({one.untyped_storage()._cdata for one in composites(x)})
    figures = ("peak_bytes", "activation_peak_bytes", "largest_bytes", "flops", "moved_bytes", "operators")
    first, second = ([getattr(one, name) for name in figures] for one in traced)
    assert first == second
    assert list(traced[0].timeline) == list(traced[1].timeline)


@torch.inference_mode()
def test_there_is_an_end_to_how_many_recipes_are_kept(monkeypatch):
    monkeypatch.setattr(tracer, "_MOST_RECIPES", 5)
    for width in range(12, 40):
        trace(lambda x: (x + 1).reshape(-1), torch.empty(2, width))
    assert 0 < len(tracer._recipes[False]) <= 5


@torch.inference_mode()
def test_copies_within_composite_operators_cross_between_the_accounts():
    def run(x):
        parked = park(x)
        return [parked._host.t().reshape(-1) for _ in range(2)]  # a copy on the device of what lies in host memory

    once, twice = trace(run, torch.empty(8, 4)), trace(run, torch.empty(8, 4))
    assert once.copied_bytes == twice.copied_bytes == 3 * 8 * 4 * 4


def test_gradients_are_followed_only_when_the_callable_asks():
    model, image = net().eval(), torch.empty(1, 4, 32, 32)
    with torch.no_grad():
        plain = trace(model, image).activation_peak_bytes
    assert torch.is_grad_enabled() and trace(model, image).activation_peak_bytes == plain
    assert not trace(model, image).output.requires_grad
    training = trace(torch.enable_grad()(model.forward), image)
    assert training.activation_peak_bytes > plain and training.output.requires_grad


@torch.no_grad()
def test_parked_bytes_change_the_account():
    image = torch.empty(1, 2, 64, 32)
    one = 2 * 64 * 32 * 4

    def run(x):
        y = park(x + 1)
        rows = Parked.empty(x.shape, x.dtype, x.device)
        for start in range(0, 64, 8):
            rows.store(slice(start, start + 8), x[:, :, start : start + 8])
        del rows
        return fetch(y)

    traced = trace(run, image)
    assert traced.host_peak_bytes == 2 * one
    assert traced.activation_peak_bytes == one
    assert traced.copied_bytes == 3 * one
    assert max(event.host_bytes for event in traced.timeline) == 2 * one


@torch.no_grad()
def test_streamed_weights_are_no_activations():
    layer = nn.Linear(K, K, bias=False)
    layer.weight = nn.Parameter(to_host(layer.weight))
    size = K * K * 4

    def run(layer, x):
        weight = to_device(layer.weight, "cuda", weight=True)
        return F.linear(x, weight)

    traced = trace(run, layer, torch.empty(1, K))
    assert (traced.weights_bytes, traced.host_peak_bytes) == (0, size)
    assert traced.activation_peak_bytes == K * 4
    assert traced.peak_bytes == size + 2 * K * 4
    assert traced.copied_bytes == traced.largest_bytes == size


@torch.no_grad()
def test_accounts_by_context():
    def run(x):
        with host_account():
            a = x + 1
        with weights_account():
            b = x + 1
        return a, b, x + 1

    traced = trace(run, torch.empty(K))
    assert traced.host_peak_bytes == 4096
    assert traced.activation_peak_bytes == 4096
    assert traced.peak_bytes == 3 * 4096
    assert traced.allocated_peak_bytes == 3 * 4096


@torch.no_grad()
def test_tensors_met_on_the_way_were_there_all_along():
    table, parked = torch.zeros(K), host_empty((2 * K,), torch.float32)
    marked = torch.zeros(K)
    mark_host(marked)

    def run(x):
        big = x + 1
        del big
        return x[:1] + table[:1] + parked[:1] + marked[:1] + table[:1]

    traced = trace(run, torch.empty(K))
    assert traced.weights_bytes == 4096
    assert traced.peak_bytes == 3 * 4096
    assert traced.host_peak_bytes == 3 * 4096
    assert traced.timeline.top().device_bytes == traced.peak_bytes


@pytest.mark.parametrize(
    ("run", "inputs", "wide"),
    [
        (nn.Linear(2048, 3072, bias=False, device="meta"), (2, 64, 2048), True),
        (nn.Linear(2048, 3072, device="meta"), (64, 2048), True),
        (nn.Linear(1280, 10240, device="meta"), (64, 1280), False),
        (nn.Conv2d(2048, 2048, 3, device="meta"), (1, 2048, 8, 8), False),
        (lambda q: F.scaled_dot_product_attention(q, q, q), (1, 2, 256, 128), True),
        (lambda q: F.scaled_dot_product_attention(q, q, q), (1, 2, 256, 160), False),
    ],
)
@torch.no_grad()
def test_operations_of_transformers_are_told_apart(run, inputs, wide):
    traced = trace(run, torch.empty(inputs, device="meta", dtype=torch.float32))
    assert traced.flops > 0 and traced.wide_flops == (traced.flops if wide else 0)
    assert sum(span.wide_flops for span in traced.spans) == traced.wide_flops


@torch.no_grad()
def test_elements_of_a_groups_norm_are_counted_once_for_all_groups_and_pictures():
    model = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU(), nn.GroupNorm(2, 8), nn.LayerNorm(6))
    traced = trace(model, torch.empty(3, 8, 5, 6, device="meta"))
    assert traced.group_elements == sum(span.group_elements for span in traced.spans) == (2 + 4) * 5 * 6


@torch.no_grad()
def test_shared_weights_count_once():
    layer = nn.Linear(K, K, bias=False)
    pair = nn.ModuleList([layer, nn.Linear(K, K, bias=False), layer])
    pair[1].weight = layer.weight
    assert trace(lambda x: pair[2](pair[1](x)), torch.empty(1, K)).weights_bytes == K * K * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 10, 4096, 64), (1, 1, 4096, 512), (2, 8, 256, 160)])
@torch.no_grad()
def test_attention_holds_no_scores(shape, dtype):
    q = torch.empty(shape, dtype=dtype, device="meta").transpose(1, 2).contiguous().transpose(1, 2)
    one, scores = q.numel() * q.element_size(), shape[0] * shape[1] * shape[2] ** 2 * q.element_size()
    original = F.scaled_dot_product_attention
    traced = trace(lambda q: F.scaled_dot_product_attention(q, q, q), q)
    assert one <= traced.activation_peak_bytes <= 3.1 * one
    assert traced.flops == 4 * shape[0] * shape[1] * shape[2] ** 2 * shape[3]
    assert traced.output.transpose(1, 2).is_contiguous()
    if not hasattr(nn, "attention"):  # torch 2.1
        return
    assert trace(original, q, q, q).activation_peak_bytes <= 3.1 * one
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert trace(F.scaled_dot_product_attention, q, q, q).activation_peak_bytes >= scores


@torch.no_grad()
def test_multi_head_attention_module_is_foretold_too():
    layer = nn.MultiheadAttention(64, 4, batch_first=True)
    x = torch.empty(1, 1024, 64)
    traced = trace(lambda layer: layer(x, x, x, need_weights=False)[0], layer)
    assert traced.activation_peak_bytes < 4 * 1024 * 1024 * 4


@torch.no_grad()
def test_other_threads_keep_their_attention():
    q = torch.randn(1, 2, 8, 16)
    expected, got = F.scaled_dot_product_attention(q, q, q), []

    def run(x):
        thread = threading.Thread(target=lambda: got.append(F.scaled_dot_product_attention(q, q, q)))
        thread.start()
        thread.join()
        return F.scaled_dot_product_attention(x, x, x)

    trace(run, q)
    assert torch.equal(got[0], expected)


@torch.no_grad()
def test_channels_last_on_a_gpu_costs_copies_in_group_norm():
    image = torch.empty(2, 4, 32, 32).to(memory_format=torch.channels_last)
    model = net().to(memory_format=torch.channels_last)
    with kernels_of("cpu"):
        assert trace(model[1], torch.empty(2, 8, 32, 32).to(memory_format=torch.channels_last)).output.is_contiguous(
            memory_format=torch.channels_last
        )
    assert trace(model, image).peak_bytes > trace(net(), torch.empty(2, 4, 32, 32)).peak_bytes


@torch.no_grad()
def test_autocast_casts_are_counted():
    layer = nn.Linear(K, K)
    with torch.autocast("cpu", torch.bfloat16):
        assert trace(layer, torch.empty(1, K)).activation_peak_bytes >= K * K * 2
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert trace(layer, torch.empty(1, K)).activation_peak_bytes == K * 4


@torch.no_grad()
def test_measured_peak_counts_what_is_held_at_once():
    def run():
        a = torch.empty(1 << 20)
        del a
        return torch.empty(1 << 19)

    assert measured_peak(run) == 4 << 20


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_what_was_compiled_is_traced_as_it_was_written():
    model, image = net(), torch.randn(1, 4, 8, 8)
    compiled = torch.compile(model, backend="eager")
    torch._dynamo.utils.counters.clear()
    with torch.inference_mode():
        assert trace(compiled, image).peak_bytes == trace(model, image).peak_bytes
    assert not torch._dynamo.utils.counters["frames"]
    compiled(image)
    assert torch._dynamo.utils.counters["frames"]["ok"]


def test_gelu_by_tanh_is_one_operator_of_torch_where_written_out_it_writes_eight_maps_and_reads_ten() -> None:
    """The figures by which Chen et al. 2023 put it into one shader; torch's own operator reads one and writes one."""

    def written_out(x: torch.Tensor) -> torch.Tensor:
        inner = 0.7978845608 * (x + 0.044715 * x.pow(3))
        return (0.5 * x) * (1 + inner.tanh())

    maps = {
        way: trace(function, torch.empty(2, 64, 256, device="meta")).moved_bytes / (2 * 64 * 256 * 4)
        for way, function in (("out", written_out), ("torch", functools.partial(F.gelu, approximate="tanh")))
    }
    assert maps == {"out": 8 + 10, "torch": 1 + 1}
