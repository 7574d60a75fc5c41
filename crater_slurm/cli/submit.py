"""``crater submit`` and ``crater-submit``: a task becomes a job; any other line is sbatch's own.

Whether the words are a task's or sbatch's is told by the first one that is no option: a file that
holds a JSON object, ``-``, or a name that ends in .json is a task, everything else goes to sbatch
unchanged: options, output and exit code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from crater_slurm.alldata import options
from crater_slurm.files import is_file
from crater_slurm.slurm.environment import clean_environment

#: Our own options that have a value behind them; for sbatch's, options knows.
_VALUED = frozenset({"--template", "--server", "--token-file", "--timeout"})
_FLAGS = frozenset({"--dry-run", "--cancel-on-signal", "--json", "--again"})


def task_place(words: Sequence[str]) -> int | None:
    """Where the task is among the words; None when they are sbatch's alone."""
    place = options.first_word(words, _FLAGS)
    if place is None:
        return None
    word = words[place]
    if word == "-" or word.endswith(".json"):
        return place
    if not is_file(word):
        return None  # sbatch reads a pipe itself, or says what is wrong
    try:
        with Path(word).open("rb") as file:
            return place if file.read(256).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") else None
    except OSError:
        return None  # sbatch says in its own words what is wrong with it


def main(arguments: Sequence[str] | None = None) -> int:
    """``crater-submit``. Where the words are sbatch's it becomes sbatch, or returns a status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if task_place(words) is not None or words in (["--help"], ["-h"]):
        from crater_slurm.cli.main import crater

        crater.main(["submit", *words], prog_name="crater-submit")
    return become_sbatch(words)


def become_sbatch(words: Sequence[str]) -> int:
    """Replace this process by sbatch; returns only when that is impossible."""
    try:
        os.execvpe("sbatch", ["sbatch", *words], clean_environment(os.environ))  # noqa: S606
    except OSError as error:
        print(
            f"crater-submit: ERROR: can't run sbatch ({error.strerror}); "
            "install Slurm's client commands or put them on PATH",
            file=sys.stderr,
        )
    return 4


class _Words(click.Command):
    """Takes its words apart before click does: the task, our options, sbatch's, and what runs."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] in ("--help", "-h"):
            return super().parse_args(ctx, args or ["--help"])
        place = task_place(args)
        ctx.meta["words"] = args
        if place is None:
            return super().parse_args(ctx, [])
        behind = args[place + 1 :]
        cut = behind.index("--") if "--" in behind else len(behind)
        ctx.meta["task"] = args[place]
        ctx.meta["program"] = tuple(behind[cut + 1 :])
        before = [word for word in args[:place] if word != "--"]
        own, other = self._sort([*before, *behind[:cut]])
        ctx.meta["sbatch"] = tuple(other)
        return super().parse_args(ctx, own)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own = ctx.find_root().info_name == "crater-submit"
        name = "crater-submit" if own else ctx.command_path
        formatter.write_usage(name, " ".join(self.collect_usage_pieces(ctx)))

    def _sort(self, words: list[str]) -> tuple[list[str], list[str]]:
        """Our options and sbatch's, each with its value."""
        known = {name for parameter in self.params for name in parameter.opts}
        own: list[str] = []
        other: list[str] = []
        left = iter(words)
        for word in left:
            name = word.partition("=")[0]
            ours = name in known
            (own if ours else other).append(word)
            valued = name in _VALUED and "=" not in word if ours else options.takes_next(word)
            if valued and word.startswith("-") and (value := next(left, None)) is not None:
                (own if ours else other).append(value)
            elif not word.startswith("-"):
                raise click.UsageError(
                    f"{word!r} is no option; put -- before a program: "
                    "crater submit task.json -- train.py --epochs 3"
                )
        return own, other


@click.command(cls=_Words, options_metavar="[OPTIONS] TASK.json [SBATCH OPTIONS] [-- PROGRAM...]")
@click.option("--dry-run", is_flag=True, help="Print the script and the command; submit nothing.")
@click.option("--test-only", is_flag=True, help="Let Slurm and crater judge it; submit nothing.")
@click.option("--wait", is_flag=True, help="Wait for the job's end; exit with its exit code.")
@click.option("--cancel-on-signal", is_flag=True, help="With --wait: SIGTERM cancels the job.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--parsable", is_flag=True, help="Print the job's id alone, as sbatch does.")
@click.option("--again", is_flag=True, help="A new job for a task whose job has ended.")
@click.option("--template", metavar="NAME", help="Another template than the task type's.")
@click.option("--server", metavar="URL", help="Send it to crater-scheduler there, not to sbatch.")
@click.option("--token-file", type=click.Path(path_type=Path), help="Bearer token for --server.")
@click.option("--timeout", type=click.FloatRange(min=0.1), metavar="SECONDS",
              help="Longest time for sbatch, or for an answer of the server.")  # fmt: skip
def submit(**flags: Any) -> None:
    """Submit a task as a job.

    TASK.json holds the task ('crater schema task'); - reads it from standard input. Options that
    are not listed here are sbatch's and win over the task's. PROGRAM runs instead of the task's
    own. Without a task all words are sbatch's. Exit codes are in docs/submit.md.
    """
    ctx = click.get_current_context()
    if "task" not in ctx.meta:
        ctx.exit(become_sbatch(ctx.meta["words"]))
    from crater_slurm.cli.submit_task import Order, run

    order = Order(
        task=ctx.meta["task"],
        program=ctx.meta["program"],
        options=ctx.meta["sbatch"],
        **flags,
    )
    ctx.exit(run(order))
