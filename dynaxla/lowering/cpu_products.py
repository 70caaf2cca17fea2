"""Controls how XLA's CPU compiler computes products of few rows by a large matrix, such as those of linear layers that generate
token by token.

`x @ w.T` of 2 to 64 rows of floats takes up to three times as long as `(w @ x.T).T`: XLA packs the right operand at every call,
and the left one not. XLA makes the one of the other where the transpose is next to the product, so an optimization barrier
stands between the two.

A single row of floats by a large matrix is a stack of products of equal parts of the matrix: the library cuts a product into
pieces by its own estimate, at some sizes three for two threads, and a stack is spread evenly.

Factors of 16 bits are widened for a product that is summed in 32, a large weight at every call. XLA's library multiplies
bfloat16 as it is, two rows or more, which is faster up to some 64 rows; a single row is computed as two.

`python -m benchmarks.product_speed` measures these products.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from dynaxla.lowering.product_factors import ProductFactor, shape_of
from dynaxla.lowering.stablehlo_module import StablehloModules, walk

# Of jaxlib's bindings of MLIR, which have no types.
Module: TypeAlias = Any
Operation: TypeAlias = Any
Value: TypeAlias = Any

MOST_ROWS = 64
"""Number of rows of the left operand up to which a product is one of few rows."""

FEWEST_ELEMENTS = 1 << 16
"""Number of elements of the right operand from which it is a large matrix."""

PARTS = (8, 4, 2)
"""Into how many parts a matrix is cut for a single row: the first of these that divides the dim that is cut."""

_PRODUCT = "stablehlo.dot_general"


def has_products(module: Module) -> bool:
    """Whether `settle_products` might change the module at other sizes."""
    return any(operation.name == _PRODUCT for operation in walk(module.operation))


def settle_products(mlir: StablehloModules, module: Module, *, by_rows: bool = True) -> None:
    """Writes the products of a module as XLA's CPU compiler computes them right and fast.

    Args:
        by_rows: whether products of few rows are computed otherwise than those of many.
    """
    for operation in list(walk(module.operation)):
        if operation.name != _PRODUCT:
            continue
        with operation.location:
            left, right = ProductFactor.both(mlir, operation)
            if by_rows and (row_and_matrix := _row_and_matrix(mlir, operation, left, right)):
                _cut(mlir, operation, *row_and_matrix)
            elif not by_rows or not _has_few_rows(mlir, left, right):
                _widen_factors(mlir, operation)
            elif _is_of_bfloat16(mlir, operation, right):
                if left.count_rows(mlir) == 1:
                    _double_row(mlir, operation)
            elif left.count_rows(mlir) > 1 and right.is_of_rows(mlir):
                _swap(mlir, operation, left, right)
            else:
                _widen_factors(mlir, operation)


def _has_few_rows(mlir: StablehloModules, left: ProductFactor, right: ProductFactor) -> bool:
    """Whether a product of floats has few rows on the left, and on the right a large matrix of more."""
    if not isinstance(_element(mlir, right.value), mlir.ir.FloatType):
        return False
    rows, is_large = left.count_rows(mlir), math.prod(shape_of(mlir, right.value)) >= FEWEST_ELEMENTS
    return is_large and 1 <= rows <= MOST_ROWS and 2 * rows <= right.count_rows(mlir)


def _row_and_matrix(
    mlir: StablehloModules, product: Operation, left: ProductFactor, right: ProductFactor
) -> tuple[ProductFactor, ProductFactor] | None:
    """A single row of floats of at least 32 bits and a large matrix that can be cut in parts, in this order."""
    for row, matrix in ((left, right), (right, left)):
        shape = shape_of(mlir, matrix.value)
        if row.count_rows(mlir) > 1 or len(shape) != 2 or len(matrix.contracting) != 1 or not _parts(shape[0]):
            continue
        elements = {_element(mlir, value) for value in (row.value, matrix.value, product.results[0])}
        is_wide = all(isinstance(each, (mlir.ir.F32Type, mlir.ir.F64Type)) for each in elements)
        if is_wide and len(elements) == 1 and math.prod(shape) >= FEWEST_ELEMENTS:
            return row, matrix
    return None


def _parts(size: int) -> int:
    return next((parts for parts in PARTS if size % parts == 0), 0)


def _is_of_bfloat16(mlir: StablehloModules, product: Operation, right: ProductFactor) -> bool:
    """Whether a product of matrices of bfloat16 is summed in float32, and is one that the library is faster at.

    A single row by columns of a matrix is not.
    """
    factors, is_bfloat16 = product.operands, mlir.ir.BF16Type
    if not all(isinstance(_element(mlir, factor), is_bfloat16) for factor in factors):
        return False
    if not isinstance(_element(mlir, product.results[0]), mlir.ir.F32Type):
        return False
    are_matrices = all(len(shape_of(mlir, factor)) == 2 for factor in factors) and not right.batching
    return are_matrices and (shape_of(mlir, product.results[0])[0] > 1 or right.is_of_rows(mlir))


def _widen_factors(mlir: StablehloModules, product: Operation) -> None:
    """Converts the 16-bit factors of a product that is summed in a wider float.

    XLA's CPU client compiles such a product and then cannot run it where the factors do not lie as its library
    wants them ("DotThunk: BF16 x BF16 = F32").
    """
    ir, wide = mlir.ir, _element(mlir, product.results[0])
    for index, factor in enumerate(product.operands):
        element = _element(mlir, factor)
        if element != wide and isinstance(element, (ir.BF16Type, ir.F16Type)):
            type_ = ir.RankedTensorType.get(shape_of(mlir, factor), wide)
            product.operands[index] = _make(mlir, product, "convert", type_, factor)


def _cut(mlir: StablehloModules, product: Operation, row: ProductFactor, matrix: ProductFactor) -> None:
    """Replaces a product of a row and a matrix by a stack of products of parts of the matrix's first dim.

    Where the product sums along that dim, the stack's results are summed.
    """
    ir, result = mlir.ir, mlir.ir.RankedTensorType(product.results[0].type)
    first, second = shape_of(mlir, matrix.value)
    parts, element = _parts(first), result.element_type
    sums_parts = matrix.contracting == (0,)

    def type_of(*shape: int) -> Any:
        return ir.RankedTensorType.get(shape, element)

    stack = _make(mlir, product, "reshape", type_of(parts, first // parts, second), matrix.value)
    if sums_parts:
        rows, kept = _make(mlir, product, "reshape", type_of(parts, first // parts), row.value), second
    else:
        vector = _make(mlir, product, "reshape", type_of(second), row.value)
        along = {"broadcast_dimensions": ir.DenseI64ArrayAttr.get([1])}
        rows, kept = _make(mlir, product, "broadcast_in_dim", type_of(parts, second), vector, **along), first // parts
    attributes = {name: product.attributes[name] for name in product.attributes}
    contracting = 1 if sums_parts else 2
    attributes["dot_dimension_numbers"] = mlir.stablehlo.DotDimensionNumbers.get([0], [0], [contracting], [1])
    products = _make(mlir, product, "dot_general", type_of(parts, kept), stack, rows, **attributes)
    if sums_parts:
        products = _sum_first_dim(mlir, product, products)
    _replace(product, _make(mlir, product, "reshape", result, products))


def _sum_first_dim(mlir: StablehloModules, before: Operation, value: Value) -> Value:
    ir, (_, *kept) = mlir.ir, shape_of(mlir, value)
    element = _element(mlir, value)
    scalar = ir.RankedTensorType.get([], element)
    zero = ir.DenseElementsAttr.get_splat(scalar, ir.FloatAttr.get(element, 0.0))
    start = _make(mlir, before, "constant", scalar, value=zero)
    reduction = ir.Operation.create(
        "stablehlo.reduce",
        [ir.RankedTensorType.get(kept, element)],
        [value, start],
        attributes={"dimensions": ir.DenseI64ArrayAttr.get([0])},
        regions=1,
        ip=ir.InsertionPoint(before),
    )
    block = ir.Block.create_at_start(reduction.regions[0], [scalar, scalar])
    with ir.InsertionPoint(block):
        total = ir.Operation.create("stablehlo.add", [scalar], list(block.arguments)).result
        ir.Operation.create("stablehlo.return", operands=[total])
    return reduction.result


def _swap(mlir: StablehloModules, product: Operation, left: ProductFactor, right: ProductFactor) -> None:
    """Replaces a product by one with its factors in the other order, and puts the dims of its result in order."""
    ir, result = mlir.ir, mlir.ir.RankedTensorType(product.results[0].type)
    batch = len(left.batching)
    places = [*range(batch), *_places(right, batch + len(left.free)), *_places(left, batch)]
    type_ = ir.RankedTensorType.get([result.shape[dim] for dim in places], result.element_type)
    attributes = {name: product.attributes[name] for name in product.attributes}
    attributes["dot_dimension_numbers"] = mlir.stablehlo.DotDimensionNumbers.get(
        right.batching, left.batching, right.contracting, left.contracting
    )
    swapped = _make(mlir, product, "dot_general", type_, right.value, left.value, **attributes)
    _widen_factors(mlir, swapped.owner)
    held = _make(mlir, product, "optimization_barrier", type_, swapped)
    order = ir.DenseI64ArrayAttr.get([places.index(dim) for dim in range(result.rank)])
    _replace(product, _make(mlir, product, "transpose", result, held, permutation=order))


def _places(factor: ProductFactor, first: int) -> list[int]:
    """For each free dim of a factor, in the factor's own order, its place in the original product's result."""
    return [first + factor.free.index(dim) for dim in sorted(factor.free)]


def _double_row(mlir: StablehloModules, product: Operation) -> None:
    """Computes a product of one row as one of two equal rows, behind barriers, as XLA would leave out the other."""
    ir = mlir.ir
    row, matrix = product.operands
    dims = mlir.stablehlo.DotDimensionNumbers(product.attributes["dot_dimension_numbers"])
    at = 1 - next(iter(dims.lhs_contracting_dimensions))
    result = ir.RankedTensorType(product.results[0].type)
    attributes = {name: product.attributes[name] for name in product.attributes}

    def twice(type_: Any, dim: int) -> Any:
        return ir.RankedTensorType.get([2 if i == dim else n for i, n in enumerate(type_.shape)], type_.element_type)

    rows = twice(ir.RankedTensorType(row.type), at)
    along = {"dimension": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), at)}
    doubled = _make(mlir, product, "concatenate", rows, row, row, **along)
    doubled = _make(mlir, product, "optimization_barrier", rows, doubled)
    both = _make(mlir, product, "dot_general", twice(result, 0), doubled, matrix, **attributes)
    both = _make(mlir, product, "optimization_barrier", both.type, both)
    bounds = {"start_indices": [0, 0], "limit_indices": list(result.shape), "strides": [1, 1]}
    slices = {name: ir.DenseI64ArrayAttr.get(each) for name, each in bounds.items()}
    _replace(product, _make(mlir, product, "slice", result, both, **slices))


def _make(
    mlir: StablehloModules, before: Operation, name: str, type_: Any, *operands: Value, **attributes: Any
) -> Value:
    at = mlir.ir.InsertionPoint(before)
    return mlir.ir.Operation.create(f"stablehlo.{name}", [type_], operands, attributes=attributes, ip=at).result


def _replace(product: Operation, result: Value) -> None:
    product.results[0].replace_all_uses_with(result)
    product.erase()


def _element(mlir: StablehloModules, value: Value) -> Any:
    return mlir.ir.RankedTensorType(value.type).element_type
