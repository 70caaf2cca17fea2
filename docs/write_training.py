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
probability of dropping something is zero. {STEPS} steps of AdamW (learning rate {LEARNING_RATE:g}, epsilon {EPSILON:g}) run in
eager; compiled ones are tested in tests/training/test_optimizers.py and, after compiled networks, in
tests/training/test_training_zoo.py.

- Differences are max|a - b| / max|b| of a tensor, b being eager's; the table has the largest of all tensors. "correct" is
  {LIMIT:g} or less in each column: the loss of every step, every gradient of the first step, every parameter and buffer (the
  statistics of batch norms among them) after the last. Where eager has no gradient, there must be none.
- "noise" is eager's own: the same of its gradients in float32 against its gradients in float64 (nan: an op does not take
  float64).
- "zero" counts gradients that are zero but for rounding (largest element at most {NOTHING:g} of the largest of all
  gradients), such as that of a key's bias, which a softmax does not see. There the compiled gradient must be zero in the
  same sense. AdamW divides a gradient by its own size plus epsilon: with torch's epsilon of 1e-8 such a parameter is
  moved as far as any other, in a direction that is chance, in eager too. Hence the larger epsilon, Llama 2's.
- "programs" are the executables of all steps: one forward and one backward, where Dynamo does not cut the model.
"""
_EXPLAINED: Mapping[str, str] = MappingProxyType(
    {
        "llava": "nothing is used of the vision tower's last layer, for which eager gives no gradients, and torch.compile "
        "zeros, where a graph break cuts the model behind the tower; with torch's own backend aot_eager, too",
    }
)
_SENSITIVE = """\
"sensitive": many batch norms and ReLU6 in a row, without residuals or with few, over a small batch. An activation that lies
within a rounding of a kink has one slope or the other: eager itself, from weights that are off by one rounding each, differs
as much from eager. In float64, where no activation is as near to a kink, compiled and eager agree."""
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
        "Left out:"
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
