"""Silences forked children of sweeps: only the parent prints."""

from __future__ import annotations

import logging
import os
import warnings


def be_quiet() -> None:
    """Nothing of this process is printed from now on: no output, no errors, no log, no warnings."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    logging.disable()
    warnings.simplefilter("ignore")
