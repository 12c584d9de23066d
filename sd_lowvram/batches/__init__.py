"""Batches: jobs from a file, recorded in a journal, painted by one worker or many, with progress and a summary.

``jobs.py`` reads and checks the file, by the declarations of ``generate``'s options. ``journal.py`` records the state
of each job, and is rebuilt from the pictures (``marks.py``) if it is lost. ``driver.py`` gives jobs to a crew
(``crew.py``: this process, ``processes.py``: one per GPU, ``over_ray.py``: Ray actors). In each worker a ``Painter``
(``painter.py``) holds its model and its plan. The pictures return to this one process, which writes them and the
journal. ``alike.py`` counts the pictures that one plan makes; the latents of a running job are in the batch's folder
(``latents.py``).
"""
