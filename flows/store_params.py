"""Parameters of the flows that keep a hidden-state store."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dflash_core.config import DEFAULT_CARD, NAME, Card, Config, ExtractConfig, TargetConfig


class RootParams(Config):
    """Where to look."""

    root: str = "data"
    """Where all data lives: a folder, or s3://bucket/prefix."""


class StoreParams(RootParams):
    """Which store."""

    store: str = ""
    """Path of a store under the root, such as hidden/demo-0123456789ab."""


class PlanParams(RootParams):
    """What extraction will make and cost."""

    tokens: str = ""
    """Path of a tokens dataset under the root, such as tokens/demo-0123456789ab."""
    target: TargetConfig = TargetConfig()
    """The model whose hidden states will be taken; only its configuration is read."""
    extract: ExtractConfig = ExtractConfig()
    """Tapped layers and layout of the store."""
    card: Card = DEFAULT_CARD
    """The GPU, for an estimate of its rate where none was measured."""
    tokens_per_s: float = Field(default=0.0, ge=0)
    """Measured rate of extraction on one GPU; 0 estimates it."""
    dollars_per_gb_month: float = Field(default=0.023, ge=0)
    """Price of storage, for 10^9 bytes."""


class StatusParams(StoreParams):
    """How far a store is, and what it was computed from."""


class VerifyParams(StoreParams):
    """Whether a store is whole."""

    level: Literal["index", "list", "full"] = "list"
    """`index`: which packs have a commit record; `list`: sizes of all objects, too; `full`: every byte."""
    sample: float = Field(default=1.0, gt=0, le=1)
    """Share of the packs that `full` reads."""


class RepairParams(StoreParams):
    """Bad packs become work for the extract stage."""

    level: Literal["index", "list", "full"] = "full"
    """How thoroughly to look, as in verify."""
    dry_run: bool = True
    """Only say what would be done."""


class GcParams(StoreParams):
    """What no commit record names is deleted."""

    hours: float = Field(default=24, ge=0)
    """Leave what is younger: its writer may be alive."""
    dry_run: bool = True
    """Only say what would be deleted."""


class ExportSampleParams(StoreParams):
    """One sample as a safetensors file."""

    index: int = Field(default=0, ge=0)
    """Number of the sample."""
    key: str = "samples/sample.safetensors"
    """Where to put it, under the root."""


class UniteParams(RootParams):
    """Several stores that training reads as one."""

    stores: list[str] = Field(default=[])
    """Paths of complete stores of one target under the root, such as hidden/demo-0123456789ab."""
    name: str = Field(default="all", pattern=NAME)
    """What the union is called; it becomes hidden/<name>-<fingerprint>."""


FLOWS: dict[str, type[Config]] = {
    "store_plan": PlanParams,
    "store_status": StatusParams,
    "store_verify": VerifyParams,
    "store_repair": RepairParams,
    "store_gc": GcParams,
    "store_export_sample": ExportSampleParams,
    "store_unite": UniteParams,
}
