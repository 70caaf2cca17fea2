"""Functions of calls as a program on a mesh has them: constraints in regions, and dims that are not split of some ops."""

from __future__ import annotations

import re
from collections.abc import Callable

from dynaxla.custom_ops.constrain import IN_REGION, read_spec
from dynaxla.errors import ShardingError
from dynaxla.lowering.call_graph import mlir_sharding
from dynaxla.mesh import Mesh, Sharding

_REGION_CONSTRAINT = re.compile(
    rf"stablehlo\.custom_call @{re.escape(IN_REGION)}\((?P<operand>%[^)]+)\) "
    r'.*spec = "(?P<spec>[^"]*)".* -> (?P<type>tensor<\S*>)'
)
_CONVOLUTION = re.compile(
    r"(?P<result>%\w+) = stablehlo\.convolution\((?P<left>%[\w#]+), (?P<right>%[\w#]+)\) "
    r"dim_numbers = \[(?P<left_dims>[^\]]*)\]x\[(?P<right_dims>[^\]]*)\]->\[(?P<result_dims>[^\]]*)\]"
    r"(?P<attributes>.*) : \((?P<left_type>tensor<\S+>), (?P<right_type>tensor<\S+>)\) -> (?P<type>tensor<\S+>)"
)
_FOURIER = re.compile(
    r"(?P<result>%\w+) = stablehlo\.fft (?P<operand>%[\w#]+), (?P<attributes>type = \w+, length = \[(?P<lengths>[^\]]*)\]) "
    r": \((?P<operand_type>tensor<\S+>)\) -> (?P<type>tensor<\S+>)"
)


def write_for_mesh(text: str, mesh: Mesh | None) -> str:
    """A function as a program on a mesh has it, or one on one device (None).

    Raises:
        ShardingError: a constraint names an axis that the mesh lacks.
    """
    if IN_REGION in text:
        text = _write_region_constraints(text, mesh)
    if mesh is not None and sum(size > 1 for size in mesh.shape) > 1 and "stablehlo.convolution" in text:
        text = _keep_images_whole(text)
    if mesh is not None and "stablehlo.fft" in text:
        text = _replace_all(_FOURIER, _keep_signal_whole, "stablehlo.fft", text)
    return text


def read_constraint(text: str, rank: int, mesh: Mesh) -> Sharding:
    """The sharding of a value of this rank that a constraint says.

    Raises:
        ShardingError: it names an axis that the mesh lacks.
    """
    sharding = Sharding(mesh, read_spec(text, rank))
    try:
        mesh.count([axis for dim in sharding.dims for axis in dim])
    except ShardingError as error:
        raise ShardingError(f"constrain(x, {sharding.spec}): {error.explanation}", error.hint) from error
    return sharding


def _write_region_constraints(text: str, mesh: Mesh | None) -> str:
    """A function with the constraints in bodies of `cond` and loops; on one device they give their operands."""

    def write(found: re.Match[str]) -> str:
        operand, spec, its_type = found["operand"], found["spec"], found["type"]
        if mesh is None:
            return f"stablehlo.reshape {operand} : ({its_type}) -> {its_type}"
        sharding = read_constraint(spec, len(re.findall(r"\d+x", its_type)), mesh)
        return f"sdy.sharding_constraint {operand} {mlir_sharding(sharding)} : {its_type}"

    return _REGION_CONSTRAINT.sub(write, text)


def _keep_images_whole(text: str) -> str:
    """A function in whose convolutions no spatial dim is split.

    Where spatial dims are split over some axes of a mesh, XLA's partitioner adds partial sums over all devices, and not only
    over those of the contracted axes: results are the true ones times the number of devices along the others. Batches and
    channels are split as propagation finds it. On a mesh of one axis all devices are the right ones.
    """
    return _replace_all(_CONVOLUTION, _keep_image_whole, "stablehlo.convolution", text)


def _replace_all(form: re.Pattern[str], write: Callable[[re.Match[str]], str], op: str, text: str) -> str:
    made, count = form.subn(write, text)
    if count != text.count(op):
        raise AssertionError(f"{op} in another form than expected: {text}")
    return made


def _keep_image_whole(found: re.Match[str]) -> str:
    result = found["result"]
    name = f"%of_{result[1:]}"
    operands = [
        f"{name}_{side} = {_constraint(found[side], found[f'{side}_dims'], found[f'{side}_type'])}"
        for side in ("left", "right")
    ]
    dims = f"[{found['left_dims']}]x[{found['right_dims']}]->[{found['result_dims']}]"
    types = f"({found['left_type']}, {found['right_type']}) -> {found['type']}"
    made = (
        f"{name} = stablehlo.convolution({name}_left, {name}_right) dim_numbers = {dims}{found['attributes']} : {types}"
    )
    return "\n".join([*operands, made, f"{result} = {_constraint(name, found['result_dims'], found['type'])}"])


def _keep_signal_whole(found: re.Match[str]) -> str:
    """A Fourier transform along dims that are not split: XLA's CPU client refuses the layouts that it gives operands there."""
    result, name = found["result"], f"%of_{found['result'][1:]}"
    transformed = len(found["lengths"].split(","))
    operand_type, its_type = found["operand_type"], found["type"]
    rank = len(re.findall(r"\d+x", its_type))
    dims = ", ".join(["b"] * (rank - transformed) + ["0"] * transformed)
    given = f"{name}_operand = {_constraint(found['operand'], dims, operand_type)}"
    made = f"{name} = stablehlo.fft {name}_operand, {found['attributes']} : ({operand_type}) -> {its_type}"
    return "\n".join([given, made, f"{result} = {_constraint(name, dims, its_type)}"])


def _constraint(value: str, dims: str, its_type: str) -> str:
    """A value whose spatial dims, which have numbers as names, are not split."""
    kept = ", ".join("{}" if dim.strip().isdigit() else "{?}" for dim in dims.split(","))
    return f"sdy.sharding_constraint {value} <@mesh, [{kept}]> : {its_type}"
