"""Terraform's plugin protocol 6, served on a Unix socket from this process.

Only the messages and fields that the tests use are declared (protocol buffers skip the others), in
a table instead of generated code, which would tie the tests to one version of protobuf. Enums are
integers here, and maps lists of entries: the bytes are the same.
https://github.com/hashicorp/terraform/tree/v1.11.4/docs/plugin-protocol
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import msgspec
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "drillyardtests"
_MESSAGES = """
DynamicValue: bytes msgpack 1, bytes json 2
Diagnostic: int32 severity 1, string summary 2, string detail 3
Step: string attribute_name 1
AttributePath: Step* steps 1
Attribute: string name 1, bytes type 2, bool required 4, bool optional 5, bool computed 6,
    bool sensitive 7, NestedObject nested_type 10
NestedObject: Attribute* attributes 1, int32 nesting 3
NestedBlock: string type_name 1, Block block 2, int32 nesting 3, int64 min_items 4,
    int64 max_items 5
Block: int64 version 1, Attribute* attributes 2, NestedBlock* block_types 3
Schema: int64 version 1, Block block 2
NamedSchema: string key 1, Schema value 2
RawState: bytes json 1
Empty:
TypeName: string type_name 1
Diagnostics1: Diagnostic* diagnostics 1
Diagnostics2: Diagnostic* diagnostics 2
Metadata: TypeName* data_sources 3, TypeName* resources 4
Schemas: Schema provider 1, NamedSchema* resource_schemas 2, NamedSchema* data_source_schemas 3
UpgradeRequest: string type_name 1, RawState raw_state 3
UpgradeResponse: DynamicValue upgraded_state 1
ReadRequest: string type_name 1, DynamicValue current_state 2
ReadResponse: DynamicValue new_state 1, Diagnostic* diagnostics 2
DataRequest: string type_name 1, DynamicValue config 2
DataResponse: DynamicValue state 1, Diagnostic* diagnostics 2
PlanRequest: string type_name 1, DynamicValue prior_state 2, DynamicValue proposed_new_state 3
PlanResponse: DynamicValue planned_state 1, AttributePath* requires_replace 2,
    bool legacy_type_system 5
ApplyRequest: string type_name 1, DynamicValue prior_state 2, DynamicValue planned_state 3
ApplyResponse: DynamicValue new_state 1, Diagnostic* diagnostics 3, bool legacy_type_system 4
ImportRequest: string type_name 1, string id 2
ImportedResource: string type_name 1, DynamicValue state 2
ImportResponse: ImportedResource* imported_resources 1, Diagnostic* diagnostics 2
"""
_METHODS = {
    "GetMetadata": ("Empty", "Metadata"),
    "GetProviderSchema": ("Empty", "Schemas"),
    "ValidateProviderConfig": ("Empty", "Diagnostics2"),
    "ValidateResourceConfig": ("Empty", "Diagnostics1"),
    "ValidateDataResourceConfig": ("Empty", "Diagnostics1"),
    "ConfigureProvider": ("Empty", "Diagnostics1"),
    "UpgradeResourceState": ("UpgradeRequest", "UpgradeResponse"),
    "ReadResource": ("ReadRequest", "ReadResponse"),
    "ReadDataSource": ("DataRequest", "DataResponse"),
    "PlanResourceChange": ("PlanRequest", "PlanResponse"),
    "ApplyResourceChange": ("ApplyRequest", "ApplyResponse"),
    "ImportResourceState": ("ImportRequest", "ImportResponse"),
    "GetFunctions": ("Empty", "Empty"),
    "StopProvider": ("Empty", "Empty"),
}
_NESTING = {"single": 1, "list": 2, "set": 3, "map": 4, "group": 5}
UNKNOWN = msgspec.msgpack.Ext(0, b"\x00")
"""A value that is known after the apply."""


def _declared() -> dict[str, Any]:
    field = descriptor_pb2.FieldDescriptorProto
    scalar = {
        "bool": field.TYPE_BOOL,
        "bytes": field.TYPE_BYTES,
        "int32": field.TYPE_INT32,
        "int64": field.TYPE_INT64,
        "string": field.TYPE_STRING,
    }
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3"
    )
    for line in _MESSAGES.replace("\n    ", " ").strip().splitlines():
        name, _, fields = line.partition(":")
        message = file.message_type.add(name=name)
        for declared in filter(None, (each.strip() for each in fields.split(","))):
            kind, field_name, number = declared.split()
            added = message.field.add(
                name=field_name,
                number=int(number),
                label=field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL,
            )
            kind = kind.rstrip("*")
            if kind in scalar:
                added.type = scalar[kind]
            else:
                added.type, added.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = [each.name for each in file.message_type]
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in found
    }


MESSAGES = _declared()


def pack(value: Any) -> Any:
    """A value as Terraform sends it."""
    return MESSAGES["DynamicValue"](msgpack=msgspec.msgpack.encode(value))


def unpack(value: Any) -> Any:
    """The value of a message; unknown parts are `UNKNOWN`."""
    if not value.msgpack:
        return json.loads(value.json or b"null")
    return msgspec.msgpack.decode(value.msgpack, strict=False)


def error(summary: str) -> Any:
    return MESSAGES["Diagnostic"](severity=1, summary=summary)


def schema(block: dict[str, Any]) -> Any:
    """A schema of `terraform providers schema -json` as a message."""
    return MESSAGES["Schema"](block=_block(block))


def _block(block: dict[str, Any]) -> Any:
    made = MESSAGES["Block"](attributes=_attributes(block["attributes"]))
    for name, inner in block["blocks"].items():
        made.block_types.add(
            type_name=name,
            block=_block(inner),
            nesting=_NESTING[inner["nesting_mode"]],
            min_items=inner["min"],
            max_items=inner["max"],
        )
    return made


def _attributes(attributes: dict[str, Any]) -> list[Any]:
    return [_attribute(name, attribute) for name, attribute in attributes.items()]


def _attribute(name: str, attribute: dict[str, Any]) -> Any:
    """An attribute of a type, or of objects that have attributes (`nested`)."""
    flags = ("required", "optional", "computed", "sensitive")
    shape: dict[str, Any] = {flag: attribute.get(flag, False) for flag in flags}
    if (nested := attribute.get("nested")) is None:
        shape["type"] = json.dumps(attribute["type"]).encode()
    else:
        shape["nested_type"] = MESSAGES["NestedObject"](
            attributes=_attributes(nested), nesting=_NESTING[attribute["nesting"]]
        )
    return MESSAGES["Attribute"](name=name, **shape)


class Provider:
    """Serves an object whose methods have the names of the protocol, each from a request to a
    response. `environment`: by it Terraform finds it instead of starting a provider."""

    def __init__(self, answers: object, source: str = "hashicorp/google") -> None:
        # A socket's path has at most 108 bytes.
        directory = Path(tempfile.mkdtemp(prefix="tfp"))
        self._server = grpc.server(futures.ThreadPoolExecutor(32))
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._handler(getattr(answers, name), response),
                request_deserializer=MESSAGES[request].FromString,
                response_serializer=MESSAGES[response].SerializeToString,
            )
            for name, (request, response) in _METHODS.items()
        }
        empty = MESSAGES["Empty"]
        output = grpc.unary_stream_rpc_method_handler(
            lambda request, context: iter(()),
            request_deserializer=empty.FromString,
            response_serializer=empty.SerializeToString,
        )
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler("tfplugin6.Provider", handlers),
                grpc.method_handlers_generic_handler("plugin.GRPCStdio", {"StreamStdio": output}),
            )
        )
        socket = directory / "p"
        self._server.add_insecure_port(f"unix://{socket}")
        self._server.start()
        found = {
            "Protocol": "grpc",
            "ProtocolVersion": 6,
            "Pid": os.getpid(),
            "Test": True,
            "Addr": {"Network": "unix", "String": str(socket)},
        }
        self.environment = {"TF_REATTACH_PROVIDERS": json.dumps({source: found})}

    @staticmethod
    def _handler(answer: Callable[[Any], dict[str, Any]], response: str) -> Callable[..., Any]:
        return lambda request, context: MESSAGES[response](**answer(request))

    def close(self) -> None:
        self._server.stop(None)
