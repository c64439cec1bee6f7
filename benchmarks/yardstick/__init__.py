"""Measures this project beside the others of its field; ``make yardstick`` runs it.

``sections/`` says what is measured, ``systems.py`` on whom; what runs in a system's own interpreter
is in ``benchmarks/adapters/``. Figures go into a record (``record.py``), of which ``report.py`` and
``plots.py`` make the page in ``docs/benchmarks/``, and with which ``check.py`` compares later runs.
"""
