"""The host's side of streamed weights: what is copied, what stays in its file, and how much memory that takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from settled import host_weights_of
from torch import Tensor, nn

from sd_lowvram.memory import is_host, pinned
from sd_lowvram.streaming import host_weights as module
from sd_lowvram.streaming.host_weights import CHUNK_BYTES, RING_BYTES, host_budget, mapped_bytes
from sd_lowvram.streaming.mapped_files import MappedFiles, can_read_past_cache
from sd_lowvram.units import MIB
from sd_lowvram.weights import lay_last, same_bits

CPU = torch.device("cpu")
SHAPES = {"small": (3,), "scalar": (), "image": (8, 4, 3, 3), "large": (1300, 4096), "bytes": (77,)}


@pytest.fixture
def mapped(tmp_path: Path) -> dict[str, Tensor]:
    """Tensors that safetensors has mapped: one longer than two chunks of the ring, none in another type."""
    noise = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=noise).half() for name, shape in SHAPES.items()}
    made["bytes"] = torch.arange(77, dtype=torch.uint8)
    save_file(made, tmp_path / "weights.safetensors")
    return load_file(tmp_path / "weights.safetensors")


def _nbytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _in_file(tensor: Tensor) -> bool:
    return MappedFiles().kind(tensor) == "mapped"


def test_files_stay_mapped_where_memory_is_short_and_pass_the_ring(mapped: dict[str, Tensor]) -> None:
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in mapped.items()}
    assert mapped["large"].nbytes > 1.2 * CHUNK_BYTES
    host_weights = host_weights_of(mapped.values(), 0, CPU)
    assert host_weights.pinned_bytes == host_weights.held_bytes == 0
    assert host_weights.host_bytes == host_weights.ring_bytes == RING_BYTES
    assert host_weights.mapped_bytes == _nbytes(mapped)
    for _ in range(2):  # the second time round, chunks are used again
        for name, tensor in mapped.items():
            target = torch.zeros_like(tensor)
            host_weights.copy_to(tensor.data, target)
            assert torch.equal(target, before[name][1])
            assert tensor.data_ptr() == before[name][0]
            assert is_host(tensor)
    host_weights.undo()
    assert not any(is_host(tensor) for tensor in mapped.values())


def test_the_ring_is_used(mapped: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    host_weights = host_weights_of(mapped.values(), 0, CPU)
    seen: list[int] = []
    copy = module._Ring.copy

    def watched(ring: module._Ring, source: Tensor, *rest: object) -> None:
        seen.append(len(source))
        copy(ring, source, *rest)

    monkeypatch.setattr(module._Ring, "copy", watched)
    for tensor in mapped.values():
        host_weights.copy_to(tensor.data, torch.empty_like(tensor))
    assert sum(seen) == _nbytes(mapped)


def test_memory_that_is_there_is_used(mapped: dict[str, Tensor]) -> None:
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in mapped.items()}
    host_weights = host_weights_of(mapped.values(), 64 * MIB, CPU)
    assert host_weights.mapped_bytes == host_weights.ring_bytes == host_weights.held_bytes == 0
    assert _nbytes(mapped) <= host_weights.pinned_bytes <= 32 * MIB
    assert not any(_in_file(tensor) for tensor in mapped.values())
    for name, tensor in mapped.items():
        target = torch.zeros_like(tensor)
        host_weights.copy_to(tensor.data, target)
        assert torch.equal(target, before[name][1])
    host_weights.undo()
    assert {name: tensor.data_ptr() for name, tensor in mapped.items()} == {
        name: at for name, (at, _) in before.items()
    }


@pytest.mark.parametrize("ram", [0, 1, 33 * MIB, 36 * MIB, 40 * MIB, 48 * MIB])
def test_never_more_than_the_budget(mapped: dict[str, Tensor], ram: int) -> None:
    ordinary = torch.ones(1000)
    host_weights = host_weights_of([ordinary, *mapped.values()], ram, CPU)
    assert host_weights.held_bytes == 4000
    assert host_weights.host_bytes <= max(ram, RING_BYTES + 4000)
    host_weights.undo()
    assert torch.equal(ordinary, torch.ones(1000))


def test_never_more_than_a_share_of_the_machine(mapped: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    from sd_lowvram.devices.info import Memory

    monkeypatch.setattr(pinned, "host_memory", lambda: Memory(80 * MIB, 80 * MIB))
    host_weights = host_weights_of(mapped.values(), 1 << 40, CPU)
    assert host_weights.host_bytes <= 40 * MIB
    assert host_weights.mapped_bytes > 0


def test_the_budget_of_the_run_is_the_default(mapped: dict[str, Tensor]) -> None:
    with host_budget(RING_BYTES):
        host_weights = host_weights_of(mapped.values(), None, CPU)
    assert host_weights.mapped_bytes == _nbytes(mapped)
    with host_budget(RING_BYTES + 16 * MIB):  # enough for one of two
        first = host_weights_of([nn.Parameter(mapped["large"], requires_grad=False)], None, CPU)
        second = host_weights_of([nn.Parameter(mapped["large"], requires_grad=False)], None, CPU)
    assert (first.mapped_bytes, second.mapped_bytes) == (0, mapped["large"].nbytes)
    host_weights.undo()
    assert host_weights_of(mapped.values(), None, CPU).mapped_bytes == 0


def test_memory_of_weights_that_ended_is_free_for_later_ones_within_the_same_budget(mapped: dict[str, Tensor]) -> None:
    def another() -> nn.Parameter:
        return nn.Parameter(mapped["large"], requires_grad=False)

    first, second = another(), another()
    host_weights = host_weights_of([first], RING_BYTES + 16 * MIB, CPU)  # enough for one of two
    pinned = host_weights.pinned_bytes
    host_weights.add([first, second])
    assert (host_weights.pinned_bytes, host_weights.mapped_bytes) == (pinned, second.nbytes)
    del first
    third = another()
    host_weights.add([second])
    assert (host_weights.pinned_bytes, host_weights.mapped_bytes) == (0, second.nbytes)
    host_weights.add([second, third])
    assert (host_weights.pinned_bytes, host_weights.mapped_bytes) == (pinned, second.nbytes)
    host_weights.undo()
    assert (host_weights.pinned_bytes, host_weights.mapped_bytes) == (0, 0)
    assert _in_file(second) and _in_file(third)


def test_a_weight_that_gets_new_memory_is_counted_once(mapped: dict[str, Tensor]) -> None:
    ordinary, other = torch.ones(1000), nn.Parameter(mapped["large"], requires_grad=False)
    host_weights = host_weights_of([ordinary, other], RING_BYTES + 16 * MIB, CPU)
    host_bytes = host_weights.host_bytes
    for _ in range(3):
        ordinary.data = ordinary.data.clone()
        other.data = mapped["large"].data
        host_weights.add([ordinary, other])
        assert (host_weights.host_bytes, host_weights.mapped_bytes) == (host_bytes, 0)


def test_a_slab_is_counted_while_a_weight_in_it_exists(mapped: dict[str, Tensor]) -> None:
    first, second = (nn.Parameter(mapped["large"][at], requires_grad=False) for at in (slice(0, 100), slice(100, 200)))
    host_weights = host_weights_of([first, second], RING_BYTES + 16 * MIB, CPU)
    pinned = host_weights.pinned_bytes
    del first
    host_weights.add([second])
    assert host_weights.pinned_bytes == pinned >= 2 * second.nbytes


def test_ordinary_memory_is_not_copied() -> None:
    tensor = torch.ones(2048, 2048)
    at = tensor.data_ptr()
    host_weights = host_weights_of([tensor], 1 << 40, CPU)
    assert tensor.data_ptr() == at
    assert host_weights.host_bytes == host_weights.held_bytes == tensor.nbytes


def test_tied_weights_have_one_host_weight(mapped: dict[str, Tensor]) -> None:
    first = nn.Parameter(mapped["large"], requires_grad=False)
    second = nn.Parameter(mapped["large"], requires_grad=False)
    host_weights = host_weights_of([first, second, first], 1 << 30, CPU)
    assert first.data_ptr() == second.data_ptr() != mapped["large"].data_ptr()
    assert host_weights.pinned_bytes < 2 * first.nbytes
    host_weights.undo()
    assert first.data_ptr() == second.data_ptr() == mapped["large"].data_ptr()


def test_strides_are_kept(mapped: dict[str, Tensor]) -> None:
    tensor = mapped["image"].to(memory_format=torch.channels_last)
    host_weights = host_weights_of([tensor, mapped["image"]], 1 << 30, CPU)
    for ram in (0, 1 << 30):
        host_weights = host_weights_of([mapped["image"].permute(0, 2, 3, 1)], ram, CPU)
        target = torch.zeros(8, 4, 3, 3, dtype=torch.float16).permute(0, 2, 3, 1)
        host_weights.copy_to(mapped["image"].permute(0, 2, 3, 1), target)
        assert torch.equal(target, mapped["image"].permute(0, 2, 3, 1))
    target = torch.zeros(8, 4, 3, 3, dtype=torch.float16)  # other strides than the source, which has no ring to pass
    host_weights.copy_to(tensor, target)
    assert torch.equal(target, tensor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.uint8])
@pytest.mark.parametrize("ram", [0, 1 << 30])
def test_kernels_come_channels_last_out_of_the_order_of_their_file(
    tmp_path: Path, ram: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of those of which one output is larger than a chunk; whatever bits they hold."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 1 << 10)
    noise = torch.Generator().manual_seed(0)
    shapes = {"one": (1, 60, 7, 7), "many": (33, 40, 3, 3), "tall": (5, 1, 30, 30), "small": (2, 3, 3, 3)}
    bits = {
        name: torch.randint(0, 256, (*shape, dtype.itemsize), generator=noise, dtype=torch.uint8)
        for name, shape in shapes.items()
    }
    save_file({name: data.view(dtype).squeeze(-1) for name, data in bits.items()}, tmp_path / "kernels.safetensors")
    kernels = {name: nn.Parameter(data, False) for name, data in load_file(tmp_path / "kernels.safetensors").items()}
    for kernel in kernels.values():
        lay_last(kernel)
    host_weights = host_weights_of(kernels.values(), ram, CPU)
    assert (host_weights.mapped_bytes, host_weights.pinned_bytes)[ram > 0] >= _nbytes(kernels)
    for name, kernel in kernels.items():
        assert kernel.data.is_contiguous(memory_format=torch.channels_last) or _in_file(kernel.data)
        target = torch.zeros_like(kernel.data, memory_format=torch.channels_last)
        host_weights.copy_to(kernel.data, target)
        assert same_bits(target.contiguous(), bits[name].view(dtype).squeeze(-1))
    host_weights.undo()
    assert all(map(_in_file, kernels.values()))


@pytest.mark.parametrize("ram", [0, 1 << 30])
def test_what_is_fused_meanwhile_stays(mapped: dict[str, Tensor], ram: int) -> None:
    weight = nn.Parameter(mapped["large"], requires_grad=False)
    wanted = weight.detach() + 1
    host_weights = host_weights_of([weight], ram, CPU)
    weight.data += 1
    target = torch.zeros_like(weight)
    host_weights.copy_to(weight.data, target)
    assert torch.equal(target, wanted)
    host_weights.undo()
    assert torch.equal(weight, wanted)


def test_other_contents_are_copied_too(mapped: dict[str, Tensor]) -> None:
    weight = nn.Parameter(mapped["large"], requires_grad=False)
    host_weights = host_weights_of([weight], 0, CPU)
    weight.data = torch.full_like(weight, 3)
    target = torch.zeros_like(weight)
    host_weights.copy_to(weight.data, target)
    assert torch.equal(target, weight)


def test_works_inside_inference_mode(mapped: dict[str, Tensor]) -> None:
    with torch.inference_mode():
        host_weights = host_weights_of(mapped.values(), 0, CPU)
        target = torch.zeros_like(mapped["large"])
        host_weights.copy_to(mapped["large"].data, target)
    assert torch.equal(target, mapped["large"])


def test_mapped_bytes_of_modules(mapped: dict[str, Tensor]) -> None:
    layer = nn.Linear(4096, 1300, bias=True)
    assert mapped_bytes(layer) == 0
    layer.weight = nn.Parameter(mapped["large"], requires_grad=False)
    assert mapped_bytes(layer) == mapped["large"].nbytes
    with torch.device("meta"):
        assert mapped_bytes(nn.Linear(10, 10)) == 440


def _read_from_disk() -> int:
    """Bytes that this process has had read from a disk so far."""
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="utf-8").splitlines())
    return int(told["read_bytes"])


@pytest.mark.skipif(not can_read_past_cache(), reason="the system does not tell")
def test_each_byte_is_read_as_seldom_as_possible(tmp_path: Path) -> None:
    """Weights in turn, more than the budget: what it holds is read once, the rest once a step, and none is cached."""
    made = {str(number): torch.randn(1 << 20) for number in range(12)}
    save_file(made, tmp_path / "weights.safetensors")
    file = os.open(tmp_path / "weights.safetensors", os.O_RDWR)
    os.fsync(file)
    mapped = load_file(tmp_path / "weights.safetensors")
    host_weights = host_weights_of(mapped.values(), RING_BYTES + 25 * MIB, CPU)
    assert (host_weights.pinned_bytes, host_weights.mapped_bytes, host_weights.disk_bytes) == (
        24 * MIB,
        24 * MIB,
        24 * MIB,
    )
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    for _ in range(3):
        before = _read_from_disk()
        for name, tensor in mapped.items():
            target = torch.empty_like(tensor)
            host_weights.copy_to(tensor.data, target)
            assert torch.equal(target, made[name])
        read = _read_from_disk() - before
        if read == 0:
            pytest.skip("this file system reads from no disk")
        assert 23 * MIB <= read <= 25 * MIB  # pages that two weights share may stay
    host_weights.undo()
    os.close(file)


@pytest.mark.skipif(not can_read_past_cache(), reason="the system does not tell")
def test_what_fits_into_the_cache_is_left_to_it(mapped: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "PINNED_SHARE", 0.0)
    host_weights = host_weights_of(mapped.values(), RING_BYTES + 16 * MIB, CPU)
    assert (host_weights.mapped_bytes, host_weights.disk_bytes) == (_nbytes(mapped), 0)


@pytest.mark.skipif(not can_read_past_cache(), reason="the system does not tell")
def test_what_somebody_wrote_into_mapped_weights_is_what_is_copied(mapped: dict[str, Tensor]) -> None:
    """A LoRA that is fused into them changes memory, and not the file."""
    mapped["large"][700] += 1
    changed = mapped["large"].clone()
    host_weights = host_weights_of(mapped.values(), 0, CPU)
    assert host_weights.disk_bytes == _nbytes(mapped)
    target = torch.empty_like(mapped["large"])
    host_weights.copy_to(mapped["large"].data, target)
    assert torch.equal(target, changed)


@pytest.mark.skipif(not can_read_past_cache(), reason="the system does not tell")
def test_a_file_that_was_replaced_is_not_read(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        save_file({"weight": torch.full((1 << 20,), value)}, tmp_path / f"{value}.safetensors")
    mapped = load_file(tmp_path / "1.0.safetensors")
    host_weights = host_weights_of(mapped.values(), 0, CPU)
    os.replace(tmp_path / "2.0.safetensors", tmp_path / "1.0.safetensors")
    target = torch.empty(1 << 20)
    host_weights.copy_to(mapped["weight"].data, target)
    assert target.eq(1.0).all()
