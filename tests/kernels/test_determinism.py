"""The probe: our own backends repeat their bits, one that does not is caught, and none such is ever promised."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sd_lowvram import Settings
from sd_lowvram.errors import SettingsError
from sd_lowvram.kernels.attention import determinism
from sd_lowvram.kernels.attention import registry as attention
from sd_lowvram.kernels.attention.backend import AttentionBackend
from sd_lowvram.kernels.attention.bounded import attend_sliced
from sd_lowvram.kernels.attention.choice import choose_backend
from sd_lowvram.kernels.attention.determinism import examine, probe, repeats

CPU = torch.device("cpu")


@pytest.fixture
def forgetful():
    """No proof from another test, and none left for another."""
    determinism._examine.cache_clear()
    yield
    determinism._examine.cache_clear()


def planted(when):
    """A backend that is off by one bit in one element of its ``when``-th call."""
    calls = itertools.count(1)

    def backend(q, k, v, mask=None, scale=None, **options):
        out = attend_sliced(q, k, v, mask, scale, **options)
        if next(calls) == when:
            out[0, 0, -1, -1] = torch.nextafter(out[0, 0, -1, -1], torch.tensor(9.0))
        return out

    return backend


def test_our_backends_repeat_their_bits_on_this_machine():
    proofs = probe(CPU)
    assert set(proofs) == set(attention.BACKENDS)
    for name in ("fused-softmax", "sliced", "sdpa"):
        assert proofs[name].deterministic is True and proofs[name].runs == 20
    for name in ("efficient", "xformers"):
        assert proofs[name].deterministic is None and proofs[name].reason


@pytest.mark.parametrize("when", [2, 20, 33, 80])
def test_one_bit_in_one_run_of_any_shape_is_seen(when):
    proof = examine("planted", planted(when), CPU)
    assert proof.deterministic is False
    assert f"run {(when - 1) % 20 + 1} of" in proof.reason
    assert examine("planted", planted(999), CPU).deterministic is True


def test_nan_equals_itself_and_minus_zero_does_not():
    def nan(q, k, v, **options):
        return torch.full_like(q, float("nan"))

    signs = itertools.cycle([0.0, -0.0])

    def zeros(q, k, v, **options):
        return torch.full_like(q, next(signs))

    assert examine("nan", nan, CPU, runs=2).deterministic is True
    assert examine("zeros", zeros, CPU, runs=2).deterministic is False


def test_only_what_is_proved_is_promised(monkeypatch, forgetful):
    monkeypatch.setitem(attention.BACKENDS, "sdpa", AttentionBackend(planted(2)))
    assert not repeats("sdpa", CPU)
    assert choose_backend(Settings(deterministic=True), CPU) == "fused-softmax"
    assert choose_backend(Settings(deterministic=True, attention="sliced"), CPU) == "sliced"
    with pytest.raises(SettingsError, match=r"attention='sdpa' .*fused-softmax, sliced"):
        choose_backend(Settings(deterministic=True, attention="sdpa"), CPU)
    assert choose_backend(Settings(attention="sdpa"), CPU) == "sdpa"


def test_the_fastest_proved_one_is_taken():
    assert choose_backend(Settings(deterministic=True), CPU) == "sdpa"


def test_the_machine_is_asked_once(monkeypatch, forgetful):
    calls = []
    counted = AttentionBackend(lambda *args, **options: calls.append(1) or attend_sliced(*args))
    monkeypatch.setitem(attention.BACKENDS, "sliced", counted)
    assert repeats("sliced", CPU)
    once = len(calls)
    assert repeats("sliced", torch.device("cpu")) and len(calls) == once == 4 * 20


def test_the_probe_sees_numbers_whatever_mode_the_caller_is_in(forgetful):
    with FakeTensorMode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert repeats("sliced", CPU)
        proof = examine("planted", planted(5), CPU)
    assert proof.deterministic is False


@pytest.mark.gpu
def test_on_a_gpu():
    proofs = probe(torch.device("cuda"))
    assert proofs["fused-softmax"].deterministic and proofs["sliced"].deterministic
