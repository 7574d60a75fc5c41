"""Finds and renders batch script templates: the site's own first, then those that come with crater.

Rendering refuses what is missing and what was not quoted; it never guesses a value.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from crater_slurm import paths
from crater_slurm.alldata import quoting
from crater_slurm.errors import UsageError, nearest

_SUFFIX = ".sh.j2"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_LONGEST = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Template:
    """One template: its name, its file, and whether it is the site's own."""

    name: str
    file: Path
    site: bool

    @property
    def about(self) -> str:
        """The remark that it begins with."""
        found = re.match(r"\{#-?\s*(.*?)\s*-?#\}", self.text(), re.DOTALL)
        return " ".join(found.group(1).split()) if found else ""

    def text(self) -> str:
        try:
            return self.file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the template {self.file} can't be read: {error}") from error


def shipped_folder() -> Path:
    return paths.share("templates") / "jobs"


def all_templates(site: Path) -> dict[str, Template]:
    """Every template by name; a site's own hides the shipped one of its name."""
    found: dict[str, Template] = {}
    for folder, own in ((shipped_folder(), False), (site, True)):
        files = sorted(folder.glob(f"*{_SUFFIX}")) if folder.is_dir() else []
        for file in files:
            name = file.name.removesuffix(_SUFFIX)
            if _NAME.fullmatch(name):
                found[name] = Template(name, file, own)
    return found


def find(name: str, site: Path) -> Template:
    """The template of that name, or the file if it has a slash. UsageError when there is none."""
    if "/" in name:
        file = Path(name)
        if not file.is_file():
            raise UsageError(f"there is no template file {name}")
        return Template(file.name.removesuffix(_SUFFIX), file, True)
    known = all_templates(site)
    if name not in known:
        close = nearest(name, list(known))
        hint = f"did you mean {close}? " if close else ""
        raise UsageError(
            f"there is no template {name!r}; {hint}There are {', '.join(sorted(known))}, and a "
            f"site's own go to {site}"
        )
    return known[name]


def render(template: Template, values: Mapping[str, Any], site: Path) -> str:
    """The script. UsageError when the template asks for what is not there, or quotes badly."""
    environment = _environment(site, template.file.parent if template.site else site)
    try:
        text = environment.get_template(template.file.name).render(values)
    except jinja2.TemplateSyntaxError as error:
        where = f"{error.filename or template.file}, line {error.lineno}"
        raise UsageError(f"the template {where}: {error.message}") from error
    except jinja2.TemplateError as error:
        raise UsageError(f"the template {template.file}: {error.message}") from error
    except (
        UsageError,
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:
        raise UsageError(f"the template {template.file}: {error}") from error
    if len(text) > _LONGEST:
        raise UsageError(f"the template {template.file} makes a script of more than 1 MiB")
    return text if text.endswith("\n") else f"{text}\n"


@functools.lru_cache(maxsize=16)
def _environment(site: Path, beside: Path) -> jinja2.Environment:
    """Keeps compiled templates; one whose file has changed is read anew."""
    shipped = jinja2.FileSystemLoader(shipped_folder())
    environment = ImmutableSandboxedEnvironment(
        loader=jinja2.ChoiceLoader(
            [
                jinja2.FileSystemLoader([beside, site]),
                shipped,
                # So that a site's generic.sh.j2 can extend the shipped one.
                jinja2.PrefixLoader({"crater": shipped}),
            ]
        ),
        undefined=jinja2.StrictUndefined,
        finalize=quoting.strict,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # Blocks and macros hold nothing but what was let pass, so that super() may be written.
    environment.concat = _passed  # type: ignore[method-assign]
    # Jinja's own filters give texts that nobody quoted, which strict then refuses.
    environment.filters |= {"sh": quoting.sh, "sbatch": quoting.sbatch, "name": quoting.name}
    return environment


def _passed(parts: Iterable[str]) -> quoting.Quoted:
    return quoting.Quoted("".join(parts))
