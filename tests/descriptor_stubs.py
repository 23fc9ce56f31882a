"""Builds stubs from descriptors at run time, like those that protoc and its gRPC plugin generate.
This is for hosts without these programs, and works with protobuf 3.21 and later."""

import sys
import types

from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, duration_pb2  # noqa: F401
from google.protobuf import message_factory, timestamp_pb2  # noqa: F401
from google.protobuf.internal import enum_type_wrapper

_pool = descriptor_pool.Default()
if hasattr(message_factory, "GetMessageClass"):
    _class_of = message_factory.GetMessageClass
else:
    _class_of = message_factory.MessageFactory(_pool).GetPrototype


def _message(descriptor):
    """Returns the class of a message. Its attributes include the classes of nested messages."""
    made = _class_of(descriptor)
    for nested in descriptor.nested_types:
        if not hasattr(made, nested.name):
            setattr(made, nested.name, _message(nested))
    return made


def _stub(package, service):
    """Returns a class for use as FooStub(channel), with a callable for each method."""

    def connect(self, channel):
        for method in service.method:
            sides = (method.client_streaming, method.server_streaming)
            kind = "_".join("stream" if side else "unary" for side in sides)
            request, response = (_class_of(_pool.FindMessageTypeByName(name.lstrip(".")))
                                 for name in (method.input_type, method.output_type))
            call = getattr(channel, kind)(f"/{package}.{service.name}/{method.name}",
                                          request_serializer=request.SerializeToString,
                                          response_deserializer=response.FromString)
            setattr(self, method.name, call)

    return type(f"{service.name}Stub", (), {"__init__": connect})


def install(path):
    """Makes FOO_pb2 and FOO_pb2_grpc importable for each file of a FileDescriptorSet, and the
    packages that they are in."""
    for file in descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()).file:
        stem = file.name[: -len(".proto")].replace("/", ".")
        if stem.startswith("google.protobuf."):
            continue
        _pool.AddSerializedFile(file.SerializeToString())
        found = _pool.FindFileByName(file.name)
        messages, stubs = types.ModuleType(f"{stem}_pb2"), types.ModuleType(f"{stem}_pb2_grpc")
        messages.DESCRIPTOR = found
        for message in found.message_types_by_name.values():
            setattr(messages, message.name, _message(message))
        for enum in found.enum_types_by_name.values():
            setattr(messages, enum.name, enum_type_wrapper.EnumTypeWrapper(enum))
            vars(messages).update((value.name, value.number) for value in enum.values)
        for service in file.service:
            stub = _stub(file.package, service)
            setattr(stubs, stub.__name__, stub)
        sys.modules.update({messages.__name__: messages, stubs.__name__: stubs})
        parts = stem.split(".")[:-1]
        for depth in range(1, len(parts) + 1):
            package = ".".join(parts[:depth])
            if package not in sys.modules:
                sys.modules[package] = types.ModuleType(package)
                sys.modules[package].__path__ = []
