"""The training layer: a state, one jitted step, evaluation, meters and writers."""

from jaxaccel.train._batch_size import BatchSize, find_batch_size
from jaxaccel.train._checkpoint import Checkpoints
from jaxaccel.train._compare import Comparison, compare
from jaxaccel.train._compiles import CompileCounter, enable_compilation_cache
from jaxaccel.train._console import ConsoleWriter
from jaxaccel.train._early_stop import EarlyStop
from jaxaccel.train._evaluate import evaluate
from jaxaccel.train._flops import Peak, count_flops, data_sheet_peak, measure_peak
from jaxaccel.train._guard import check_finite
from jaxaccel.train._interrupt import SafeInterrupt
from jaxaccel.train._jsonl import JsonLinesWriter, read_json_lines
from jaxaccel.train._linen import from_linen
from jaxaccel.train._many import stack_batches
from jaxaccel.train._memory import Buffer, MemoryReport, memory_report
from jaxaccel.train._meter import Meter, MeterReading
from jaxaccel.train._nnx import from_nnx
from jaxaccel.train._op_table import OpRow, OpTable, op_table
from jaxaccel.train._precision import Precision
from jaxaccel.train._profile import capture_range, profile
from jaxaccel.train._progress import ProgressLine
from jaxaccel.train._prometheus import PrometheusWriter
from jaxaccel.train._range_test import RangeTest, learning_rate_range_test
from jaxaccel.train._recompile_guard import Recompilation, RecompileGuard
from jaxaccel.train._resources import ResourceMonitor
from jaxaccel.train._run import run
from jaxaccel.train._save_restore import restore, save
from jaxaccel.train._shard import Layout, count_collectives, data_parallel, fsdp
from jaxaccel.train._state import TrainState
from jaxaccel.train._step import make_eval_step, make_train_step
from jaxaccel.train._task import Task, classification_loss, masked_mean
from jaxaccel.train._tensorboard import TensorBoardWriter
from jaxaccel.train._wandb import WandbWriter
from jaxaccel.train._writers import MetricBuffer, Writer, Writers

__all__ = (
    "BatchSize",
    "Buffer",
    "Checkpoints",
    "Comparison",
    "CompileCounter",
    "ConsoleWriter",
    "EarlyStop",
    "JsonLinesWriter",
    "Layout",
    "MemoryReport",
    "Meter",
    "MeterReading",
    "MetricBuffer",
    "OpRow",
    "OpTable",
    "Peak",
    "Precision",
    "ProgressLine",
    "PrometheusWriter",
    "RangeTest",
    "Recompilation",
    "RecompileGuard",
    "ResourceMonitor",
    "SafeInterrupt",
    "Task",
    "TensorBoardWriter",
    "TrainState",
    "WandbWriter",
    "Writer",
    "Writers",
    "capture_range",
    "check_finite",
    "classification_loss",
    "compare",
    "count_collectives",
    "count_flops",
    "data_parallel",
    "data_sheet_peak",
    "enable_compilation_cache",
    "evaluate",
    "find_batch_size",
    "from_linen",
    "from_nnx",
    "fsdp",
    "learning_rate_range_test",
    "make_eval_step",
    "make_train_step",
    "masked_mean",
    "measure_peak",
    "memory_report",
    "op_table",
    "profile",
    "read_json_lines",
    "restore",
    "run",
    "save",
    "stack_batches",
)
