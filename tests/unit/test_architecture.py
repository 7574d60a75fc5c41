"""What the design promises of the whole tree: floors, no circles, thin edges, all documented."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from crater_slurm import errors
from crater_slurm.cli.main import COMMANDS
from crater_slurm.config.sample import markdown_table
from crater_slurm.model.request import REQUIREMENTS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "crater_slurm"
DOCS = "\n".join(p.read_text() for p in sorted((ROOT / "docs").glob("*.md")))

#: What a part may import of the package; errors and the version are everybody's.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "paths": set(),
    "files": set(),
    "guard": set(),
    "systemd": set(),
    "model": set(),
    "config": {"model"},
    "catalogue": {"model"},
    "slurm": {"model", "paths"},
    "probe": {"model", "catalogue"},
    "store": {"model", "catalogue"},
    "placement": {"model", "catalogue"},
    "topology": {"model"},
    "scheduler": {"model", "config", "slurm", "store", "placement", "alldata", "hooks"},
    "checkpoint": {"job"},
    "node": {"model", "config", "slurm", "probe", "hooks", "paths", "job", "checkpoint"},
    "sensor": {"model", "config", "slurm", "probe", "store"},
    "lab": {"model", "config", "slurm", "probe", "store", "paths"},
    "simulate": {"model", "placement"},
    "alldata": {"model", "config", "catalogue", "slurm", "store", "placement", "paths"},
    "cli": {
        *("model", "config", "catalogue", "slurm", "probe", "store", "paths"),
        *("placement", "topology", "scheduler", "node", "lab", "sensor", "simulate"),
        *("alldata", "checkpoint"),
    },
    "hooks": set(),
    "job": set(),
}
#: Parts that do no I/O: nothing of these may be imported there.
PURE = {"model", "placement", "catalogue", "topology"}
#: What a training script may have; imported on use, or by a module that is for it alone.
FRAMEWORKS = {"torch", "numpy", "lightning", "lightning_fabric", "transformers"}
OUTSIDE = {"socket", "subprocess", "os", "sqlite3", "sqlalchemy", "http", "urllib", "threading"}


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    words = module.split(".")
    return words[1] if len(words) > 1 else ""


def type_checking(tree: ast.Module) -> set[ast.AST]:
    """Everything below ``if TYPE_CHECKING``, which never runs."""
    found: set[ast.AST] = set()
    for branch in ast.walk(tree):
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.dump(branch.test):
            for statement in branch.body:
                found |= set(ast.walk(statement))
    return found


def imports(path: Path, *, lazy: bool) -> Iterator[str]:
    """Modules that a file imports; with ``lazy`` also those that functions import when called."""
    tree = ast.parse(path.read_text())
    apart = set() if lazy else type_checking(tree)
    inside = {
        node
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if node in apart or (not lazy and node in inside):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            assert node.module
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if is_module(inner) else node.module


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def test_every_part_has_its_floor() -> None:
    parts = {part_of(name_of(p)) for p in modules()} - {""}
    assert parts <= MAY_IMPORT.keys(), "a new part: say in MAY_IMPORT on which floor it stands"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_imports_only_floors_below_its_own(path: Path) -> None:
    part = part_of(name_of(path))
    allowed = MAY_IMPORT.get(part, set()) | {part, "errors", "files", "guard", "systemd", ""}
    used = {part_of(m) for m in imports(path, lazy=True) if m.split(".")[0] == "crater_slurm"}
    assert used <= allowed


def test_the_floors_themselves_have_no_circle() -> None:
    left = dict(MAY_IMPORT)
    while left:
        lowest = {part for part, below in left.items() if not below & left.keys()}
        assert lowest, f"a circle among {sorted(left)}"
        for part in lowest:
            del left[part]


def test_no_module_is_imported_by_what_it_imports_itself() -> None:
    graph = {
        name_of(p): {m for m in imports(p, lazy=False) if m.startswith("crater_slurm.")}
        for p in modules()
    }
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join([*above[above.index(module) :], module])
        if module in done:
            return
        for below in sorted(graph.get(module, ())):
            visit(below, (*above, module))
        done.add(module)

    for module in graph:
        visit(module, ())
    assert len(done) >= len(graph)


@pytest.mark.parametrize(
    "path", [p for p in modules() if part_of(name_of(p)) in {"hooks", "job"}], ids=name_of
)
def test_hooks_and_job_need_the_standard_library_alone(path: Path) -> None:
    optional = FRAMEWORKS if part_of(name_of(path)) == "job" else set()
    used = {m.split(".")[0] for m in imports(path, lazy=True)} - {"crater_slurm"}
    assert used <= sys.stdlib_module_names | {"__future__", "frame"} | optional


def test_torch_is_loaded_only_by_calls_into_the_modules_that_need_it() -> None:
    job = {name_of(p): set(imports(p, lazy=False)) for p in (PACKAGE / "job").rglob("*.py")}
    heavy = {name for name, used in job.items() if any(m.split(".")[0] == "torch" for m in used)}
    assert heavy, "nothing in job/ needs torch any more: drop this test"
    for name in job.keys() - heavy:
        assert not job[name] & heavy, f"{name} would load torch with itself"


@pytest.mark.parametrize("path", [p for p in modules() if part_of(name_of(p)) in PURE], ids=name_of)
def test_the_parts_that_decide_reach_nothing_outside(path: Path) -> None:
    used = {m.split(".")[0] for m in imports(path, lazy=True)}
    assert not used & OUTSIDE


def test_placement_knows_nothing_of_slurm_s_words() -> None:
    """Options may be named to a user, job_desc's fields may not: those are slurm/'s."""
    for path in (PACKAGE / "placement").glob("*.py"):
        assert not re.search(r"tres_per|num_tasks|exc_nodes|bitflags|job_desc", path.read_text())


def test_help_is_instant_because_nothing_heavy_is_loaded() -> None:
    code = (
        "import sys; import crater_slurm.cli.main; "
        "print(*sorted({'pydantic','sqlalchemy','fastapi','yaml','jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda r: r.key)
def test_every_directive_is_documented(requirement: object) -> None:
    row = f"| `{requirement.key}` |"  # type: ignore[attr-defined]
    assert row in (ROOT / "docs" / "directives.md").read_text()


def test_every_setting_is_documented_with_its_default() -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    between = re.search(r"<!-- settings -->\n(.*)\n<!-- end of settings -->", text, re.DOTALL)
    assert between is not None
    assert between.group(1) == markdown_table()


def error_classes(base: type[errors.CraterError]) -> Iterator[type[errors.CraterError]]:
    yield base
    for below in base.__subclasses__():
        yield from error_classes(below)


def test_every_exit_code_is_documented_and_no_other() -> None:
    own = [c for c in error_classes(errors.CraterError) if c.__module__ == errors.__name__]
    codes = {str(c.exit_code) for c in own} | {"0", "141"}
    text = (ROOT / "docs" / "reference.md").read_text().partition("## Exit codes")[2]
    assert set(re.findall(r"^\| (\d+) \|", text, re.MULTILINE)) == codes
    for found in own:
        assert f"exit code {found.exit_code}." in (found.__doc__ or "")


def test_each_exit_code_has_one_meaning() -> None:
    direct = [
        c.exit_code for c in errors.CraterError.__subclasses__() if c.__module__ == errors.__name__
    ]
    assert len(direct) == len(set(direct))
    assert errors.CraterError.exit_code not in direct


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_documented(command: str) -> None:
    assert f"crater {command}" in DOCS + (ROOT / "README.md").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_links_in_the_documentation_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_opens_by_saying_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))
