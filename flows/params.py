"""Parameters of the flows: what the form in the Prefect UI and the configuration files hold."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dflash_core.config import (
    DEFAULT_CARD,
    NAME,
    Card,
    Config,
    CurateConfig,
    DrafterSource,
    EndpointsConfig,
    EvaluateConfig,
    ExportConfig,
    ExtractConfig,
    RegenerateConfig,
    Runtime,
    ServedConfig,
    TargetConfig,
    TokenizeConfig,
    TrainConfig,
)


class StageParams(Config):
    """What every flow needs."""

    root: str = "data"
    """Where all data lives: a folder, or s3://bucket/prefix."""
    name: str = Field(default="demo", pattern=NAME)
    """Name in the paths of what the stage writes; a fingerprint is added to it."""
    runtime: Runtime = Runtime()
    """How and where to compute."""
    force: bool = False
    """Compute again what is finished already: the run deletes what is there, then starts over. What was made from it
    stays as it is, unless the pipeline is forced, which does all stages anew.
    Wanted after a change that fingerprints cannot see, such as a driver's or a library's."""


class CurateParams(StageParams):
    """Raw conversations to a clean corpus."""

    curate: CurateConfig = CurateConfig()
    """Sources and filters."""


class RegenerateParams(StageParams):
    """A corpus answered again by the target."""

    corpus: str = ""
    """Path of a corpus under the root, such as corpora/demo-0123456789ab."""
    target: TargetConfig = TargetConfig()
    """The model that answers."""
    regenerate: RegenerateConfig = RegenerateConfig()
    """How many answers, how sampled."""
    endpoints: EndpointsConfig = EndpointsConfig()
    """Servers that answer; without, the target answers in this process."""


class TokenizeParams(StageParams):
    """A corpus to token ids, loss masks and packs."""

    corpus: str = ""
    """Path of a corpus under the root, such as corpora/demo-0123456789ab."""
    target: TargetConfig = TargetConfig()
    """The model whose tokenizer and chat template are used."""
    tokenize: TokenizeConfig = TokenizeConfig()
    """Thinking mode, pack size, what to do with long conversations."""


class ExtractParams(StageParams):
    """Packs to the target's hidden states."""

    tokens: str = ""
    """Path of a tokens dataset under the root, such as tokens/demo-0123456789ab."""
    target: TargetConfig = TargetConfig()
    """The model whose hidden states are taken."""
    extract: ExtractConfig = ExtractConfig()
    """Tapped layers and layout of the store."""


class TrainParams(StageParams):
    """Hidden states to a trained drafter."""

    hidden: str = ""
    """Path of a hidden-state store under the root, such as hidden/demo-0123456789ab."""
    target: TargetConfig = TargetConfig()
    """The model whose embedding and head the drafter borrows."""
    corpus: str = ""
    """Path of the corpus whose held-out prompts train.check_every uses; may be empty without it."""
    train: TrainConfig = TrainConfig()
    """Drafter, optimiser, schedule."""


class EvaluateParams(StageParams):
    """Acceptance of a trained drafter on held-out prompts."""

    run: str = ""
    """Path of a training run under the root, such as runs/demo-0123456789ab."""
    corpus: str = ""
    """Path of the corpus whose held-out prompts are decoded."""
    target: TargetConfig = TargetConfig()
    """The model that verifies."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Which prompts, how many, how long, in which modes."""
    compare: list[DrafterSource] = Field(default=[])
    """Other drafters of the same target to decode the same prompts with."""


class ServedParams(StageParams):
    """A running server's acceptance and speed against what was measured offline."""

    evaluation: str = ""
    """Path of an evaluation of the drafter that is served; its prompts are asked."""
    target: TargetConfig = TargetConfig()
    """The model that is served; only its tokenizer is read."""
    served: ServedConfig = ServedConfig()
    """Where the server is, how many requests at a time."""


class ExportParams(StageParams):
    """A checkpoint to the directories that serving engines load."""

    run: str = ""
    """Path of a training run under the root, such as runs/demo-0123456789ab."""
    evaluation: str = ""
    """Path of an evaluation to quote in the model card; may be empty."""
    target: TargetConfig = TargetConfig()
    """The model the drafter belongs to."""
    export: ExportConfig = ExportConfig()
    """Layouts, type of the weights, vocabulary."""
    publish_to: str = ""
    """Where to copy the finished export: a folder, s3://bucket/prefix or hf://owner/name; empty copies
    nothing. It stays under the root in every case."""


class Budget(Config):
    """Prices, and the sum above which somebody is asked."""

    card: Card = DEFAULT_CARD
    """The GPU, for an estimate of its rate where none was measured."""
    tokens_per_s: float = Field(default=0.0, ge=0)
    """Measured rate of extraction on one GPU: the run's progress and its log tell it. 0 estimates it."""
    gpus: int = Field(default=1, ge=1)
    """GPUs that work at a time."""
    dollars_per_gpu_hour: float = Field(default=0.0, ge=0)
    """Price of an hour of one GPU."""
    dollars_per_gb_month: float = Field(default=0.023, ge=0)
    """Price of keeping 10^9 bytes for a month."""
    approve_above_dollars: float = Field(default=0.0, ge=0)
    """GPU hours and the first month of storage may cost this much; above, the run pauses until somebody resumes
    it in the UI. 0 never asks."""


class PlanParams(StageParams):
    """What extraction will make and cost."""

    tokens: str = ""
    """Path of a tokens dataset under the root, such as tokens/demo-0123456789ab."""
    target: TargetConfig = TargetConfig()
    """The model whose hidden states are taken."""
    extract: ExtractConfig = ExtractConfig()
    """Tapped layers and layout of the store."""
    budget: Budget = Budget()
    """Prices and threshold."""


class PipelineParams(StageParams):
    """All stages, from conversations to an exported drafter."""

    target: TargetConfig = TargetConfig()
    """The model to be made faster."""
    curate: CurateConfig = CurateConfig()
    """Conversations."""
    regenerate: RegenerateConfig = RegenerateConfig()
    """The target's own answers."""
    endpoints: EndpointsConfig = EndpointsConfig()
    """Servers of the target that write them; without, the target writes them in this process."""
    stages_run: Literal["here", "as-deployments"] = "here"
    """All stages in this run, or each as a run of its own deployment, taken by workers of the cpu and the gpu
    queue; extraction and regeneration by all GPU workers when runtime.child_runs is set."""
    budget: Budget = Budget()
    """Prices of extraction; above a threshold the run asks before it starts."""
    on_policy: bool = True
    """Answer the corpus again with the target; off trains on the corpus' own answers."""
    tokenize: TokenizeConfig = TokenizeConfig()
    """Tokens and packs."""
    extract: ExtractConfig = ExtractConfig()
    """Hidden states."""
    train: TrainConfig = TrainConfig()
    """Training."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Evaluation."""
    export: ExportConfig = ExportConfig()
    """Export."""
    compare: list[DrafterSource] = Field(default=[])
    """Other drafters of the same target to evaluate on the same prompts."""
    publish_to: str = ""
    """Where to copy the finished export: a folder, s3://bucket/prefix or hf://owner/name."""
