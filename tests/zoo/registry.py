"""Every architecture of the zoo, in one tuple."""

from __future__ import annotations

from tests.zoo import diffusion, multimodal, plain, speech, text, vision
from tests.zoo.architecture import Architecture

__all__ = ["ARCHITECTURES", "Architecture", "find"]

ARCHITECTURES: tuple[Architecture, ...] = (
    *text.ARCHITECTURES,
    *vision.ARCHITECTURES,
    *speech.ARCHITECTURES,
    *multimodal.ARCHITECTURES,
    *diffusion.ARCHITECTURES,
    *plain.ARCHITECTURES,
)


def find(name: str) -> Architecture:
    """The architecture of that name; KeyError where there is none."""
    for architecture in ARCHITECTURES:
        if architecture.name == name:
            return architecture
    raise KeyError(name)
