"""BERT-base on a GPU, behind a Streamer and batched by hand; ``python benchmarks/gpu.py`` runs it.

``command.py`` runs the parts that ``plan.py`` lists, each measurement in a process of its own
(``running.py``): ``hand.py``, ``streamed.py``, ``exhausted.py`` and ``images.py`` are those, which
print records. ``report.py`` makes tables of them. Needs torch and transformers beside the standard
library, no network, and no installation of the package.
"""
