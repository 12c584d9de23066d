"""Saved latents: a file from which an interrupted run resumes with the same bits.

``commands/paint.py`` runs its pipeline within ``keep_latents`` (``keeping.py``), which writes the state of the run
after a step (``file.py``, ``state.py``; the job: ``commands/latents.py``) and skips finished steps when the run
resumes. ``sd_lowvram.resumable`` (``resumable.py``) does so for a call in Python; digests (``same_call.py``) of its
arguments, its models and the denoiser's first call are compared with the file's. Latents that a host saved before its
decode (``hosted.py``) are only decoded (``commands/decode_saved.py``).
"""
