"""A child that answers with what it was asked, and ends when it is idle."""

from __future__ import annotations

import sys

from dynaxla.isolation.children import serve

IDLE_S = 0.05

if __name__ == "__main__":
    serve(sys.argv[1:], lambda request: request, IDLE_S)
