"""One example for each error: code that raises it, and what to do. docs/errors.md shows them, tests/guide/test_errors_page.py runs
them.

Each runs in a namespace in which `SETUP` has run; a script runs in processes of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

SETUP = """\
import time
import torch, dynaxla
from dynaxla.options import Limits

class Model(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).relu()

model, x = Model(4, 4).eval(), torch.randn(3, 4)
"""

_LOWERING = """\
from dynaxla.lowering.lowering_worker import LoweringWorker
"""
_COMPILING = """\
from dynaxla.isolation.failures import KnownFailures
from dynaxla.runtime.compile_worker import CompileWorker
"""
_SERVING = """\
from dynaxla.serving import Server, Settings
"""
_PROCESSES = """\
import torch, torch.distributed as dist
import dynaxla

dynaxla.use("cpu")
dist.init_process_group("dynaxla")
"""
_PROFILE = """\
import jax, dynaxla

jax.devices()  # loads libtpu, which finds no TPU
with dynaxla.profile():
    pass
"""
_MESH = """\
import time
import torch, dynaxla

dynaxla.distributed.initialize()
dynaxla.use("cpu", devices=2)
mesh = dynaxla.make_mesh((4,), ("data",))
x = dynaxla.shard(torch.randn(8, 4), mesh, ("data",))  # each process draws its own numbers
for _ in range(400):
    (x * 2).sum().item()
    time.sleep(0.02)
"""
_ENGINE = """\
import math
import dynaxla
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from dynaxla.serving.llm.engine import LanguageEngine
from dynaxla.serving.llm.requests import SamplingParams
from dynaxla.serving.settings import EngineSettings

dynaxla.use("cpu")
small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=16, num_hidden_layers=1, max_position_embeddings=32, **small)).eval()
model.get_input_embeddings().weight.data[9] = math.nan
words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(16)}, unk_token="w0"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0")
settings = EngineSettings(slots=1, max_seq_len=16, rows=(1,), kv_lengths=(16,), prefill_chunks=((1, 4),), steps=1)
with LanguageEngine(model.to("dynaxla"), tokenizer, settings) as engine:
    engine.submit([5, 9, 7], SamplingParams(4, temperature=0)).result()
"""
_NOT_STARTED = """\
import sys, tempfile
from pathlib import Path

folder = tempfile.mkdtemp()
Path(folder, "enum.py").write_text("raise RuntimeError('another module of this name')")
sys.path.insert(0, folder)
"""


@dataclass(frozen=True, slots=True)
class ErrorExample:
    """How an error comes about.

    Attributes:
        code: raises the error.
        advice: what to do about it.
        processes: that run the code as a script; 0: it runs in the process of the others.
        reason: the fault's id where the error comes as a reason of DX200.
    """

    code: str
    advice: str
    processes: int = 0
    reason: str = ""


EXAMPLES: Mapping[str, ErrorExample] = MappingProxyType(
    {
        "DX100": ErrorExample(
            'torch.compile(model, backend="dynaxla", options={"bucketing": "on"})(x)',
            "Read the hint: it names the nearest option, or the values that there are. README.md has the table of options.",
        ),
        "DX110": ErrorExample(
            "from dynaxla.versions import check_versions, installed_versions\n\n"
            'check_versions(installed_versions() | {"torch": "2.12.1"})',
            "The hint is the `pip install` that mends it. The check runs when the backend is first used.",
        ),
        "DX120": ErrorExample(
            'torch.compile(model, backend="dynaxla", options={"target": "nowhere"})(x)',
            "Compare with docs/targets.md; install the extra of the platform (`tpu`, `cuda12`, `cuda13`), or leave the option out.",
        ),
        "DX130": ErrorExample(
            'dynaxla.mark_bucketed(x, 0, min=2, max=8, above="error")\n'
            'compiled = torch.compile(model, backend="dynaxla")\n'
            "compiled(x)\n"
            "compiled(torch.randn(9, 4))",
            'Raise the maximum that is declared, or write `above="exact"`: then a larger size is compiled by itself.',
        ),
        "DX140": ErrorExample(
            'compiled = torch.compile(Model(4, 2), backend="dynaxla")\ncompiled(x)\ndynaxla.freeze(compiled)\n'
            "compiled(torch.randn(3, 4, dtype=torch.float64))",
            'Warm up with such calls before `dynaxla.freeze` (`dynaxla.warmup`), or freeze with another `on_miss`: "eager", '
            '"next_bucket", "background".',
        ),
        "DX150": ErrorExample(
            "import multiprocessing\n\n"
            'dynaxla.use("cpu")\nheld = torch.ones(2, device="dynaxla")\n'
            'with multiprocessing.get_context("fork").Pool(1) as pool:\n'
            '    pool.apply(torch.ones, (2,), {"device": "dynaxla"})',
            'Start processes by `"spawn"` or `"forkserver"`, or fork before the device is first used. Host tensors and compiled '
            "graphs of them work in forked children.",
        ),
        "DX160": ErrorExample(
            'dynaxla.use("cpu")\nmesh = dynaxla.make_mesh((1024,), ("data",))',
            "The text names the dim or the axis that does not fit: choose another shape of the mesh, or another spec.",
        ),
        "DX170": ErrorExample(
            "def branch(x):\n    return x * 2 if x.sum().item() > 0 else x\n\n"
            'dynaxla.compile_for_target(branch, (x,), target="cpu")',
            "The line named asks for a value of a tensor, and there is none without the device: keep the value in a tensor "
            "(`torch.where`), or leave that line out of what is compiled.",
        ),
        "DX180": ErrorExample(
            _PROFILE,
            "Start the process with `JAX_PLATFORMS=cpu`, so that JAX loads no libtpu where there is no TPU: XLA's profiler would "
            "end the process. `torch.profiler` shows the host alone there.",
            processes=1,
        ),
        "DX200": ErrorExample(
            '@torch.library.custom_op("guide::double", mutates_args=())\n'
            "def double(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\n\n"
            "double.register_fake(torch.empty_like)\n"
            'torch.compile(lambda x: double(x) + 1, backend="dynaxla", options={"fallback": "error"})(x)',
            'Each reason has the op, its line and a hint. Leave `"fallback": "error"` out to run these ops in eager, or give an '
            "operator of your own a lowering (docs/kernels.md).",
        ),
        "DX301": ErrorExample(
            _LOWERING + 'LoweringWorker().lower(b"not a module", "1.9.0", Limits(60, 8 << 30))',
            "Nothing: the op is compiled by its JAX body, or runs in eager with the reason `lowering_failed`. Please report it "
            "with the repro script that the log names.",
        ),
        "DX302": ErrorExample(
            _LOWERING + 'LoweringWorker(inject_faults=True).lower(b"", "fault:abort", Limits(60, 8 << 30))',
            "Nothing: the process that died was a child. The call that it died of is remembered in the cache folder, and "
            "compiled otherwise from then on. Please report the repro script.",
        ),
        "DX303": ErrorExample(
            _LOWERING + 'LoweringWorker(inject_faults=True).lower(b"", "fault:sleep", Limits(0.3, 8 << 30))',
            'On a slow or busy machine: `options={"lowering_timeout_s": 600}`. Until then the op runs otherwise.',
        ),
        "DX304": ErrorExample(
            _LOWERING + 'LoweringWorker().lower(b"", "1.9.0", Limits(60, 1 << 20))',
            'If the machine has the memory: `options={"compiler_memory_bytes": 32 << 30}`.',
        ),
        "DX305": ErrorExample(
            _NOT_STARTED + "try:\n    " + _LOWERING.strip() + "\n\n"
            '    LoweringWorker().lower(b"", "1.9.0", Limits(60, 8 << 30))\nfinally:\n    sys.path.remove(folder)',
            "The child runs the same Python with the same `sys.path`: its last line of output says which module is shadowed. If it was "
            "ended by SIGKILL twice, the system is short of memory; nothing is remembered of the call, and the next process tries "
            "it again.",
        ),
        "DX310": ErrorExample(
            '@torch.library.custom_op("guide::halve", mutates_args=())\n'
            "def halve(x: torch.Tensor) -> torch.Tensor:\n    return x / 2\n\n"
            "halve.register_fake(torch.empty_like)\n"
            "dynaxla.register_lowering(torch.ops.guide.halve.default, lambda x: x[0])\n"
            'torch.compile(lambda x: halve(x), backend="dynaxla", options={"fallback": "error"})(x)',
            "A lowering of yours gives other results than the operator's fake kernel says: make both agree. Under the default, "
            '`"fallback": "eager"`, the operator\'s own kernel runs.',
            reason="link_failed",
        ),
        "DX320": ErrorExample(
            _COMPILING + 'CompileWorker(KnownFailures()).compile(b"not a module", Limits(60, 8 << 30))',
            "Nothing: the op that XLA rejects is found by bisection and runs in eager, the others are compiled. Please report "
            "the repro script. On an accelerator it may say that the program does not fit its memory: use smaller batches.",
        ),
        "DX321": ErrorExample(
            _COMPILING + "CompileWorker(KnownFailures(), inject_faults=True).compile("
            'b"fault:abort", Limits(60, 8 << 30))',
            "Nothing: a child process died. The program is remembered, and the op that XLA dies of runs in eager.",
        ),
        "DX322": ErrorExample(
            _COMPILING + "CompileWorker(KnownFailures(), inject_faults=True).compile("
            'b"fault:sleep", Limits(0.3, 8 << 30))',
            'Programs of many layers take minutes on a busy machine: `options={"compile_timeout_s": 3600}`, or compile a layer '
            "once, as a `nested_compile_region`.",
        ),
        "DX323": ErrorExample(
            _COMPILING + "CompileWorker(KnownFailures(), inject_faults=True).compile("
            'b"fault:allocate", Limits(60, 8 << 30))',
            'If the machine has the memory: `options={"compiler_memory_bytes": 32 << 30}`.',
        ),
        "DX324": ErrorExample(
            _NOT_STARTED
            + "try:\n    "
            + _COMPILING.strip().replace("\n", "\n    ")
            + '\n\n    CompileWorker(KnownFailures()).compile(b"", Limits(60, 8 << 30))\nfinally:\n    sys.path.remove(folder)',
            "As DX305. If it says that no memory mappings are left: raise `vm.max_map_count`, or keep fewer executables "
            "(`max_executables`).",
        ),
        "DX400": ErrorExample(
            "from dynaxla.device.storage import storage_of\n\n"
            'dynaxla.use("cpu")\nlost = torch.ones(3, device="dynaxla")\n'
            "storage_of(lost).buffer.delete()  # as a run does that takes the buffer and fails\n"
            "lost.cpu()",
            "The text names the op that failed, and the line that called it; a value that a failed run wrote is lost. Out of "
            "memory: use smaller batches. Two threads: do not read a tensor while a graph that writes it runs.",
        ),
        "DX410": ErrorExample(
            'options = {"verify": 1.0, "verify_action": "raise", "value_checks": False}\n'
            'checked = torch.compile(lambda x, rows: x[rows] + 1, backend="dynaxla", options=options)\n'
            "checked(x, torch.tensor([9]))  # out of range: eager raises, a program that checks no values gives some row",
            "The text names the op from which on results differ. Is it an index out of range, correct the caller; else please "
            "report it.",
        ),
        "DX420": ErrorExample(
            "dynaxla.compare(lambda x: x, lambda x: (x, x), x)",
            "Compare functions that return the same structures, dtypes and shapes.",
        ),
        "DX500": ErrorExample(
            "example = torch.randn(4, 4)\ndynaxla.mark_bucketed(example, 0, policy=dynaxla.Exact(), min=2, max=9)\n"
            'saved = torch.compile(Model(4, 4), backend="dynaxla", fullgraph=True, options={"max_executables": 3})\n'
            "with torch.no_grad():\n    saved.forward.aot_compile(((example,), {}))",
            "The text says what keeps the function from being saved, or the file from being loaded: other versions, another "
            "processor, a damaged file. Save it again there.",
        ),
        "DX600": ErrorExample(
            'import torch.distributed as dist\n\ndynaxla.use("cpu")\ntorch.ones(2, device="dynaxla")\n'
            'dist.init_process_group("dynaxla", rank=0, world_size=1, store=dist.HashStore())',
            "Call `init_process_group` right behind `dynaxla.use()`, before the first tensor of the device is made.",
        ),
        "DX610": ErrorExample(
            _PROCESSES + 'x = torch.ones(4, device="dynaxla")\n'
            "if dist.get_rank() == 0:\n    dist.all_reduce(x)  # the other process ends without it\n    print(x)",
            "Look at the lost process's own output: it may have been killed, run out of memory or raised. Then start all "
            "processes again; torchrun does that.",
            processes=2,
        ),
        "DX620": ErrorExample(
            _PROCESSES + 'x = torch.ones(4 + dist.get_rank(), device="dynaxla")  # the sizes differ\n'
            "dist.all_reduce(x)\nprint(x)",
            "The text names both programs: let all processes run the same ones, of the same sizes, in the same order.",
            processes=2,
        ),
        "DX630": ErrorExample(
            _MESH,
            "Give all processes the same values: `torch.manual_seed` with one number in all of them before weights and inputs are "
            "drawn, and numbers that do not depend on the rank.",
            processes=2,
        ),
        "DX710": ErrorExample(
            _SERVING + "with Server(lambda texts: texts, len, Settings(max_size=8, min_size=2)) as server:\n"
            '    server.submit("x")',
            "The request can never be served: correct it.",
        ),
        "DX711": ErrorExample(
            _SERVING
            + 'with Server(lambda texts: texts, len, Settings(max_size=8)) as server:\n    server.submit("x" * 9)',
            "Send less, or split it; the server's settings have the largest size (`max_size`).",
        ),
        "DX720": ErrorExample(
            _SERVING + "slow = lambda texts: time.sleep(0.3) or texts\n"
            "with Server(slow, len, Settings(max_size=8, max_batch=1, max_queue=2)) as server:\n"
            '    for _ in range(9):\n        server.submit("x")',
            "Send it again after `retry_after_s` seconds. If it happens often, the load needs more servers.",
        ),
        "DX730": ErrorExample(
            _SERVING + "slow = lambda texts: time.sleep(0.3) or texts\n"
            "with Server(slow, len, Settings(max_size=8, max_batch=1)) as server:\n"
            '    requests = [server.submit("x", deadline_s=0.1) for _ in range(3)]\n    [each.result() for each in requests]',
            "Give requests more time, send fewer at once, or more servers.",
        ),
        "DX740": ErrorExample(
            _SERVING + 'server = Server(lambda texts: texts, len, Settings(max_size=8))\nserver.submit("x")',
            "Wait until `/ready` says 200 (the programs are compiled then); while it drains, ask another server.",
        ),
        "DX750": ErrorExample(
            _ENGINE,
            "A language model's engine gives it to the one request whose logits are NaN; others go on. Look at the weights, and "
            "at dtypes that overflow (`--dtype float16`).",
            processes=1,
        ),
    }
)
"""By the error's id. DX000, DX300 and DX700 are classes of others, and never raised themselves. DX180 is raised where
libtpu is installed and no TPU is."""
