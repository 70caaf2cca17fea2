"""`python -m dynaxla bench`: models on several backends, in turn in one process, checked before they are timed.

A case (`cases.py`) is what is measured: its ways to run, by name. `measure.py` runs it and gives a record (`records.py`), which
tables, pages and comparisons read. Models come from `workloads.py` and `backends.py`; benchmarks/ makes cases of its own.
"""
