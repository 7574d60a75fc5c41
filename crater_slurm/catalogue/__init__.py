"""What is known of GPU models before anything is measured. Data only; guesses nothing."""

from crater_slurm.catalogue.complete import complete, complete_profile, doubts
from crater_slurm.catalogue.models import GpuModel, by_pci_id, gpu_models, lookup, model_id

__all__ = [
    "GpuModel",
    "by_pci_id",
    "complete",
    "complete_profile",
    "doubts",
    "gpu_models",
    "lookup",
    "model_id",
]
