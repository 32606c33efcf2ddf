# SPDX-License-Identifier: Apache-2.0
"""Records what a version said and how: `python -m tests.compat.record v0.1` writes tests/compat/v0.1/.

descriptors.binpb   the contract, as a file descriptor set with its imports
messages.json       bytes of one request and reply of every kind
client.zip          the client of then, runnable: `python client.zip ADDRESS` runs smoke.py against a server
Record once, when a version is released; a recorded folder never changes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from kvgrpc.v1 import admin_pb2, cache_pb2, common_pb2, engine_pb2

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ("__init__.py", "api.py", "status.py", "client", "core", "transfer", "v1", "wire")
MODULES = (common_pb2, cache_pb2, engine_pb2, admin_pb2)


def sample(descriptor: Descriptor, depth: int = 0) -> dict[str, Any]:
    """Values for every field of a message, as protobuf's JSON-like dict; the first member of each oneof is set."""
    values: dict[str, Any] = {}
    for number, field in enumerate(descriptor.fields, start=1):
        if field.containing_oneof is not None and field.containing_oneof.fields[0] is not field:
            continue
        values[field.name] = _value(field, number, depth)
    return values


def _value(field: FieldDescriptor, number: int, depth: int) -> Any:
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        return {"key": number}
    if message is not None:
        one: Any = sample(message, depth + 1)
    elif field.enum_type is not None:
        one = field.enum_type.values[-1].number
    elif field.type == FieldDescriptor.TYPE_BYTES:
        one = bytes(range(16))
    elif field.type == FieldDescriptor.TYPE_STRING:
        one = f"{field.name}-0123456789abcdef"
    elif field.type == FieldDescriptor.TYPE_BOOL:
        one = True
    else:
        one = number
    return [one, one] if field.is_repeated else one


def messages() -> dict[str, str]:
    """Hex of a filled message of every type, by full name."""
    out: dict[str, str] = {}
    for module in MODULES:
        for name in module.DESCRIPTOR.message_types_by_name:
            message = getattr(module, name)
            filled = message(**sample(message.DESCRIPTOR))
            out[message.DESCRIPTOR.full_name] = filled.SerializeToString(deterministic=True).hex()
    return out


def write_client(path: Path) -> None:
    """A zip whose bytes depend on the sources only."""
    package = ROOT / "kvgrpc"
    files = [package / name for name in CLIENT if (package / name).is_file()]
    files += [file for name in CLIENT for file in sorted((package / name).rglob("*.py")) if (package / name).is_dir()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            archive.writestr(zipfile.ZipInfo(str(file.relative_to(ROOT))), file.read_bytes(), zipfile.ZIP_DEFLATED)
        smoke = ROOT / "tests/compat/smoke.py"
        archive.writestr(zipfile.ZipInfo("__main__.py"), smoke.read_bytes(), zipfile.ZIP_DEFLATED)


def main() -> None:
    folder = ROOT / "tests/compat" / sys.argv[1]
    folder.mkdir(exist_ok=True)
    protos = sorted(str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").rglob("*.proto"))
    image = folder / "descriptors.binpb"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "proto", "--include_imports"]
    subprocess.run([*command, f"--descriptor_set_out={image}", *protos], cwd=ROOT, check=True)
    (folder / "messages.json").write_text(json.dumps(messages(), indent=1, sort_keys=True) + "\n")
    write_client(folder / "client.zip")
    print(f"recorded {folder.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
