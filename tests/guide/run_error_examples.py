"""Runs the examples of docs/errors.md in one process and prints, as JSON, the id of what each raised."""

from __future__ import annotations

import json
from typing import Any

from docs.error_examples import EXAMPLES, SETUP
from dynaxla.errors import UnsupportedError


def run_example(code: str) -> str:
    """The id of the error that the code raises; what else came of it if there is none."""
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(SETUP, namespace)
    try:
        exec(code, namespace)
    except UnsupportedError as error:
        return " ".join([error.id, *(reason.id.value for reason in error.reasons)])
    except Exception as error:
        return str(getattr(error, "id", f"{type(error).__name__}: {error}"))
    return "nothing was raised"


if __name__ == "__main__":
    found = {name: run_example(example.code) for name, example in EXAMPLES.items() if not example.processes}
    print(json.dumps(found))
