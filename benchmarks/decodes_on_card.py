"""Two decodes in a row in exact strips at the least bytes, beside the resident decode: host and device ms, page locking,
and the functions that took the host's time. From the repository's root: python /path/decode_check.py [tiny]. At most 60 s."""
import contextlib, cProfile, io, pstats, sys, time, warnings

import torch

from sd_lowvram import Settings, attached
from sd_lowvram.checkpoints.architectures import architecture, build_components
from sd_lowvram.hooks import strips
from sd_lowvram.memory import pinned

tiny = "tiny" in sys.argv
gpu = torch.cuda.is_available() and not tiny
device = torch.device("cuda" if gpu else "cpu")
began = time.perf_counter()
locks = [0, 0, 0.0]
_lock = pinned._lock


def lock(address, size):
    start = time.perf_counter()
    try:
        return _lock(address, size)
    finally:
        locks[0] += 1
        locks[1] += size
        locks[2] += time.perf_counter() - start


pinned._lock = lock
with contextlib.suppress(Exception):  # the statistics as they were: a processor's operators
    from sd_lowvram.hooks.strips import is_on_cpu


def decode(vae, latents):
    locks[:] = [0, 0, 0.0]
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
    start = time.perf_counter()
    with torch.inference_mode():
        out = vae.decode(latents, return_dict=False)[0]
    host = time.perf_counter() - start
    if gpu:
        last.record()
        last.synchronize()
    took = first.elapsed_time(last) / 1e3 if gpu else host
    peak = torch.cuda.max_memory_allocated() >> 20 if gpu else 0
    return out.float().cpu(), (
        f"host {1e3 * host:7.0f} ms, device {1e3 * took:7.0f} ms, peak {peak} MiB, "
        f"locked {locks[0]} times, {locks[1] >> 20} MiB, {1e3 * locks[2]:.0f} ms"
    )


LEAST = dict(vae_tiles="exact", vae_map="parked", vae_strip_mib=4, offload="layer", inference_mode=True)
for model, side in (("sdxl", 1024), ("sd15", 2048)):
    side = 64 if tiny else side
    torch.manual_seed(0)
    vae = build_components(architecture(model), torch.float16 if gpu else torch.float32, str(device), only=("vae",))["vae"].eval()
    latents = torch.randn(1, 4, side // 8, side // 8, device=device, dtype=next(vae.parameters()).dtype)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with attached(vae, Settings(offload="none", inference_mode=True), device=device):
            for turn in range(3):
                plain, line = decode(vae, latents)
                print(f"{model} {side} resident, decode {turn + 1}: {line}", flush=True)
        vae.to("cpu")
        ways = {"torch's operators": (False, False), "fused kernels": (True, False), "fused, statistics as before": (True, True)}
        for name, (fused, before) in ways.items():
            if time.perf_counter() - began > 45:
                print("no time for", model, name)
                continue
            strips.is_on_cpu = (lambda _: True) if before else is_on_cpu
            with attached(vae, Settings(**LEAST, vae_fused_kernels=fused), device=device):
                for turn in range(2):
                    profile = cProfile.Profile() if name == "fused kernels" and turn else None
                    made, line = decode(vae, latents)
                    error = float((made - plain).norm() / plain.norm())
                    print(f"{model} {side} least, {name}, decode {turn + 1}: {line}, off by {error:.1e}", flush=True)
                if name == "fused kernels" and time.perf_counter() - began < 40:
                    profile = cProfile.Profile()
                    profile.runcall(decode, vae, latents)
                    text = io.StringIO()
                    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(28)
                    print("\n".join(line[:150] for line in text.getvalue().splitlines()[6:]), flush=True)
        for one in {str(w.message) for w in told}:
            print("warned:", one[:200])
    del vae
print(f"{time.perf_counter() - began:.0f} s", torch.cuda.get_device_name() if gpu else "cpu")
