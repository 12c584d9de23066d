"""Many jobs: read from a file, kept in a journal, painted by one worker or many, told while they run and afterwards.

``jobs.py`` reads and checks the file, by the declarations of ``generate``'s options. ``journal.py`` keeps what
became of each job, and is made anew of the pictures (``marks.py``) where it is lost. ``driver.py`` gives jobs to a
crew (``crew.py``: this process, ``processes.py``: one a card, ``over_ray.py``: Ray actors), in each of which a
``Painter`` (``painter.py``) keeps its model and its plan; the pictures come back to this one process, which writes
them and the journal. ``alike.py`` counts the pictures that one plan makes; the latents of a job that is under way
lie in the batch's folder (``latents.py``).
"""
