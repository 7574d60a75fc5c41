"""What Slurm is told of a node beside what jobs use up: its features and its weight.

Features are facts that jobs may ask for by ``--constraint``. Only what can't be consumed is one;
GPUs, bandwidth and space are gres. Names are short, and are sure to mean one thing beside a site's
own features.
"""

from __future__ import annotations

from crater_slurm.model.profile import NodeProfile
from crater_slurm.slurm import words

#: Instructions that programs are built for, as the directive ``avx`` names them.
_AVX = {"avx": "avx", "avx2": "avx2", "avx512f": "avx512", "avx512_bf16": "avx512_bf16"}
#: Read latency at depth 1, µs: below 100 are data centre drives, above 200 consumer ones.
_LATENCY_CLASSES_US = (100, 200)


def features(profile: NodeProfile) -> list[str]:
    """``Feature=`` of a node: ``avx512``, ``gpu_a100-pcie-40gb``, ``cc8.0``, ``nvme_100us``.

    A faster drive has the slower classes too, so that a constraint is one word. Where drives
    differ the slowest counts, since a job can't choose the drive.
    """
    found = [name for flag, name in _AVX.items() if flag in (profile.cpu.avx or ())]
    found += dict.fromkeys(f"gpu_{gpu.model}" for gpu in profile.gpus)
    found += dict.fromkeys(
        f"cc{gpu.compute_capability}" for gpu in profile.gpus if gpu.compute_capability
    )
    latencies = [drive.read_latency_us for drive in profile.nvmes]
    known = [us for us in latencies if us is not None]
    if known and len(known) == len(latencies):
        found += [f"nvme_{limit}us" for limit in _LATENCY_CLASSES_US if max(known) <= limit]
    return [words.name("a feature", text) for text in found]


def weight(profile: NodeProfile) -> int:
    """Weight of a node: fewest GPUs first.

    Slurm takes nodes of a low weight first. With all alike, jobs fill the cluster hole by hole: a
    job without GPUs takes cores beside eight of them, and one GPU is taken of the node that a
    large job needs whole.
    """
    return 1 + len(profile.gpus)
