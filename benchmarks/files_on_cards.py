"""Plan files in GGUF, fp8, int8 and bf16 from headers of full size: MODELS TYPES FOLDER. Ran once."""
import json, os, struct, sys, time
from pathlib import Path
import torch, gguf
import numpy as np
from sd_lowvram.checkpoints import split_files
from sd_lowvram.checkpoints.architectures import build_components
from sd_lowvram.checkpoints.meta_model import meta_anatomy
from sd_lowvram.planning.as_others import request_by
from sd_lowvram.planning.search import make_plan
from sd_lowvram.settings import Settings
from sd_lowvram.errors import BudgetError
sys.path.insert(0,"tests/support")
import split_models
W=Path(sys.argv[3]); W.mkdir(exist_ok=True)
TOK=W/"tok"; TOK.mkdir(exist_ok=True); (TOK/"tokenizer.json").write_text("{}")
split_files.check_tokenizer_files=lambda *a: None
GB=10**9; GIB=2**30
def st(path, tensors, meta=None):
    head={"__metadata__":meta} if meta else {}; at=0
    for n,(d,s) in tensors.items():
        size={"BF16":2,"F8_E4M3":1,"I8":1,"F32":4}[d]*int(np.prod(s) if s else 1)
        if s==[0]: size=0
        head[n]={"dtype":d,"shape":s,"data_offsets":[at,at+size]}; at+=size
    b=json.dumps(head).encode(); b+=b" "*(-len(b)%8)
    with open(path,"wb") as f: f.write(struct.pack("<Q",len(b))+b); f.truncate(8+len(b)+at)
    return at
def big(n,t): return t.dim()==2 and "block" in n and t.shape[1]%256==0 or t.dim()==2 and n.startswith(("layers.","noise_refiner","context_refiner")) and t.shape[1]%256==0
def transformer(state, kind, path):
    if kind=="bf16": return st(path,{n:("BF16",list(t.shape)) for n,t in state.items()})
    if kind=="fp8 scaled":
        d={"scaled_fp8":("F8_E4M3",[0])}
        for n,t in state.items():
            d[n]=("F8_E4M3" if big(n,t) else "BF16",list(t.shape))
            if big(n,t): d[n[:-7]+".scale_weight"]=("F32",[])
        return st(path,d)
    if kind=="int8":
        d={};layers={}
        for n,t in state.items():
            d[n]=("I8" if big(n,t) else "BF16",list(t.shape))
            if big(n,t): d[n[:-7]+".weight_scale"]=("F32",[t.shape[0],1]); layers[n[:-7]]={"format":"int8_tensorwise"}
        return st(path,d,{"_quantization_metadata":json.dumps({"layers":layers})})
    q=getattr(gguf.GGMLQuantizationType,kind)
    w=gguf.GGUFWriter(str(path),"flux")
    total=0
    for n,t in state.items():
        typ=q if big(n,t) else gguf.GGMLQuantizationType.F32 if t.dim()==1 else gguf.GGMLQuantizationType.BF16
        bs,ts=gguf.GGML_QUANT_SIZES[typ]; nb=t.numel()//bs*ts; total+=nb
        w.add_tensor_info(n,[*t.shape[:-1],t.shape[-1]//bs*ts] if typ not in (gguf.GGMLQuantizationType.F32,) else list(t.shape), np.dtype(np.uint8) if typ!=gguf.GGMLQuantizationType.F32 else np.dtype(np.float32), nb, raw_dtype=typ if typ!=gguf.GGMLQuantizationType.F32 else None)
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_ti_data_to_file(); w.close()
    size=path.stat().st_size
    with open(path,"ab") as f: f.truncate(size+total+64*len(state)+4096)
    return total
TEXT8={"bf16":"BF16"}
out=json.loads((W/"out.json").read_text()) if (W/"out.json").exists() else {}
for model in sys.argv[1].split(","):
    comps=build_components(model,torch.bfloat16,"meta")
    tr={n:t for n,t in comps["transformer"].state_dict().items()}
    opts=[]
    for name,part in comps.items():
        if name.startswith("text_encoder"):
            state=split_models.text_file(part); small="CLIP" in type(part).__name__
            opts.append(W/f"{model}-{name}.safetensors")
            st(opts[-1],{n:("BF16" if small or t.dim()<2 or "embed" in n or "shared" in n else "F8_E4M3",list(t.shape)) for n,t in state.items()})
    vae=W/f"{model}-vae.safetensors"; st(vae,{n:("BF16",list(t.shape)) for n,t in split_models.vae_file(comps["vae"]).items()})
    for kind in sys.argv[2].split(","):
        path=W/(f"{model}-{kind}.{'gguf' if kind[0]=='Q' else 'safetensors'}".replace(" ","_"))
        size=transformer(tr,kind,path)
        try:
            folder=split_files.split_model(path,opts,vae,TOK)
            an=meta_anatomy(str(folder),torch.bfloat16)
        except Exception as e:
            print(model,kind,"FAILED",type(e).__name__,str(e)[:300],flush=True); continue
        for card,vram in (("rtx2060",5*GIB),("rtx4060",7*GIB)):
            for ram in (12*GIB,):
                s=time.time()
                try:
                    r=request_by("ours",an,gpu=card,vram=vram,ram=ram,width=1024,height=1024,steps=8)
                    p=make_plan(an,r,Settings())
                    d=next(x for x in p.stages if x.name=="denoise")
                    res=[round(size/GIB,2),round((p.predicted.reserved_bytes+p.predicted.overhead_bytes)/GIB,2),round(p.minimum_vram_bytes/GIB,2),round(p.predicted.host_bytes/GIB,2),round(d.seconds/8,2),round(d.slowdown,2),round(p.predicted.seconds,1)]
                except BudgetError as e: res=["refused",str(e)[:200]]
                out[f"{model}|{kind}|{card}|{ram//GIB}"]=res; (W/"out.json").write_text(json.dumps(out,indent=1))
                print(model,kind,card,ram//GIB,res,f"{time.time()-s:.0f}s",flush=True)
