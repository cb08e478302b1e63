"""Everything that can be refused before expensive work starts is refused here, in one sentence.

Run by the command before Prefect starts, and again by the pipeline flow for runs started elsewhere.
"""

from __future__ import annotations

from dflash_core.config import CurateConfig, EvaluateConfig, TargetConfig
from dflash_core.manifest import Dataset
from dflash_core.publish import check_destination
from dflash_core.storage import Storage
from flows.params import ExportParams, PipelineParams, StageParams

PARENTS = ("corpus", "tokens", "hidden", "run", "evaluation")  # parameters that name a dataset


def check(params: StageParams, *, patient: bool = False) -> None:
    """Checks root, target, sources and parent datasets of any flow's parameters.

    Args:
        patient: nobody sits before it: wait for a bucket that cannot be reached just now.

    Raises:
        DFlashError: the first thing that cannot work: what it is, what was expected, what to do.
    """
    root = Storage.from_url(params.root)
    root.preflight(patient=patient)
    for name in PARENTS:
        path = getattr(params, name, "")
        if path:
            Dataset.open(root, path).manifest()
    curate = getattr(params, "curate", None)
    if isinstance(curate, CurateConfig):
        from dflash_core.corpus.curation import check_sources

        check_sources(curate)
    target = getattr(params, "target", None)
    if isinstance(target, TargetConfig):
        from dflash_core.target import identify

        identify(target, require_template=True)
    evaluate = getattr(params, "evaluate", None)
    if isinstance(evaluate, EvaluateConfig):
        _check_prompt_sets(evaluate)
    for url in getattr(getattr(params, "endpoints", None), "urls", ()):
        from dflash_core.served import base_url

        base_url(url)
    if isinstance(params, PipelineParams):
        _check_drafter(params)
    if isinstance(params, ExportParams | PipelineParams) and params.publish_to:
        check_destination(params.publish_to)


def _check_prompt_sets(config: EvaluateConfig) -> None:
    """Every prompt set has a name of its own and can be found: found out here, not after training."""
    from dflash_core import prompt_sets

    prompt_sets.require_names(config.prompt_sets)
    for prompt_set in config.prompt_sets:
        if prompt_set.set != prompt_sets.HELD_OUT:
            prompt_sets.identity(prompt_set)


def _check_drafter(params: PipelineParams) -> None:
    """Taps, drafter and layouts fit the target: found out here, not after the hidden states were extracted."""
    from dflash_core.export import check_layouts
    from dflash_core.target import check_layer_ids, default_target_layer_ids, text_config
    from dflash_core.train import drafter_shape

    num_layers = text_config(params.target).num_hidden_layers
    layer_ids = params.extract.target_layer_ids or default_target_layer_ids(num_layers)
    check_layer_ids(layer_ids, num_layers)
    shape = drafter_shape(params.target, layer_ids, params.train.drafter)
    check_layouts(shape, params.target, params.export)
