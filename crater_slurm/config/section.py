"""What the parts of the settings tree have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the tree; an unknown key is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)
