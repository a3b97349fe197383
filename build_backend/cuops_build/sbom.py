"""The software bill of materials inside each wheel (PEP 770), in CycloneDX: the same bytes for the same build."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import metadata
from typing import Any

EMBEDDED = ("apache-tvm-ffi", "ziglang")  # whose headers and runtime are compiled into a backend's library


def _purl(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version}"


def _component(name: str, version: str, scope: str) -> dict[str, Any]:
    purl = _purl(name, version)
    return {"type": "library", "name": name, "version": version, "scope": scope, "bom-ref": purl, "purl": purl}


def cyclonedx(name: str, version: str, licenses: str, toolchain: Iterable[str] = ()) -> bytes:
    """The bill of `name`: what the wheels of `toolchain` (name==version) and the compiler left in it."""
    pins = [tuple(pin.split("==")) for pin in toolchain]
    if pins:
        pins += [(package, metadata.version(package)) for package in EMBEDDED]
    root = {
        "type": "library",
        "name": name,
        "version": version,
        "bom-ref": _purl(name, version),
        "purl": _purl(name, version),
    }
    root["licenses"] = [{"expression": licenses}]  # type: ignore[assignment]
    bill = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": root},
        "components": [_component(package, pin, "required") for package, pin in sorted(pins)],
        "dependencies": [{"ref": root["bom-ref"], "dependsOn": [_purl(*pin) for pin in sorted(pins)]}],
    }
    return (json.dumps(bill, indent=2) + "\n").encode()
