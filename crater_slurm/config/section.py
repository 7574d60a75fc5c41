"""What the parts of the settings tree have in common."""

from __future__ import annotations

from pydantic import BaseModel, BeforeValidator, ConfigDict

#: YAML 1.1 reads a bare ``off`` as false; here it is a word like the others.
OffIsAWord = BeforeValidator(lambda value: "off" if value is False else value)


class Section(BaseModel):
    """A part of the tree; an unknown key is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)
