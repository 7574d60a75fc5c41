"""sbatch's command line, as far as it has to be understood: which words are options, which are
their values, and which is the script. Everything else about them is sbatch's own business.
"""

from __future__ import annotations

from collections.abc import Sequence

from crater_slurm.errors import UsageError

#: Options without a value behind them; ``--option=value`` needs no table.
_FLAGS = frozenset(
    {
        *("--contiguous", "--exclusive", "--get-user-env", "--help", "--hold", "--ignore-pbs"),
        *("--nice", "--no-kill", "--no-requeue", "--overcommit", "--oversubscribe", "--parsable"),
        *("--propagate", "--quiet", "--reboot", "--requeue", "--resv-ports", "--share"),
        *("--spread-job", "--stepmgr", "--test-only", "--usage", "--use-min-nodes", "--verbose"),
        *("--version", "--wait"),
    }
)
_SHORT_FLAGS = frozenset("hHIkOQsuvVW")
#: Short options that mean the same as a long one, where it matters here.
_LONG = {"-c": "--cpus-per-task", "-n": "--ntasks", "-G": "--gpus", "-a": "--array"}


def takes_next(word: str) -> bool:
    """Whether the word behind this option is its value."""
    if word.startswith("--"):
        known = any(flag.startswith(word) for flag in _FLAGS)
        return "=" not in word and not known
    # -p gpu, -pgpu, -vp gpu
    for place, letter in enumerate(word[1:], start=1):
        if letter not in _SHORT_FLAGS:
            return place == len(word) - 1
    return False


def first_word(words: Sequence[str], flags: frozenset[str] = frozenset()) -> int | None:
    """Where the script, or task, is among the words; None when there is none.

    ``flags`` are further options without a value.
    """
    skip = False
    for place, word in enumerate(words):
        if skip:
            skip = False
        elif word == "--":
            return place + 1 if place + 1 < len(words) else None
        elif word == "-" or not word.startswith("-"):
            return place
        else:
            skip = word not in flags and takes_next(word)
    return None


def said(words: Sequence[str]) -> set[str]:
    """Names of the options among sbatch's words, both names where a short one has a long one."""
    names: set[str] = set()
    skip = False
    for word in words:
        if skip:
            skip = False
            continue
        if word.startswith("--"):
            names.add(word.partition("=")[0])
        elif word.startswith("-") and len(word) > 1:
            names |= {word[:2], _LONG.get(word[:2], word[:2])}
        skip = word.startswith("-") and takes_next(word)
    return names


def take(words: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """The value of a long option, and the words without it; the last one counts, as for sbatch."""
    value: str | None = None
    rest: list[str] = []
    left = iter(words)
    for word in left:
        if word == name:
            value = next(left, None)
            if value is None:
                raise UsageError(f"{name} needs a value")
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
        else:
            rest.append(word)
            if word.startswith("-") and takes_next(word):
                rest.extend(word for word in [next(left, None)] if word is not None)
    return value, rest
