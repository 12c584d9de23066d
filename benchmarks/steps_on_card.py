"""steps | decodes | profile: host and device time of our engine on a real card; JSON lines to the file given first."""
import cProfile, io, json, pstats, statistics, sys, time, gc
import torch
from benchmarks.models import embeddings, random_denoiser, random_pipeline, least_budget
from benchmarks.gpu import streaming as S
from benchmarks.gpu.peaks import held_on
from benchmarks.calls import timed_calls
from sd_lowvram import Settings, optimize, restore, plan
out, what = open(sys.argv[1], "a"), sys.argv[2:]
dev = torch.device("cuda", 0)
torch.zeros(1, device=dev)
from sd_lowvram.streaming.engine import Stream
from sd_lowvram.compat.private import tree_flatten, tree_unflatten

def stream_of(pipe):
    return next(s for s in gc.get_objects() if isinstance(s, Stream) and any(c is pipe.unet for c in s._components.values()) and s._layout.open)

class Recorded:
    def __init__(self, pipe):
        self.S, self.unet, self.before, self.graph = stream_of(pipe), pipe.unet, pipe.unet.forward, None
        pipe.unet.forward = self
    def off(self):
        self.unet.forward = self.before; self.graph = None
    def __call__(self, *args, **kwargs):
        leaves, spec = tree_flatten((args, kwargs))
        if self.graph is None: self.record(leaves, spec)
        for place, leaf in zip(self.inputs, leaves):
            if isinstance(leaf, torch.Tensor): place.copy_(leaf)
        self.graph.replay()
        return tree_unflatten([o.clone() if isinstance(o, torch.Tensor) else o for o in self.outs], self.ospec)
    def record(self, leaves, spec):
        S = self.S; C = S._copier
        self.inputs = [l.clone() if isinstance(l, torch.Tensor) else l for l in leaves]
        torch.cuda.synchronize()
        there = set(S._there)
        S._copied = {n: None for n in S._copied}; S._used.clear(); S._room_taken = None
        home, handle = C._home, getattr(C, "_handle", None)
        g = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(g, capture_error_mode="thread_local"):
            here = torch.cuda.current_stream()
            C._home, C._handle = here, here.cuda_stream
            C._stream.wait_stream(here)
            a, k = tree_unflatten(self.inputs, spec)
            self.outs, self.ospec = tree_flatten(self.before(*a, **k))
            here.wait_stream(C._stream)
        C._home, C._handle = home, handle
        assert S._there == there, (len(S._there ^ there), "the step does not end as it began")
        S._copied = {n: None for n in S._copied}; S._used.clear(); S._room_taken = None
        self.graph = g

def note(**row):
    out.write(json.dumps(row) + "\n"); out.flush()
    print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items() if k != "profile"}, flush=True)

def scheduler(pipe, name):
    import diffusers
    pipe.scheduler = getattr(diffusers, name).from_config(pipe.scheduler.config)

def profiled(pipe, given, side, steps=6):
    prof = cProfile.Profile(); prof.enable()
    S.denoise(pipe, given, side, steps); prof.disable(); torch.cuda.synchronize()
    s = io.StringIO(); pstats.Stats(prof, stream=s).sort_stats("tottime").print_stats(28)
    return s.getvalue()

def steps(model, sides, ways):
    pipe = random_denoiser(model, dev); given = embeddings(pipe, dev)
    from sd_lowvram.weights import weight_bytes
    weights = weight_bytes(pipe.unet)
    wanted = {}
    for side in sides:
        for way in ways:
            t = time.monotonic()
            kind, _, sched = way.partition(" ")
            scheduler(pipe, sched or "DDIMScheduler")
            fixed = {}
            if kind == "resident": pipe.to(dev)
            else:
                if kind == "graph": fixed = {"offload": "none", "cuda_graphs": True}
                elif kind == "none": fixed = {"offload": "none", "cuda_graphs": False}
                else: fixed = {"offload": "blocks", "weights_mib": max(1, weights * int(kind.removeprefix("rec")) // 100 >> 20), "cuda_graphs": False}
                optimize(pipe, vram="1000 TB", width=side, height=side, device=dev, settings=Settings(**fixed))
            setup = time.monotonic() - t
            lat = []
            S.denoise(pipe, given, side, 3, lat)
            rec = None
            if kind.startswith("rec"):
                torch.cuda.reset_peak_memory_stats(); rec = Recorded(pipe); S.denoise(pipe, given, side, 2, lat)
            if rec:
                times = S.denoise(pipe, given, side, 13, lat); f = {"host_seconds": 0.0, "device_seconds": 0.0}
            else:
                with timed_calls(pipe, dev, "unet") as calls:
                    times = S.denoise(pipe, given, side, 13, lat)
                f = calls.figures(statistics.median, first=3)
            key = side, sched, kind == "resident"
            same = bool(torch.equal(lat[-1].cpu(), wanted.setdefault(key, lat[-1].cpu())))
            if rec: rec.off()
            prof = profiled(pipe, given, side) if side == sides[-1] and kind in ("graph", "25") and not sched else None
            note(model=model, side=side, way=way, step_ms=statistics.median(times[3:]) * 1e3, host_ms=f["host_seconds"] * 1e3, device_ms=f["device_seconds"] * 1e3, same=same, peak_mib=torch.cuda.max_memory_allocated() >> 20, setup_s=setup, profile=prof)
            if prof: print(prof[:5200])
            if kind == "resident": torch.nn.Module.to(pipe.unet, "cpu")
            else: restore(pipe)
            gc.collect(); torch.cuda.empty_cache()

def decodes(model, side):
    pipe = random_pipeline(model, dev)
    lat = torch.randn(1, 4, side // 8, side // 8, device=dev, dtype=torch.float16)
    for kind in ("least", "resident"):
        t = time.monotonic()
        if kind == "least":
            from sd_lowvram.errors import BudgetError
            try: need = plan(pipe, vram="1 B", width=side, height=side, device=dev).minimum_vram_bytes
            except BudgetError as e: need = e.needed_bytes
            p = optimize(pipe, vram=f"{need} B", width=side, height=side, device=dev)
            said = {s.name: s.seconds for s in p.stages}; knobs = {k: str(v) for k, _, v in p.settings.decided()}
        else:
            torch.nn.Module.to(pipe.vae, dev); said, knobs = {}, {}
        setup = time.monotonic() - t
        torch.cuda.synchronize(); times, hosts = [], []
        for i in range(4):
            prof = cProfile.Profile() if kind == "least" and i == 2 else None
            torch.cuda.reset_peak_memory_stats(); t = time.perf_counter()
            if prof: prof.enable()
            with torch.no_grad(): pipe.vae.decode(lat.to(pipe.vae.dtype) if kind == "resident" else lat, return_dict=False)
            if prof: prof.disable()
            hosts.append(time.perf_counter() - t); torch.cuda.synchronize(); times.append(time.perf_counter() - t)
            if prof:
                s = io.StringIO(); pstats.Stats(prof, stream=s).sort_stats("tottime").print_stats(24); text = s.getvalue()
        note(model=model, side=side, way="decode " + kind, times=[round(x * 1e3) for x in times], hosts=[round(x * 1e3) for x in hosts], peak_mib=torch.cuda.max_memory_allocated() >> 20, said=said, knobs=knobs, setup_s=setup, profile=text if kind == "least" else None)
        if kind == "least": print(text[:4500]); restore(pipe)
        gc.collect(); torch.cuda.empty_cache()

for w in what:
    try:
        if w == "steps": steps("sd15", (512, 1024), ["resident", "none", "graph", "graph EulerDiscreteScheduler", "50", "25", "10"])
        elif w == "steps512": steps("sd15", (512,), ["resident", "graph", "graph EulerDiscreteScheduler"])
        elif w == "steps1024": steps("sd15", (1024,), ["resident", "graph", "graph EulerDiscreteScheduler", "50", "rec50", "25", "rec25", "10", "rec10"])
        elif w.startswith("some:"): _, m, sd, ways = w.split(":"); steps(m, (int(sd),), ways.split(","))
        elif w.startswith("decode:"): _, m, s = w.split(":"); decodes(m, int(s))
    except Exception as e:
        import traceback; traceback.print_exc(); note(way=w, error=f"{type(e).__name__}: {e}"[:300])
