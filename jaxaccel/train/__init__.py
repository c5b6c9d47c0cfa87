"""The training layer: a state, one jitted step, evaluation, meters and writers."""

from jaxaccel.train._compare import Comparison, compare
from jaxaccel.train._compiles import CompileCounter
from jaxaccel.train._console import ConsoleWriter
from jaxaccel.train._evaluate import evaluate
from jaxaccel.train._flops import Peak, count_flops, data_sheet_peak, measure_peak
from jaxaccel.train._interrupt import SafeInterrupt
from jaxaccel.train._jsonl import JsonLinesWriter, read_json_lines
from jaxaccel.train._linen import from_linen
from jaxaccel.train._meter import Meter, MeterReading
from jaxaccel.train._nnx import from_nnx
from jaxaccel.train._progress import ProgressLine
from jaxaccel.train._prometheus import PrometheusWriter
from jaxaccel.train._resources import ResourceMonitor
from jaxaccel.train._state import TrainState
from jaxaccel.train._step import make_eval_step, make_train_step
from jaxaccel.train._task import Task, classification_loss, masked_mean
from jaxaccel.train._tensorboard import TensorBoardWriter
from jaxaccel.train._wandb import WandbWriter
from jaxaccel.train._writers import MetricBuffer, Writer, Writers

__all__ = (
    "Comparison",
    "CompileCounter",
    "ConsoleWriter",
    "JsonLinesWriter",
    "Meter",
    "MeterReading",
    "MetricBuffer",
    "Peak",
    "ProgressLine",
    "PrometheusWriter",
    "ResourceMonitor",
    "SafeInterrupt",
    "Task",
    "TensorBoardWriter",
    "TrainState",
    "WandbWriter",
    "Writer",
    "Writers",
    "classification_loss",
    "compare",
    "count_flops",
    "data_sheet_peak",
    "evaluate",
    "from_linen",
    "from_nnx",
    "make_eval_step",
    "make_train_step",
    "masked_mean",
    "measure_peak",
    "read_json_lines",
)
