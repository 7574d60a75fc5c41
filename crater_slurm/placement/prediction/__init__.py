"""What a workload needs, before it runs: GPU memory, host memory, cores, SSD. Pure arithmetic."""

from crater_slurm.placement.prediction.calibrate import Peak, Trace
from crater_slurm.placement.prediction.memory import Prediction, predict
from crater_slurm.placement.prediction.states import Term

__all__ = ["Peak", "Prediction", "Term", "Trace", "predict"]
