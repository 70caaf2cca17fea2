"""What can be measured again. Every program is compiled: nothing is taken from the disk, and nothing left there."""

import os

from dynaxla.isolation.disk import CACHE_VARIABLE, OFF

os.environ.setdefault(CACHE_VARIABLE, OFF)
