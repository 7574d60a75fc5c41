"""``python -m crater_slurm.job.checkpoint``: look at checkpoints, compare them with their sums, and
make one file for torch.load of one."""

from __future__ import annotations

import argparse
import os
import sys

from crater_slurm.job import layout
from crater_slurm.job.find import Found, look, newest_first, scan
from crater_slurm.job.unpack import DamagedError, crc32, read_state

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0, 1 where something is damaged or missing, 2 for a wrong command line."""
    parser = argparse.ArgumentParser(prog="python -m crater_slurm.job.checkpoint")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("list", "steps in a folder, newest first"),
        ("verify", "compare files with their checksums"),
        ("export", "write a step's state as one file for torch.load"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("folder", help="folder of checkpoints, or of one step")
        if name == "export":
            command.add_argument("output", help="file to write")
            command.add_argument("--rank", type=int, help="one rank's state instead of all")
            command.add_argument("--trust", action="store_true", help="read another user's files")
    options = parser.parse_args(arguments)
    found = _steps(options.folder)
    if not found:
        print(f"crater: no checkpoint is in {options.folder}", file=sys.stderr)
        return 1
    if options.command == "list":
        return _list(found)
    return _verify(found) if options.command == "verify" else _export(found, options)


def _steps(folder: str) -> list[Found]:
    """Steps of every name in a folder, or the one that it is itself."""
    folder = os.path.normpath(folder)
    own = layout.parse_step_name(os.path.basename(os.path.abspath(folder)))
    if own is not None:
        return newest_first(look(folder, own[1], own[0]))
    try:
        parsed = (layout.parse_step_name(entry) for entry in os.listdir(folder))
        names = sorted({step[0] for step in parsed if step is not None})
    except OSError as error:
        print(f"crater: couldn't list {folder}: {error.strerror}", file=sys.stderr)
        return []
    return [found for name in names for found in newest_first(scan(folder, name))]


def _list(found: list[Found]) -> int:
    print(f"{'step':<24} {'ranks':>9} {'bytes':>16}  run")
    for step in found:
        size = sum(part.size for part in step.parts)
        ranks = f"{len(step.ranks)}/{step.world_size}"
        print(f"{os.path.basename(step.folder):<24} {ranks:>9} {size:>16,}  {step.run}")
    return 0


def _verify(found: list[Found]) -> int:
    worst = 0
    for step in found:
        name = os.path.basename(step.folder)
        wrong = [] if layout.covers(step.parts) else ["not all ranks are here"]
        for part in step.parts:
            for entry in part.files:
                problem = layout.check_file(os.path.join(step.folder, entry.name), entry, crc32())
                wrong.extend([problem] if problem else [])
        print(f"{name}: {'; '.join(wrong) or 'good'}")
        worst = max(worst, 1 if wrong else 0)
    return worst


def _export(found: list[Found], options: argparse.Namespace) -> int:
    whole = [step for step in found if layout.covers(step.parts) or options.rank in step.ranks]
    if not whole:
        print("crater: no step is complete; --rank takes one rank's state", file=sys.stderr)
        return 1
    step = whole[0]
    wanted = sorted(step.ranks) if options.rank is None else [options.rank]
    try:
        import torch

        states = {}
        for rank in wanted:
            entry = step.file(rank)
            if entry is None:
                raise DamagedError(f"{step.folder} has no rank {rank}")
            path = os.path.join(step.folder, entry.name)
            states[rank] = read_state(path, entry, trust=options.trust)
        state = states[wanted[0]] if len(states) == 1 else states
        torch.save(state, options.output)
    except (DamagedError, ValueError, OSError, ImportError) as error:
        print(f"crater: couldn't export {step.folder}: {error}", file=sys.stderr)
        return 1
    print(f"{options.output}: {os.path.basename(step.folder)}, rank {', '.join(map(str, wanted))}")
    return 0
