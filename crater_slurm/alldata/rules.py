"""What one field of a task may hold. The meaning of a field that is also a #CRATER directive
comes from the table of directives, so that the two spellings can't drift apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from crater_slurm.model.request import BY_KEY, Requirement

_WHOLE = frozenset({"integer", "count", "mib", "gb", "parameters", "seconds"})
_REAL = frozenset({"bandwidth", "latency"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One field's rule, to be written into its annotation. ``nullable``: null is no wish."""

    meaning: str = ""
    example: Any = None
    nullable: bool = True

    def check(self, value: Any) -> Any:
        """The value, in the one form that crater uses; ValueError says what is valid."""
        raise NotImplementedError

    def schema(self) -> dict[str, Any]:
        """JSON Schema of the value where it is not null."""
        raise NotImplementedError

    def _checked(self, value: Any) -> Any:
        if value is None and self.nullable:
            return None
        try:
            return self.check(value)
        except WrongTypeError as error:
            raise PydanticCustomError("type", "{words}", {"words": str(error)}) from None
        except ValueError as error:
            raise PydanticCustomError("value", "{words}", {"words": str(error)}) from None

    def __get_pydantic_core_schema__(self, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(
        self, _: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = {"description": self.meaning} | self.schema()
        if self.example is not None:
            schema.setdefault("examples", [self.example])
        if self.nullable:
            if "enum" in schema:
                schema["enum"] = [*schema["enum"], None]
            else:
                schema["type"] = [schema["type"], "null"]
        return schema


class WrongTypeError(ValueError):
    """The value is not even of the right JSON type."""


def whole(value: Any) -> int:
    """A JSON integer, which may be written 2.0."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if type(value) is not int:
        raise WrongTypeError("must be a whole number")
    return value


def real(value: Any) -> float:
    if type(value) not in (int, float):
        raise WrongTypeError("must be a number")
    return float(value)


def yes_or_no(value: Any) -> bool:
    if type(value) is not bool:
        raise WrongTypeError("must be true or false")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise WrongTypeError("must be a text")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive(Rule):
    """A field that says what the #CRATER directive ``key`` says, in that directive's own unit.

    ``also`` are further spellings that the source text's platform may use.
    """

    key: str
    also: dict[Any, Any] = field(default_factory=dict)

    @property
    def requirement(self) -> Requirement:
        return BY_KEY[self.key]

    def check(self, value: Any) -> Any:
        known = value.lower() if isinstance(value, str) else value
        if isinstance(known, str | bool) and known in self.also:
            return self.also[known]
        requirement = self.requirement
        if requirement.kind == "boolean":
            return yes_or_no(value)
        if requirement.kind in _WHOLE:
            return requirement.check(whole(value))
        if requirement.kind in _REAL:
            return requirement.check(real(value))
        return requirement.parse(text(value))

    def schema(self) -> dict[str, Any]:
        requirement = self.requirement
        schema = requirement.json_schema() | {"x-directive": self.key}
        if requirement.choices:
            return schema | {"enum": [*requirement.choices, *self.also]}
        if requirement.kind in _WHOLE:
            schema["type"] = "integer"
        schema["examples"] = [self.example or _example(requirement)]
        if schema["type"] == "string":
            schema |= {"minLength": 1, "maxLength": 512}
        return schema


def _example(requirement: Requirement) -> Any:
    parsed = requirement.parse(requirement.example)
    return int(parsed) if isinstance(parsed, float) and parsed.is_integer() else parsed


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(Rule):
    """A text of one line; ``pattern`` is matched whole and ``form`` says it in words."""

    pattern: str = ""
    form: str = ""
    longest: int = 1024

    def check(self, value: Any) -> str:
        found = text(value)
        if not found or len(found) > self.longest:
            raise ValueError(f"must have 1 to {self.longest} characters")
        if self.pattern and not re.fullmatch(self.pattern, found):
            raise ValueError(f"must be {self.form}")
        return found

    def schema(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": self.longest}
        return schema | ({"pattern": f"^({self.pattern})$"} if self.pattern else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Rule):
    """One of a few words."""

    choices: tuple[str, ...]

    def check(self, value: Any) -> str:
        if text(value) not in self.choices:
            raise ValueError(f"takes {', '.join(self.choices)}")
        return str(value)

    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.choices)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Number(Rule):
    """A whole number within bounds."""

    minimum: int
    maximum: int

    def check(self, value: Any) -> int:
        number = whole(value)
        if not self.minimum <= number <= self.maximum:
            raise ValueError(f"must be {self.minimum:,} to {self.maximum:,}")
        return number

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.minimum, "maximum": self.maximum}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag(Rule):
    """true or false."""

    def check(self, value: Any) -> bool:
        return yes_or_no(value)

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Words(Rule):
    """A list of texts, such as a command's words; ``each`` may say more of one of them."""

    most: int = 256
    each: Callable[[str], None] = lambda word: None
    pattern: str = ""

    def check(self, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list | tuple):
            raise WrongTypeError("must be a list of texts")
        if len(value) > self.most:
            raise ValueError(f"must have at most {self.most} entries, not {len(value)}")
        for index, word in enumerate(value):
            if not isinstance(word, str):
                raise WrongTypeError(f"must be a list of texts; number {index} is none")
            self.each(word)
        return tuple(value)

    def schema(self) -> dict[str, Any]:
        item = {"type": "string"} | ({"pattern": f"^({self.pattern})$"} if self.pattern else {})
        return {"type": "array", "items": item, "maxItems": self.most}
