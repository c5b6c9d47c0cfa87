"""The training layer: a state, one jitted step, evaluation, meters and writers."""

from jaxaccel.train._compiles import CompileCounter
from jaxaccel.train._evaluate import evaluate
from jaxaccel.train._flops import Peak, count_flops, data_sheet_peak, measure_peak
from jaxaccel.train._interrupt import SafeInterrupt
from jaxaccel.train._linen import from_linen
from jaxaccel.train._meter import Meter, MeterReading
from jaxaccel.train._nnx import from_nnx
from jaxaccel.train._progress import ProgressLine
from jaxaccel.train._state import TrainState
from jaxaccel.train._step import make_eval_step, make_train_step
from jaxaccel.train._task import Task, classification_loss, masked_mean
from jaxaccel.train._writers import MetricBuffer, TensorBoardWriter

__all__ = (
    "CompileCounter",
    "Meter",
    "MeterReading",
    "MetricBuffer",
    "Peak",
    "ProgressLine",
    "SafeInterrupt",
    "Task",
    "TensorBoardWriter",
    "TrainState",
    "classification_loss",
    "count_flops",
    "data_sheet_peak",
    "evaluate",
    "from_linen",
    "from_nnx",
    "make_eval_step",
    "make_train_step",
    "masked_mean",
    "measure_peak",
)
