"""Benchmarks that can be run again. They compile every program: nothing is loaded from a disk cache or left there."""

import os

from dynaxla.isolation.disk import CACHE_VARIABLE, OFF

os.environ.setdefault(CACHE_VARIABLE, OFF)
