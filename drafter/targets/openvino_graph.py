"""Changes of a converted program before OpenVINO compiles the program: the same numbers at less cost.

Shapes: M tokens of a program · I input size · O output size of a matrix · G groups of inputs.
"""

from collections.abc import Sequence
from math import frexp
from typing import Any

import numpy as np

from drafter.targets.cache import CacheShape
from drafter.targets.stored import Grouped, join


def split_stores(ov: Any, model: Any, num_leading: int, hidden_size: int, shape: CacheShape) -> Any:
    """The recorded program with an input for the keys and values of each layer, which need no copy.

    Args:
        ov: the module ``openvino``.
        model: as recorded, with one input for the keys of all layers and one for the values.
        num_leading: inputs before the keys; the first are embeddings.
        hidden_size: D, which the program then knows, as it knows heads and head dimensions.
        shape: of the cache.
    """
    operators = ov.opset13
    inputs = list(model.get_parameters()[:num_leading])
    for port in model.inputs[num_leading:]:
        layers = [operators.parameter(port.partial_shape[1:], port.element_type) for _ in range(shape.num_layers)]
        for reader in list(port.get_target_inputs()):
            node = reader.get_node()
            if node.get_type_name() == "Gather":
                node.output(0).replace(layers[int(node.input_value(1).get_node().get_data())].output(0))
            else:  # reads the numbers of rows and slots
                assert node.get_type_name() == "ShapeOf", node
                reader.replace_source_output(operators.unsqueeze(layers[0], 0).output(0))
        inputs += layers
    model = ov.Model([output.get_node() for output in model.outputs], inputs, "forward")
    stores = (
        [-1, shape.num_heads, -1, size] for size in (shape.key_dim, shape.value_dim) for _ in range(shape.num_layers)
    )
    model.reshape({0: [-1, -1, hidden_size], **dict(enumerate(stores, num_leading))})
    return model


def split_heads(ov: Any, model: Any) -> None:
    """Give a joined product its heads before the split, with one change of shape in place of one for each part."""
    operators = ov.opset13
    for node in model.get_ordered_ops():
        readers = [[port.get_node() for port in output.get_target_inputs()] for output in node.outputs()]
        if node.get_type_name() != "VariadicSplit" or [len(each) for each in readers] != [1] * len(readers):
            continue
        views = [view for (view,) in readers]
        shapes = [view.get_output_partial_shape(0) for view in views if view.get_type_name() == "Reshape"]
        sizes = {str(shape[3]) for shape in shapes if len(shape) == 4 and shape[3].is_static}
        axis = int(node.input_value(1).get_node().get_data())
        is_last = len(node.get_output_partial_shape(0)) == 3 and axis in (-1, 2)
        if len(shapes) < len(views) or len(sizes) != 1 or not is_last:
            continue
        size = int(sizes.pop())
        heads = [output.get_partial_shape()[2].get_length() // size for output in node.outputs()]
        by_head = operators.reshape(node.input_value(0), np.array([0, 0, sum(heads), size]), True)
        parts = operators.variadic_split(by_head, np.int64(2), np.array(heads)).outputs()
        for view, part in zip(views, parts, strict=True):
            view.output(0).replace(part)


def write_out_attention(ov: Any, model: Any) -> None:
    """Write scaled dot products out, as two products and a softmax, with the scale at the queries.

    OpenVINO does so itself, but scales and transposes the keys of all slots at every forward. Where the scale is a
    power of two, the tables of the rotation are scaled once for all layers: every number of the queries stays the same.
    """
    operators = ov.opset13
    tables: dict[Any, Any] = {}  # by the output that gives cosines or sines, and the scale
    for node in model.get_ordered_ops():
        if node.get_type_name() != "ScaledDotProductAttention" or node.get_input_size() < 5:
            continue
        assert not node.get_attributes()["causal"], "the target hands in the whole mask"
        query, key, value, mask, scale = node.input_values()
        rotated = _rotation(query)
        factor = float(scale.get_node().get_data(dtype=np.float32)) if _is_constant(scale.get_node()) else 0.0
        if rotated and abs(frexp(factor)[0]) == 0.5:
            for port in (product.input(1) for product in rotated):
                table = port.get_source_output()
                place = table.get_node().get_name(), table.get_index(), factor
                tables[place] = tables.get(place) or operators.multiply(table, scale)
                port.replace_source_output(tables[place].output(0))
        else:
            query = operators.multiply(query, scale)
        scores = operators.add(operators.matmul(query, key, False, True), mask)
        node.output(0).replace(operators.matmul(operators.softmax(scores, -1), value, False, False).output(0))


def _rotation(query: Any) -> list[Any]:
    """The products x * cosines and turned x * sines whose sum, in another shape, is a query; empty: it is no such sum.

    Nothing else reads the products, the sum or the query.
    """
    total = query.get_node().input_value(0).get_node() if query.get_node().get_type_name() == "Reshape" else None
    if total is None or total.get_type_name() != "Add":
        return []
    products = [port.get_node() for port in total.input_values()]
    kinds = [each.get_type_name() for each in products]
    num_readers = [len(each.output(0).get_target_inputs()) for each in (query.get_node(), total, *products)]
    return products if kinds == ["Multiply"] * 2 and num_readers == [1] * 4 else []


def round_once(ov: Any, model: Any) -> None:
    """Let the weights of norms multiply before the norm is rounded to the program's number format.

    OpenVINO runs a norm and its weights as one operator then.
    """
    operators = ov.opset13
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Multiply":
            continue
        weight, rounded = sorted((port.get_node() for port in node.input_values()), key=_is_constant, reverse=True)
        if _is_constant(weight) and rounded.get_type_name() == "Convert":
            norm = rounded.input_value(0)
            if norm.get_node().get_type_name() == "Multiply" and norm.get_element_type() == ov.Type.f32:
                product = operators.multiply(norm, operators.constant(weight.get_data(dtype=np.float32)))
                node.output(0).replace(operators.convert(product, node.get_element_type().to_string()).output(0))


def _is_constant(node: Any) -> bool:
    return bool(node.get_type_name() == "Constant")


def join_products(ov: Any, model: Any, matrices: list[Grouped]) -> Any:
    """The program with one product for all matrices [O, I] that multiply the same input; a split hands out the parts.

    A product of M numbers with a small matrix spends a part of its time on its start. Query, key and value become one
    product, gate and up another. Matrices are constants of one number format, or integers in groups of one form.

    Args:
        ov: the module ``openvino``.
        model: as recorded.
        matrices: in groups, in place of the last inputs; the list is emptied, so that no matrix is in memory twice.

    Raises:
        RuntimeError: the program does something else with an input than multiply by its transpose.
    """
    inputs = model.get_parameters()
    first = len(inputs) - len(matrices)
    by_input = {port.get_friendly_name(): matrix for port, matrix in zip(inputs[first:], matrices, strict=True)}
    matrices.clear()
    groups: dict[Any, list[tuple[Any, Any]]] = {}
    for node in model.get_ordered_ops():
        if node.get_type_name() != "MatMul":
            continue
        source, weight = node.input_value(0), node.input_value(1).get_node()
        is_turned = weight.get_type_name() == "Transpose"
        weight = weight.input_value(0).get_node() if is_turned else weight
        is_constant = _is_constant(weight) and not is_turned and len(weight.shape) == 2
        matrix = weight if is_constant else by_input.get(weight.get_friendly_name())
        if matrix is not None and node.get_attributes()["transpose_b"] != is_turned:
            form = str(weight.get_element_type()) if is_constant else matrix.form
            key = source.get_node().get_name(), source.get_index(), form
            groups.setdefault(key, []).append((node, matrix))
    by_input.clear()
    for key in list(groups):
        nodes, parts = zip(*groups.pop(key), strict=True)
        if isinstance(parts[0], Grouped):
            product = _grouped_product(ov, nodes[0].input_value(0), join(parts))
        elif len(parts) > 1:
            joined = np.concatenate([part.tensor_view.data for part in parts])
            tensor = ov.Tensor(parts[0].get_element_type(), ov.Shape(joined.shape))  # memory that the program keeps
            tensor.data[:] = joined
            product = ov.opset13.matmul(nodes[0].input_value(0), ov.opset13.constant(tensor), False, True)
        else:
            continue
        _hand_out(ov, product, nodes, [part.shape[0] for part in parts])
    return ov.Model([output.get_node() for output in model.outputs], inputs[:first], "program")


def with_type(ov: Any, model: Any, dtype: str, *, has_outputs: bool) -> Any:
    """The float32 program with inputs of another number format, and outputs too if ``has_outputs``."""
    steps = ov.preprocess.PrePostProcessor(model)
    wanted = getattr(ov.Type, dtype)
    for index, port in enumerate(model.inputs):
        if port.element_type == ov.Type.f32:
            steps.input(index).tensor().set_element_type(wanted)
    for index in range(len(model.outputs) if has_outputs else 0):
        steps.output(index).tensor().set_element_type(wanted)
    return steps.build()


def _grouped_product(ov: Any, source: Any, matrix: Grouped) -> Any:
    """source [..., I] times the transpose of a matrix in groups.

    The offset of a group multiplies the sum of the group's inputs::

        sum over i of (scale * integer_i + offset) x_i  =  scale * sum of integer_i x_i  +  offset * sum of x_i
    """
    operators = ov.opset13
    dtype = source.get_element_type().to_string()
    (num_outputs, num_inputs), num_groups = matrix.shape, matrix.scale_OG.shape[1]
    size = num_inputs // num_groups
    tensor = ov.Tensor(ov.Type.i4 if matrix.bits == 4 else ov.Type.i8, ov.Shape([num_outputs, num_groups, size]))
    tensor.data.reshape(-1).view(np.uint8)[:] = matrix.packed.reshape(-1).view(np.uint8)
    scale = np.ascontiguousarray(matrix.scale_OG[:, :, None])
    integers = operators.convert(operators.constant(tensor), "f16" if scale.dtype == np.float16 else "f32")
    weight = operators.multiply(integers, operators.constant(scale))
    weight = operators.reshape(weight, np.array([num_outputs, num_inputs], dtype=np.int64), False)
    if weight.get_element_type().to_string() != dtype:
        weight = operators.convert(weight, dtype)
    product = operators.matmul(source, weight, False, True)
    if matrix.offset_OG is None:
        return product
    lead = [0] * (len(source.get_partial_shape()) - 1)
    by_group = operators.reshape(source, np.array([*lead, num_groups, size], dtype=np.int64), True)
    sums = operators.reduce_sum(by_group, np.array([-1], dtype=np.int64), False)
    offsets = operators.constant(np.ascontiguousarray(matrix.offset_OG))
    if dtype != "f32":
        offsets = operators.convert(offsets, dtype)
    return operators.add(product, operators.matmul(sums, offsets, False, True))


def _hand_out(ov: Any, product: Any, nodes: Sequence[Any], sizes: list[int]) -> None:
    """Let the parts of a product take the place of other products."""
    parts = [product.output(0)]
    if len(nodes) > 1:
        parts = ov.opset13.variadic_split(product, np.int64(-1), np.array(sizes, dtype=np.int64)).outputs()
    for node, part in zip(nodes, parts, strict=True):
        node.output(0).replace(part)
