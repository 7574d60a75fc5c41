"""The plan's precision as torch takes it: autocast, a scaler where one is needed, a dtype."""

from __future__ import annotations

import os
import warnings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

KNOWN = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8", "int4")
#: Weights are stored so; what is computed with is a 16-bit type.
_WEIGHTS_ONLY = ("int8", "int4")


class Precision:
    """``name``: what was asked. ``compute``: fp32, bf16 or fp16, what autocast uses.
    ``device``: "cuda" or "cpu". ``dtype``: the torch type of ``compute``."""

    def __init__(self, name: str, compute: str, device: str) -> None:
        self.name = name
        self.compute = compute
        self.device = device

    @property
    def dtype(self) -> Any:
        import torch

        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.compute]

    @property
    def weights_only(self) -> bool:
        """Whether the name is about how weights are stored; loading them so is the model's part."""
        return self.name in _WEIGHTS_ONLY

    def autocast(self) -> Any:
        """A new context for the forward pass and the loss; does nothing in fp32 and tf32."""
        import torch

        return torch.amp.autocast(self.device, dtype=self.dtype, enabled=self.compute != "fp32")

    def scaler(self) -> Any:
        """A gradient scaler: a real one for fp16 on a GPU, else one that changes nothing."""
        import torch

        wanted = self.compute == "fp16" and self.device == "cuda"
        return torch.amp.GradScaler(self.device, enabled=wanted)

    def __repr__(self) -> str:
        return f"Precision({self.name!r}, computes in {self.compute} on {self.device})"


def precision(name: str | None = None, device: str | None = None) -> Precision:
    """The plan's precision, or ``name``, for this machine. Loads torch.

    bf16 becomes fp16 on a GPU without it, and fp16 becomes bf16 on a CPU, with a warning. fp8 is
    left to the library that does it (Transformer Engine): here it computes in bf16. int8 and int4
    are about weights: they compute in bf16 or fp16. tf32 allows it for matrix products. Without a
    plan and a name it is fp32.
    """
    import torch

    wanted = (name or os.environ.get("CRATER_PRECISION") or "fp32").strip().lower()
    if wanted not in KNOWN:
        raise ValueError(f"precision {wanted!r:.40} is not known; known are {', '.join(KNOWN)}.")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if wanted in ("fp32", "tf32"):
        if wanted == "tf32":
            torch.backends.cuda.matmul.allow_tf32 = True
            torch.backends.cudnn.allow_tf32 = True
        return Precision(wanted, "fp32", device)
    compute = "fp16" if wanted == "fp16" else "bf16"
    if device == "cpu" and compute == "fp16":
        warnings.warn(
            "fp16 is for GPUs; on this CPU the step computes in bf16.", RuntimeWarning, stacklevel=2
        )
        compute = "bf16"
    if device == "cuda" and compute == "bf16" and not _has_bf16(torch):
        if wanted == "bf16":
            warnings.warn(
                f"{torch.cuda.get_device_name()} has no bf16; the step computes in fp16 with a "
                "gradient scaler instead.",
                RuntimeWarning,
                stacklevel=2,
            )
        compute = "fp16"
    return Precision(wanted, compute, device)


def _has_bf16(torch: Any) -> bool:
    """Whether the card itself has it; torch also counts cards on which it is emulated."""
    try:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    except TypeError:
        return bool(torch.cuda.is_bf16_supported())
