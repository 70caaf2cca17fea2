"""Prints docs/training.md from the training sweep's results: `python -m docs.write_training > docs/training.md`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from conformance.sweep_record import Status
from conformance.training_record import NOT_TRAINED, SENSITIVE, Training, read_trainings
from tests.zoo.training import EPSILON, LEARNING_RATE, STEPS
from tests.zoo.training_check import LIMIT, NOTHING

_INTRODUCTION = f"""\
# Training over the zoo

Written by `python -m docs.write_training > docs/training.md` from the results of `python -m conformance.training_sweep`
(`conformance/results/training.tsv`). Do not edit.

Each architecture of tests/zoo is trained twice from the same weights, in float32 and in training mode: in eager, and with
network and loss compiled (`torch.compile(loss, backend="dynaxla")`). The batch and the targets are the same at every step:
classes where a model gives logits (cross entropy), numbers for any other output (mean square). Nothing is random: every
dropout probability is zero. The {STEPS} steps of AdamW (learning rate {LEARNING_RATE:g}, epsilon {EPSILON:g}) run in eager;
tests/training/test_optimizers.py tests compiled optimizers, and tests/training/test_training_zoo.py tests them after compiled
networks.

- The difference of a tensor is max|a - b| / max|b|, where b is eager's; the table has the largest over all tensors. "loss" is
  over all steps, "gradients" is of the first step, and "state" is of every parameter and buffer (the statistics of batch
  norms among them) after the last step. A model is correct if each of these is {LIMIT:g} or less. A parameter without a
  gradient in eager must have none when compiled.
- "noise" is eager's own rounding: the difference of its gradients in float32 from its gradients in float64 (nan: an op does
  not take float64).
- "parameters" is the number of tensors that are trained.
- "zero" counts gradients that are zero up to rounding: their largest element is at most {NOTHING:g} of the largest of all
  gradients. An example is that of a key's bias, on which a softmax does not depend. The compiled gradient must then be zero
  in the same sense. AdamW divides a gradient by its own size plus epsilon: with torch's epsilon of 1e-8 it moves such a
  parameter as far as any other, in a random direction, in eager too. Hence the larger epsilon, which is Llama 2's.
- "programs" is the number of executables of all steps: one forward and one backward, where Dynamo does not cut the model.
- "in eager" has the reason of each op that ran in eager, and of each graph break.
"""
_EXPLAINED: Mapping[str, str] = MappingProxyType(
    {
        "llava": "the model does not use the output of the vision tower's last layer. Eager gives that layer no gradients; "
        "torch.compile gives zeros, as a graph break cuts the model after the tower. torch's own backend aot_eager does too",
    }
)
_SENSITIVE = """\
"sensitive": the model has many batch norms and ReLU6 in a row, without residuals or with few, and the batch is small. If an
activation is within a rounding of a kink, rounding decides which slope it gets: eager, started from weights that each differ by
one rounding, differs as much from eager. In float64, where no activation is that near to a kink, compiled and eager agree."""
_HEADING = (
    "| architecture | loss | gradients | noise | state | parameters | zero | programs | in eager |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def write_training() -> str:
    """The whole text of docs/training.md."""
    trainings = list(read_trainings().values())
    return "\n".join([_INTRODUCTION, *_summary(trainings), *_table(trainings), *_not_correct(trainings)]) + "\n"


def _summary(trainings: Sequence[Training]) -> Iterator[str]:
    correct, whole = sum(x.is_correct for x in trainings), sum(x.is_whole for x in trainings)
    yield (
        f"Of {len(trainings)} architectures {correct} are correct, {whole} of these without any part in eager. "
        "Not trained:"
    )
    yield ""
    yield from (f"- {name}: {why}." for name, why in NOT_TRAINED.items())
    yield ""
    yield "| family | trained | correct | nothing in eager |"
    yield "|---|---|---|---|"
    for family in dict.fromkeys(x.family for x in trainings):
        members = [x for x in trainings if x.family == family]
        counts = (len(members), sum(x.is_correct for x in members), sum(x.is_whole for x in members))
        yield f"| {family} | {' | '.join(map(str, counts))} |"
    yield ""


def _table(trainings: Sequence[Training]) -> Iterator[str]:
    yield _HEADING
    for x in trainings:
        if x.status in (Status.CORRECT.value, Status.WRONG.value, SENSITIVE):
            numbers = (f"{value:.0e}" for value in (x.loss, x.gradients, x.noise, x.state))
            cells = (x.architecture, *numbers, str(x.parameters), str(x.zeros), str(x.executables), x.eager)
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _not_correct(trainings: Sequence[Training]) -> Iterator[str]:
    bad = [x for x in trainings if not x.is_correct]
    if not bad:
        return
    yield from ("", "Not correct:", "")
    for x in bad:
        yield f"- {x.architecture}, {x.status}: {_EXPLAINED.get(x.architecture, x.detail)}."
    if any(x.status == SENSITIVE for x in bad):
        yield from ("", _SENSITIVE)


if __name__ == "__main__":
    print(write_training(), end="")
