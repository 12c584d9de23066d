"""Latents of a run on their way, kept in a file from which the run goes on with the same bits.

``commands/paint.py`` runs its pipeline within ``kept`` (``keeping.py``), which looks at each step, writes what a
run needs to go on (``file.py``, ``state.py``; of the job: ``commands/latents.py``), and passes over the steps that
are done when it goes on. ``sd_lowvram.resumable`` (``resumable.py``) does so for a call in Python, whose arguments,
models and first call of the denoiser are compared with the file's by digests (``same_call.py``). What a host saves
before its decode (``hosted.py``) is decoded, and no more (``commands/decode_saved.py``).
"""
