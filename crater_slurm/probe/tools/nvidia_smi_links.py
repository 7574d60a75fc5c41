"""NVLinks and chip-to-chip links of ``nvidia-smi nvlink -s`` and ``nvidia-smi c2c -s``.

Both print one header line for each GPU and below it a line for each link, or a sentence that
says why there are none.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from crater_slurm.errors import CraterError
from crater_slurm.probe.tools.values import number

_GPU = re.compile(r"GPU (\d{1,6}): (.{0,200}?) ?\(UUID: (\S{1,80})\)")
_LINK = re.compile(r"(?:C2C )?Link (\d{1,4}): (.+)")
#: Line rates that the driver reports before error correction, which takes one part in 17
#: (RS-FEC 514/544 and 256b/257b), and what a link carries: NVLink 4 and 5 in GB/s, one direction.
_AFTER_LINE_CODE = {26.562: 25.0, 26.563: 25.0, 53.125: 50.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLinks:
    """Links of one GPU: GB/s of each in one direction by number, None for an inactive one."""

    index: int
    name: str
    uuid: str
    speeds_gb_s: tuple[float | None, ...] = ()
    reason: str | None = None


def parse(text: str) -> tuple[GpuLinks, ...]:
    """GPUs with their links. Raises CraterError when a link comes out of order or before a GPU."""
    gpus: list[GpuLinks] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if gpu := _GPU.fullmatch(line):
            index, name, uuid = gpu.groups()
            gpus.append(GpuLinks(index=int(index), name=name, uuid=uuid))
        elif not gpus:
            raise CraterError(f"nvidia-smi links: {line[:200]}")
        elif link := _LINK.fullmatch(line):
            speeds = gpus[-1].speeds_gb_s
            if int(link.group(1)) != len(speeds):
                raise CraterError(
                    f"nvidia-smi links: link {link.group(1)} of GPU {gpus[-1].index} comes after "
                    f"{len(speeds)} links"
                )
            gpus[-1] = dataclasses.replace(gpus[-1], speeds_gb_s=(*speeds, number(link.group(2))))
        else:
            gpus[-1] = dataclasses.replace(gpus[-1], reason=line[:200])
    return tuple(gpus)


def carried_gb_s(line_rate_gb_s: float) -> float:
    """What an NVLink carries in one direction, of the line rate that the driver reports."""
    return _AFTER_LINE_CODE.get(round(line_rate_gb_s, 3), line_rate_gb_s)
