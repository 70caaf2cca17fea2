"""Private names of torch, jaxlib and torch-mlir stand nowhere but behind their walls.

What is read is the source, by its syntax: imports; chains of attributes from a name that is torch or one of its modules;
attributes that begin with an underscore and that the module does not define itself; attributes of torch's own objects by a
list of their names; and texts by which one looks into a node's `meta`, into a message or into a running function of torch's.
A private attribute whose name has no underscore and is not in the list goes unseen, as does one behind a `getattr` with a name
that is made at run time.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import dynaxla

PACKAGE = Path(dynaxla.__file__).parent
WALLS = {
    "torch": ("torch_api/",),
    "jax": ("runtime/xla.py",),
    "torch_mlir": ("lowering/torch_mlir_importer.py", "lowering/torch_mlir_passes.py"),
}
NOT_TORCHS = frozenset({"_at_fork_reinit", "_attn_implementation"})
"""Private attributes of others: of Python's own objects (a lock's), of transformers' configs."""

ATTRIBUTES = frozenset(
    """
    alias_info compile_subgraph_reason compiler_fn compiler_name current_tx dynamo_ctx fake_mode fw_metadata
    f_back f_code f_globals f_locals has_kernel_for_dispatch_key input_info mutated_inp_runtime_indices mutates_data
    mutates_metadata num_cache_entries_with_same_id_matched_objs py_kernels root_tx shape_env static_input_indices
    user_stack var_to_range
    """.split()
)
OF_SYMBOLS = frozenset({"expr", "hint", "guards", "has_hint", "maybe_as_int"})
"""Attributes of a symbolic size's `node`."""

TEXTS = (
    *("example_value", "partitioner_tag", "recompute"),
    *("torch_dynamo_resume_in", "generic_jump", "Explanation:", "wrap_inline", "compile_wrapper"),
    *("torch._dynamo.convert_frame", "torch._dynamo.eval_frame"),
)


def _is_private(dotted: str) -> bool:
    """Whether torch or JAX may change a module, or a name in one, in any release."""
    first, *rest = dotted.split(".")
    if first == "torch":
        ops = rest[:1] == ["ops"]  # the names of ops are data
        return dotted.startswith("torch.fx.experimental") or (not ops and any(_is_hidden(part) for part in rest))
    if first == "jax":
        return dotted.startswith(("jax.extend", "jax.interpreters")) or any(_is_hidden(part) for part in rest)
    return first in ("jaxlib", "torch_mlir")


def _is_hidden(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _wall_of(dotted: str) -> str:
    first = dotted.partition(".")[0]
    return "jax" if first == "jaxlib" else first


class _Module:
    """What a module's source says of names."""

    def __init__(self, source: str) -> None:
        self.tree = ast.parse(source)
        self.imported = dict(self._imports())
        self.namespaces = {
            target.id
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Assign) and self._dotted(node.value).startswith("torch.ops.")
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        self.own = set(self._own())

    def _imports(self) -> Iterator[tuple[str, str]]:
        """Names of this module that stand for modules, or for names in modules, of other packages."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for each in node.names:
                    yield (
                        each.asname or each.name.partition(".")[0],
                        each.name if each.asname else each.name.partition(".")[0],
                    )
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                for each in node.names:
                    yield each.asname or each.name, f"{node.module}.{each.name}"

    def _own(self) -> Iterator[str]:
        """What it defines itself: functions, classes, variables, fields, slots, and what it asks of `self`."""
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("self", "cls")
            ):
                yield node.attr

    def _dotted(self, node: ast.expr) -> str:
        """A chain of attributes by the full name of what it begins with; empty for any other expression."""
        if isinstance(node, ast.Name):
            return self.imported.get(node.id, "")
        inner = self._dotted(node.value) if isinstance(node, ast.Attribute) else ""
        return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""

    def private_names(self) -> Iterator[tuple[int, str, str]]:
        """Line, wall and name of each private name."""
        for node in ast.walk(self.tree):
            line = getattr(node, "lineno", 0)
            for dotted in self._names(node):
                if _is_private(dotted):
                    yield line, _wall_of(dotted), dotted
            if isinstance(node, ast.Attribute) and self._is_private_attribute(node):
                yield line, "torch", f".{node.attr}"
            yield from ((line, "torch", text) for text in _texts(node))

    def _names(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Attribute):
            yield self._dotted(node)

    def _is_private_attribute(self, node: ast.Attribute) -> bool:
        if node.attr in ATTRIBUTES:
            return True
        if node.attr in OF_SYMBOLS:
            return isinstance(node.value, ast.Attribute) and node.value.attr in ("node", "shape_env")
        if not _is_hidden(node.attr) or node.attr in self.own | NOT_TORCHS or self._dotted(node):
            return False
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            root = root.value
        return not (isinstance(root, ast.Name) and root.id in self.namespaces)


def _texts(node: ast.AST) -> Iterator[str]:
    """Private words of torch's in a text of code, and names that `getattr` and the like are given."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "setattr", "hasattr")
    ):
        name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
        if _is_hidden(name) or name in ATTRIBUTES:
            yield f".{name}"
    elif isinstance(node, (ast.Subscript, ast.Call, ast.Compare, ast.Assign)):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Constant) and isinstance(child.value, str):
                yield from (text for text in TEXTS if text in child.value)


def _outside(module: Path) -> list[str]:
    place = module.relative_to(PACKAGE).as_posix()
    return [
        f"dynaxla/{place}:{line}: {name} belongs behind {' or '.join(WALLS[wall])}"
        for line, wall, name in _Module(module.read_text()).private_names()
        if not place.startswith(WALLS[wall])
    ]


def test_private_names_stand_behind_their_walls() -> None:
    found = [line for module in sorted(PACKAGE.rglob("*.py")) for line in _outside(module)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "wall"),
    [
        ("import torch._dynamo", "torch"),
        ("from torch._ops import OpOverload", "torch"),
        ("from torch import _C", "torch"),
        ("from torch.utils import _pytree as pytree", "torch"),
        ("from torch.fx.experimental.symbolic_shapes import free_symbols", "torch"),
        ("def f():\n    from torch.fx import experimental", "torch"),
        ("import torch\ntorch._C._data_address(x)", "torch"),
        ("import torch\ntorch.utils._pytree.tree_leaves(x)", "torch"),
        ("from torch import nn\nnn.modules._functions", "torch"),
        ("import torch\ntorch._lazy_clone(x)", "torch"),
        ("op._schema.arguments", "torch"),
        ("node.target._opname", "torch"),
        ("op.py_kernels.pop(key)", "torch"),
        ("tensor._base is None", "torch"),
        ("getattr(module, '_compiled_call_impl', None)", "torch"),
        ("size.node.hint", "torch"),
        ("size.node.expr", "torch"),
        ("size.node.shape_env.guards", "torch"),
        ("node.meta['example_value']", "torch"),
        ("node.meta.get('partitioner_tag')", "torch"),
        ("'recompute' in node.meta", "torch"),
        ("re.compile(r'torch_dynamo_resume_in_(.+)_at_')", "torch"),
        ("frame.f_back", "torch"),
        ("import jaxlib", "jax"),
        ("from jaxlib import xla_client", "jax"),
        ("from jax._src import core", "jax"),
        ("from jax.extend.mlir import ir", "jax"),
        ("import jax\njax.interpreters.mlir", "jax"),
        ("from torch_mlir.extras import fx_importer", "torch_mlir"),
    ],
)
def test_a_private_name_is_seen(source: str, wall: str) -> None:
    assert {found for _, found, _ in _Module(source).private_names()} == {wall}


@pytest.mark.parametrize(
    "source",
    [
        "import torch\naten = torch.ops.aten\naten._to_copy.default",
        "import torch\ntorch.ops.aten._assert_async.msg",
        "from torch.utils.weak import WeakIdKeyDictionary",
        "class Own:\n    def f(self):\n        self._size = 1\n    def g(self, other):\n        return other._size",
        "node.meta['val']",
        "import jax\nfrom jax import lax\nfrom jax.experimental import topologies",
        "lock._at_fork_reinit()",
        "error.hint",
        "from dynaxla.torch_api.overloads import OpOverload",
    ],
)
def test_other_names_are_free(source: str) -> None:
    assert not list(_Module(source).private_names())
