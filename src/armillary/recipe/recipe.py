"""The recipe: the whole experiment as one tree of frozen dataclasses. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import armillary.data.chat.corpus
import armillary.data.corpus_jsonl
import armillary.data.corpus_mixture
import armillary.data.corpus_tables
import armillary.data.corpus_text
import armillary.data.tokenizer_bytes
import armillary.data.tokenizer_subword
import armillary.evaluation.bits_per_byte
import armillary.evaluation.cloze
import armillary.evaluation.multiple_choice  # noqa: F401  # registers the components
from armillary.checkpoint.config import Checkpoint
from armillary.checkpoint.hugging_face.config import Export, Initial
from armillary.data.config import Data
from armillary.evaluation.config import Evaluation
from armillary.models.config import ModelConfig
from armillary.models.deepseek import DeepSeek  # noqa: F401  # registers the component
from armillary.models.gpt_oss import GptOss  # noqa: F401  # registers the component
from armillary.models.llama import Llama
from armillary.models.qwen3 import Qwen3  # noqa: F401  # registers the component
from armillary.models.qwen3_moe import Qwen3MoE  # noqa: F401  # registers the component
from armillary.models.tuning.config import Full, TuningConfig
from armillary.optim.adamw import AdamW
from armillary.optim.config import OptimizerConfig
from armillary.optim.muon import Muon  # noqa: F401  # registers the component
from armillary.optim.schedule import ScheduleConfig, WarmupStableDecay
from armillary.parallel.config import (
    ActivationCheckpointConfig,
    Compile,
    NoCheckpoint,
    Parallel,
)
from armillary.parallel.replicas.config import Replicas
from armillary.precision.config import Precision
from armillary.recipe.budget import Budget, Sampling, Validation
from armillary.recipe.stages import Stage, span_at, spans_of
from armillary.resilience.guard_config import Guard
from armillary.resilience.watchdog_config import Watchdog
from armillary.tasks.next_token import NextToken
from armillary.tasks.task import TaskConfig
from armillary.telemetry.config import Telemetry


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Everything that decides a run."""

    seed: int = 0
    """Of initial weights, order of samples and everything random; 0 or more."""
    model: ModelConfig = field(default_factory=Llama)
    """The network."""
    initial: Initial = field(default_factory=Initial)
    """What its weights are before the first step."""
    tuning: TuningConfig = field(default_factory=Full)
    """Which of its weights are trained, and what is trained beside them."""
    data: Data = field(default_factory=Data)
    """What it reads."""
    task: TaskConfig = field(default_factory=NextToken)
    """How a batch becomes a loss."""
    budget: Budget = field(default_factory=Budget)
    """How much to train."""
    optimizer: OptimizerConfig = field(default_factory=AdamW)
    """How weights move along their gradients."""
    schedule: ScheduleConfig = field(default_factory=WarmupStableDecay)
    """How the learning rate moves over the run."""
    max_gradient_norm: float = 1.0
    """Gradients of a larger global norm are scaled down to it; inf: never."""
    gradient_norm_order: float = 2.0
    """Of the p-norm that is reported and clipped by; 1 or more, or inf."""
    parallel: Parallel = field(default_factory=Parallel)
    """How the ranks are arranged."""
    replicas: Replicas = field(default_factory=Replicas)
    """Groups of ranks that may come and go, each a run by itself."""
    precision: Precision = field(default_factory=Precision)
    """Number formats."""
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=NoCheckpoint)
    """Which activations are kept for the backward pass and which recomputed."""
    compile: Compile = field(default_factory=Compile)
    """Compilation of the blocks."""
    validation: Validation = field(default_factory=Validation)
    """Looks at held-out documents."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    """Tasks that the model is asked."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """When to save, and how much to keep."""
    export: Export = field(default_factory=Export)
    """Checkpoints in a format that other tools load."""
    guard: Guard = field(default_factory=Guard)
    """What is done about steps that would poison the run."""
    watchdog: Watchdog = field(default_factory=Watchdog)
    """What is done about ranks that stop making progress."""
    telemetry: Telemetry = field(default_factory=Telemetry)
    """What the run reports, and where."""
    sampling: Sampling = field(default_factory=Sampling)
    """Text written at the end."""
    stages: tuple[Stage, ...] = ()
    """Parts of the run, in order, each with leaves of its own; none: the run is all alike."""

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run, over all stages."""
        return spans_of(self)[-1].total_steps

    def stage_at(self, step: int) -> tuple[int, Recipe]:
        """The stage that a step is in, counting from 1, by number from 0, and its recipe.

        Without stages that is 0 and the recipe itself.
        """
        span = span_at(spans_of(self), step)
        return span.index, span.recipe
