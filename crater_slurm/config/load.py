"""Reads the settings, and says for each value where it came from.

Order, later wins: defaults, the YAML file, environment variables ``CRATER_SECTION__FIELD``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from crater_slurm.config.settings import Settings
from crater_slurm.errors import ConfigError, nearest

DEFAULT_FILE = Path("/etc/crater/crater.yaml")
ENVIRONMENT_PREFIX = "CRATER_"
#: Environment variables with the prefix that are no settings.
_NOT_SETTINGS = {"CRATER_CONFIG", "CRATER_CHECK"}


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings and the origin of every value that is not a default, by dotted path."""

    settings: Settings
    origins: Mapping[str, str] = field(default_factory=dict)


def load(path: Path | None = None, environment: Mapping[str, str] | None = None) -> Loaded:
    """Settings from the file and the environment.

    ``path`` (or ``CRATER_CONFIG``) must exist; the default file may be missing. Raises ConfigError
    with file, key, problem and the nearest known key.
    """
    environ = os.environ if environment is None else environment
    named = path or (Path(environ["CRATER_CONFIG"]) if environ.get("CRATER_CONFIG") else None)
    file = named or DEFAULT_FILE
    tree: dict[str, Any] = {}
    if named or file.exists():
        tree = _read_yaml(file)
    origins = dict.fromkeys(_paths(tree), str(file))
    for name, value in environ.items():
        if not name.startswith(ENVIRONMENT_PREFIX) or "__" not in name or name in _NOT_SETTINGS:
            continue
        dotted = name[len(ENVIRONMENT_PREFIX) :].lower().split("__")
        _assign(tree, dotted, _value(name, value), name)
        origins[".".join(dotted)] = f"${name}"
    try:
        return Loaded(Settings.model_validate(tree), origins)
    except ValidationError as error:
        raise ConfigError(_explain(error, origins, str(file))) from error


def _value(name: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"${name} = {text!r} is no YAML value") from error


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"can't read the settings file {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} must hold sections such as 'filter:', not {tree!r:.60}")
    if "kubernetes" in tree:
        raise ConfigError(
            f"{file} has a 'kubernetes:' section; crater-slurm runs on Slurm, which needs "
            "'slurm: {conf: /etc/slurm/slurm.conf}' at most: remove the section"
        )
    return tree


def _paths(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key, value in tree.items():
        path = f"{prefix}{key}"
        found += _paths(value, path + ".") if isinstance(value, dict) and value else [path]
    return found


def _assign(tree: dict[str, Any], path: list[str], value: Any, name: str) -> None:
    for key in path[:-1]:
        branch = tree.setdefault(key, {})
        if not isinstance(branch, dict):
            raise ConfigError(f"${name} sets a field of {key!r}, which the file sets to a value")
        tree = branch
    tree[path[-1]] = value


def _explain(error: ValidationError, origins: Mapping[str, str], file: str) -> str:
    lines = []
    for problem in error.errors():
        path = [str(part) for part in problem["loc"]]
        dotted = ".".join(path)
        where = origins.get(dotted, file)
        if problem["type"] == "extra_forbidden":
            close = nearest(path[-1], known_keys(path[:-1]))
            hint = f"; did you mean {close}?" if close else ""
            valid = ", ".join(known_keys(path[:-1]))
            lines.append(f"{where}: unknown setting {dotted}{hint} Known here are {valid}")
        else:
            lines.append(f"{where}: {dotted} = {problem['input']!r}: {problem['msg']}")
    return "\n".join(lines)


def known_keys(path: list[str]) -> list[str]:
    """Names of the settings below a section."""
    model: type[BaseModel] = Settings
    for part in path:
        annotation = model.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
