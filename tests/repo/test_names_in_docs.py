"""The pages mention only files, commands, options, environment variables and names that exist."""

from __future__ import annotations

import dataclasses
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from dynaxla.ops.table import core_table
from dynaxla.options import Options

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("dynaxla", "tests", "conformance", "benchmarks", "examples", "docs")
BLOCK = re.compile(r"```.*?```", re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
PATH = re.compile(r"(?:\./)?[\w.*-]+(?:/[\w.*-]+)*(?:/|\.(?:py|md|sh|toml|tsv|txt))")
COMMAND = re.compile(r"python (?:-m ([\w.]+)|([\w/]+\.py))((?: [^`|;\n]*)?)")
NAME = re.compile(r"\b(?:[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)+\b|[A-Za-z]\w*_\w+\b|[A-Za-z]\w+(?=\())")
PUBLIC = re.compile(r"(?<!torch\.)\bdynaxla((?:\.[A-Za-z_]\w*)+)")
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")

METRIC = re.compile(r"(?:serving|llm|dynaxla)_(\w+?)(?:_seconds|_total|_rows)?")
"""A name of a metric: the sources have what is between the prefix and the unit."""

OF_OTHERS = {
    "include_stop_str_in_output": "vLLM's field, as an example of a new one",
    "OLD_CHECKOUT": "to be filled in",
    "cond_3": "an example of a numbered name",
    "external_data": "torch",
    "remove_tensorify_specialized_graphargs": "torch",
    "specialize_float": "torch",
    "wrap_symfloat": "torch",
    "QuantizedCache": "transformers",
    "OMP_WAIT_POLICY": "OpenMP",
    "tensorboard_trace_handler": "torch",
    "DistributedSampler": "torch",
    **dict.fromkeys(
        "CPU_NUM_DEVICES CachedCompile CheckpointManager CompileTime FSDPv2 HybridMesh MpDeviceLoader "
        "PJRT_CPU_ASYNC_CLIENT PJRT_DEVICE PJRT_DYNAMIC_PLUGINS PJRT_LIBRARY_PATH PJRT_SELECT_DEFAULT_DEVICE "
        "PJRT_TPU_MAX_INFLIGHT_COMPUTATIONS PT_XLA_DEBUG PT_XLA_DEBUG_LEVEL ParallelLoader REDUCE_SUM "
        "ShardingSpec SpmdFullyShardedDataParallel StepTrace Trace TransferFromDeviceTime UncachedCompile "
        "XLA_COMPILATION_CACHE_SIZE XLA_DOWNCAST_BF16 XLA_DUMP_HLO_GRAPH XLA_DYNAMO_DEBUG XLA_HLO_DEBUG "
        "XLA_IR_DEBUG XLA_METRICS_FILE XLA_NO_SPECIAL_SCALARS XLA_PERSISTENT_CACHE_PATH XLA_SAVE_HLO_FILE "
        "XLA_SAVE_TENSORS_FILE XLA_SAVE_TENSORS_FMT XLA_SYNC_WAIT XLA_USE_BF16 XLA_USE_EAGER_DEBUG_MODE "
        "XLA_USE_SPMD XlaFullyShardedDataParallel add_step_closure addressable_device_count "
        "apply_backward_optimization_barrier assume_pure batches_per_execution broadcast_master_param clear_all "
        "clear_sharding collective_broadcast collective_permute concat_dimension dcn_mesh_shape "
        "disable_manual_sharding dynamo_set_buffer_donor_ eager_mode enable_manual_sharding "
        "exported_program_to_stablehlo full_graph get_1d_mesh get_global_mesh get_local_ordinal get_memory_info "
        "async_save "
        "get_ordinal get_stablehlo global_ordinal global_runtime_device_count ici_mesh_shape "
        "initialize_cache input_sharding is_master_ordinal local_ordinal make_kernel_from_pallas mark_sharding "
        "mark_sharding_with_gradients mark_step master_print max_different_graphs mesh_reduce metrics_report "
        "optimizer_step reduce_gradients scatter_dim set_global_mesh set_mat_mul_precision shard_count "
        "short_metrics_report split_count split_dimension start_server sync torch_xla use_spmd "
        "visualize_tensor_sharding wait_device_ops xla_device xla_device_hw xrt_world_size".split(),
        "PyTorch/XLA",
    ),
    **dict.fromkeys(
        "CUDAGraph CUDA_LAUNCH_BLOCKING CUDA_VISIBLE_DEVICES OutOfMemoryError get_device_properties range_push".split(),
        "CUDA and torch.cuda",
    ),
    **dict.fromkeys(
        "JAX_COMPILATION_CACHE_DIR JAX_ENABLE_X64 TF_CPP_LOG_THREAD_ID TF_CPP_MIN_LOG_LEVEL TF_CPP_VMODULE "
        "XLA_PYTHON_CLIENT_MEM_FRACTION".split(),
        "JAX and XLA",
    ),
    **dict.fromkeys("TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS TORCHDYNAMO_DISABLE TORCH_LOGS".split(), "torch"),
}
"""Names that the repository's sources do not contain, with whose they are."""

EXAMPLES = ("warm_up.py", "serve.py")
"""Scripts of a reader's own."""


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def spans(page: Path) -> Iterator[str]:
    """The texts between backticks, without blocks of code."""
    yield from SPAN.findall(BLOCK.sub("", text_of(page)))


@cache
def files() -> frozenset[str]:
    """The repository's files and folders, each with a slash in front."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    return frozenset(f"/{path.relative_to(ROOT).as_posix()}" for path in (*found, *ROOT.glob("*")))


@cache
def words() -> frozenset[str]:
    """The words of the repository's sources, and the names of its files."""
    paths = [ROOT / path[1:] for path in files() if path.endswith((".py", ".sh", ".toml"))]
    return frozenset(
        word for path in paths if path != Path(__file__) for word in (path.stem, *re.findall(r"\w+", text_of(path)))
    )


def exists(path: str) -> bool:
    """Whether a file or folder has this path, or ends in it; an asterisk stands for one part of a path."""
    pattern = re.compile(".*/" + re.escape(path.removeprefix("./").rstrip("/")).replace(r"\*", "[^/]*"))
    return any(map(pattern.fullmatch, files()))


def module_file(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_links(page: Path) -> None:
    paths = {span for span in spans(page) if PATH.fullmatch(span) and not span.startswith("torch/")}
    assert sorted(path for path in paths if not exists(path)) == []
    for path, anchor in LINK.findall(BLOCK.sub("", text_of(page))):
        target = page.parent / path if path else page
        assert path.startswith("http") or target.exists(), path
        headings = re.findall(r"^#+ (.*)", text_of(target), re.MULTILINE) if anchor else []
        anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor[1:] in anchors, (path, anchor)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands(page: Path) -> None:
    for module, script, rest in COMMAND.findall(text_of(page)):
        if script in EXAMPLES or (module and module.partition(".")[0] not in FOLDERS):
            continue  # a reader's, or another package's
        path = ROOT / script if script else module_file(module)
        assert path.exists(), module or script
        flags = set(re.findall(r"--[a-z-]+", rest))
        folder = path.parent.rglob("*.py") if path.name == "__main__.py" else path.parent.glob("*.py")
        assert flags <= set(re.findall(r'"(--[a-z-]+)"', "\n".join(map(text_of, folder)))), (module or script, flags)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_and_variables(page: Path) -> None:
    options = {field.name for field in dataclasses.fields(Options)}
    assert set(re.findall(r'options=\{"(\w+)"', text_of(page))) <= options
    assert set(re.findall(r"\bDYNAXLA_\w+", text_of(page))) <= {
        "DYNAXLA_DEBUG",
        "DYNAXLA_CACHE_DIR",
        "DYNAXLA_PLATFORM",
    }


def test_readme_has_a_row_for_every_option() -> None:
    table = text_of(ROOT / "README.md").partition("| option | values | meaning |")[2].partition("\n\n")[0]
    rows = re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in table.splitlines() if line))
    assert sorted(rows) == sorted(field.name for field in dataclasses.fields(Options) if field.name != "debug")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names(page: Path) -> None:
    texts = (span for span in spans(page) if not PATH.fullmatch(span) and not span.startswith(("aten.", "torch/")))
    names = {name for text in texts for name in NAME.findall(text)} - OF_OTHERS.keys()
    parts = {name: METRIC.fullmatch(name) for name in names - words()}
    assert sorted(name for name, part in parts.items() if part is None or part[1] not in words()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_dotted_names_of_the_package(page: Path) -> None:
    """Each is a public name, a module's name, an op or a logger."""
    ops = {f".{target}".rpartition(".")[0] for target in map(str, core_table().records)}
    for dotted in set(PUBLIC.findall(text_of(page))):
        if f".dynaxla{dotted}".removesuffix(".default") not in ops and dotted != ".compiles":
            assert pkgutil.resolve_name(f"dynaxla{dotted}") is not None


def test_names_of_others_are_still_mentioned() -> None:
    mentioned = {name for page in PAGES for name in NAME.findall(text_of(page))}
    assert OF_OTHERS.keys() <= mentioned - words()
