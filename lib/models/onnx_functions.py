"""What an ONNX file calls, replaced by its definition: functions of the file's own, and operators that TVM does not
import as ONNX defines them.

ONNX defines many operators as functions of simpler ones (`onnx.defs`: "function body"). Where TVM's importer lacks such
an operator, or has another one of the same name, the simpler ones take its place. What they compute of shapes is folded
afterwards.
"""

import onnx
from onnx import defs, helper, inliner
from tvm.relax.frontend.onnx.onnx_frontend import _get_convert_map

from lib.models import onnx_folding
from lib.models.onnx_graph import attributes

# Known to TVM 0.27, but not with all that ONNX means. Seen on the backend tests of the onnx package.
_MEANT_OTHERWISE = {"Attention"}  # TVM's is that of Microsoft's domain, with packed weights
_MEANT_OF_THE_FIRST_OUTPUT = {"LayerNormalization"}
_DOMAIN = "tuner.functions"  # of the functions while they are put in place

Types = dict[str, tuple[int, tuple[int, ...]]]  # element type and static shape of tensors


def put_in_place(proto: onnx.ModelProto) -> None:
    """Replace calls of functions that a file brings along (modules, as exporters of JAX write them), in place.

    Raises:
        onnx.checker.ValidationError: They call one another for ever.
    """
    if not proto.functions:
        return
    light = onnx_folding.without_large_weights(proto)  # the inliner copies the model, and takes none above 2 GB
    light.functions.extend(proto.functions)
    _have_versions_agree(light)
    if any(_is_of_another_version(function, light) for function in light.functions):
        light = onnx.shape_inference.infer_shapes(light)  # which conversions ask for
    expanded = inliner.inline_local_functions(light, convert_version=True)
    for kept, found in ((proto.graph.node, expanded.graph.node), (proto.opset_import, expanded.opset_import)):
        del kept[:]
        kept.extend(found)
    del proto.functions[:]


def _have_versions_agree(proto: onnx.ModelProto) -> None:
    """The inliner leaves functions which say that they are of another version, of their own domain even, than the model
    says; ONNX Runtime asks for none of it."""
    versions = {opset.domain: opset.version for opset in proto.opset_import}
    own = {function.domain for function in proto.functions}
    for function in proto.functions:
        for opset in function.opset_import:
            if opset.domain not in versions:
                versions[opset.domain] = opset.version
                proto.opset_import.append(helper.make_opsetid(opset.domain, opset.version))
            elif opset.domain in own:
                opset.version = versions[opset.domain]


def _is_of_another_version(function: onnx.FunctionProto, proto: onnx.ModelProto) -> bool:
    versions = {opset.domain: opset.version for opset in proto.opset_import}
    return any(versions[opset.domain] != opset.version for opset in function.opset_import)


def expand(proto: onnx.ModelProto) -> bool:
    """Replace such operators, in place, and those that come out of it; those in bodies of others are left.

    Returns:
        Whether there were any.
    """
    is_changed = False
    while functions := _functions(proto):
        light = onnx_folding.without_large_weights(proto)  # the inliner copies the model, and takes none above 2 GB
        for node in light.graph.node:
            if node.name in functions:
                node.op_type, node.domain = node.name, _DOMAIN
                del node.attribute[:]
        light.functions.extend(functions.values())
        light.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
        expanded = inliner.inline_local_functions(light)
        del proto.graph.node[:]
        proto.graph.node.extend(expanded.graph.node)
        is_changed = True
    return is_changed


def _functions(proto: onnx.ModelProto) -> dict[str, onnx.FunctionProto]:
    """The definition of each node to replace, by the name that the node gets."""
    read = {name for node in proto.graph.node for name in node.input} | {value.name for value in proto.graph.output}
    known, version = _get_convert_map().keys(), onnx_folding.version(proto)
    types = onnx_folding.static_types(proto)
    found = {}
    for n, node in enumerate(proto.graph.node):
        reads_more = any(name in read for name in node.output[1:])
        is_replaced = (
            node.op_type not in known
            or node.op_type in _MEANT_OTHERWISE
            or (reads_more and node.op_type in _MEANT_OF_THE_FIRST_OUTPUT)
            or _is_norm_of_all(node, types)
        )
        if is_replaced and (function := _definition(node, version, types)):
            node.name = f"{node.op_type}_{n}"
            function.name, function.domain = node.name, _DOMAIN
            found[node.name] = function
    return found


def _definition(node: onnx.NodeProto, version: int, types: Types) -> onnx.FunctionProto | None:
    """What ONNX says it is, with its attributes as constants; None if ONNX says nothing."""
    if node.domain not in ("", "ai.onnx") or not defs.has(node.op_type, version, ""):
        return None
    schema = defs.get_schema(node.op_type, version, "")
    function = onnx.FunctionProto()
    if schema.has_context_dependent_function:
        described = [_type(types.get(name)) for name in node.input]
        newest = max(v for v in schema.context_dependent_function_opset_versions if v <= version)
        text = schema.get_context_dependent_function_with_opset_version(newest, node.SerializeToString(), described)
        function.ParseFromString(text)
    elif schema.has_function:
        newest = max((v for v in schema.all_function_opset_versions if v <= version), default=schema.since_version)
        function.ParseFromString(schema.get_function_with_opset_version(newest))
    _give_attributes(function, node, schema)
    return function if function.node and _is_made_valid(function, version) else None


def _is_made_valid(function: onnx.FunctionProto, version: int) -> bool:
    """Have a definition count as one of a model's version; it may be older. False if its operators have changed."""
    for node in function.node:
        if node.domain in ("", "ai.onnx"):
            schema = defs.get_schema(node.op_type, version, "")
            if not {attribute.name for attribute in node.attribute} <= schema.attributes.keys():
                return False  # axes, say, which became inputs
            if not schema.min_input <= len(node.input) <= schema.max_input:
                return False
    for opset in function.opset_import:
        if opset.domain in ("", "ai.onnx"):
            opset.version = version
    return True


def _type(found: tuple[int, tuple[int, ...]] | None) -> bytes:
    """Of an input, as the definitions want it; an input that is left out, or not known, has none."""
    return helper.make_tensor_type_proto(*found).SerializeToString() if found else onnx.TypeProto().SerializeToString()


def _give_attributes(function: onnx.FunctionProto, node: onnx.NodeProto, schema: defs.OpSchema) -> None:
    """Put the values of a node's attributes where the function's nodes refer to them."""
    given = {name: attribute.default_value for name, attribute in schema.attributes.items()}
    given |= {attribute.name: attribute for attribute in node.attribute}
    for inner in function.node:
        kept = []
        for attribute in inner.attribute:
            if attribute.ref_attr_name:
                value = given.get(attribute.ref_attr_name)
                if value is None or not value.type:
                    continue  # neither given nor with a default
                value = onnx.AttributeProto.FromString(value.SerializeToString())
                value.name = attribute.name
                kept.append(value)
            else:
                kept.append(attribute)
        copies = [onnx.AttributeProto.FromString(attribute.SerializeToString()) for attribute in kept]
        del inner.attribute[:]
        inner.attribute.extend(copies)
    del function.attribute[:]
    del function.attribute_proto[:]


def _is_norm_of_all(node: onnx.NodeProto, types: Types) -> bool:
    """An RMS norm over all axes of a tensor: TVM's kernel of it reads its sum as if it had an axis left."""
    axis = attributes(node, axis=-1)["axis"]
    _, shape = types.get(node.input[0], (0, ())) if node.input else (0, ())
    return node.op_type == "RMSNormalization" and axis in (0, -len(shape)) and len(shape) > 0
