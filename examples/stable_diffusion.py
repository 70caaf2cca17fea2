"""The Stable Diffusion pipelines of diffusers, compiled: text encoders, UNet and decoder are one executable each.

    pip install 'dynaxla[examples]'
    python examples/stable_diffusion.py                     # two small pipelines with random weights, 20 steps
    python examples/stable_diffusion.py --model PATH        # or your own, from a folder or a hub

The pipeline is diffusers' own, unchanged: its loop, the progress bar, the callback after each step and the scheduler, which
reads numbers out of tensors (`item()`, `nonzero()`) and runs in eager between two executables.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import dynaxla

LETTERS = "abcdefghijklmnopqrstuvwxyz ,."
PROMPT, NEGATIVE = "a lighthouse by the sea, in the evening", "rain"


def tokenizer() -> Any:
    """One token a letter, 48 of them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<start>", "<end>", *LETTERS]
    letters = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=letters,
        model_max_length=48,
        pad_token="<pad>",
        unk_token="<pad>",
        bos_token="<start>",
        eos_token="<end>",
    )


def text_encoder(projected: bool = False) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=3 + len(LETTERS),
        hidden_size=32,
        intermediate_size=64,
        projection_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=48,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return (CLIPTextModelWithProjection if projected else CLIPTextModel)(config)


def decoder() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=32,
    )


def unet(large: bool) -> Any:
    """A small UNet; `large` has the shape of SDXL's, which reads two texts' features and the image's sizes too."""
    from diffusers import UNet2DConditionModel

    more: dict[str, Any] = {}
    if large:
        more = {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 6 * 8 + 32,
            "transformer_layers_per_block": (1, 2),
            "use_linear_projection": True,
        }
    return UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=64 if large else 32,
        attention_head_dim=4,
        norm_num_groups=8,
        **more,
    )


def scheduler() -> Any:
    from diffusers import DPMSolverMultistepScheduler

    return DPMSolverMultistepScheduler(steps_offset=1)


def small() -> Any:
    """A Stable Diffusion pipeline with random weights, for images of 32 x 32."""
    from diffusers import StableDiffusionPipeline

    torch.manual_seed(0)
    return StableDiffusionPipeline(
        vae=decoder(),
        text_encoder=text_encoder(),
        tokenizer=tokenizer(),
        unet=unet(large=False),
        scheduler=scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def small_xl() -> Any:
    """The same in the shape of SDXL."""
    from diffusers import StableDiffusionXLPipeline

    torch.manual_seed(0)
    return StableDiffusionXLPipeline(
        vae=decoder(),
        text_encoder=text_encoder(),
        text_encoder_2=text_encoder(projected=True),
        tokenizer=tokenizer(),
        tokenizer_2=tokenizer(),
        unet=unet(large=True),
        scheduler=scheduler(),
    )


PIPELINES: dict[str, Callable[[], Any]] = {"stable diffusion": small, "stable diffusion xl": small_xl}


def compile_parts(pipeline: Any) -> None:
    """Compiles the networks of a pipeline, in place."""
    for name in ("text_encoder", "text_encoder_2", "unet"):
        if getattr(pipeline, name, None) is not None:
            setattr(pipeline, name, torch.compile(getattr(pipeline, name), backend="dynaxla"))
    pipeline.vae.decode = torch.compile(pipeline.vae.decode, backend="dynaxla")


def draw(pipeline: Any, steps: int) -> tuple[np.ndarray, list[int]]:
    """An image, [1, height, width, 3] in 0..1, and the steps that the callback was told of."""
    told: list[int] = []

    def note(pipeline: Any, step: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        told.append(step)
        return tensors

    made = pipeline(
        PROMPT,
        negative_prompt=NEGATIVE,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(7),
        callback_on_step_end=note,
        output_type="np",
    )
    return made.images, told


def compare(title: str, make: Callable[[], Any], steps: int) -> float:
    """Draws in eager, compiled, and compiled again; prints and gives the largest difference of the images."""
    pipeline = make()
    eager, _ = draw(pipeline, steps)
    compile_parts(pipeline)
    before = dynaxla.read_metrics()
    draw(pipeline, steps)
    first = dynaxla.read_metrics()
    started = time.perf_counter()
    image, told = draw(pipeline, steps)
    seconds = time.perf_counter() - started
    assert told == list(range(steps)), "every step is told to the callback"
    again = dynaxla.read_metrics().compiles - first.compiles
    difference = float(np.abs(image - eager).max())
    print(
        f"{title}: {first.compiles - before.compiles} executables of {first.graphs - before.graphs} graphs, {again} more for "
        f"another image; {seconds:.2f} s for {steps} steps; largest difference from eager {difference:.1e}"
    )
    return difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", help="of a pipeline that diffusers loads; default: two with random weights")
    given = parser.parse_args()
    chosen = PIPELINES
    if given.model:
        from diffusers import DiffusionPipeline

        chosen = {given.model: lambda: DiffusionPipeline.from_pretrained(given.model)}
    for title, make in chosen.items():
        compare(title, make, given.steps)


if __name__ == "__main__":
    main()
