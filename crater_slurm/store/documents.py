"""Loads YAML and JSON files whose mistakes would otherwise pass unseen.

PyYAML keeps the last of two equal keys without a word; in a list of drives or nodes that loses
one of them, so here it is an error with its line.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from crater_slurm.errors import UsageError

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue  # "<<: *other", whose keys are meant to be overridden
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is there twice", key_node.start_mark
                )
            if isinstance(key, Hashable):
                seen.add(key)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def load_documents(file: Path) -> list[Any]:
    """Every YAML document of the file, or the one of a ``.json`` file; empty ones are left out.

    Raises UsageError with the file, and the line where there is one.
    """
    try:
        content = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"can't read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not text in UTF-8: {error.reason}") from error
    try:
        if file.suffix == ".json":
            return [json.loads(content)]
        documents = list(yaml.load_all(content, Loader=_Loader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} can't be read: {error}") from error
    return [document for document in documents if document is not None]
