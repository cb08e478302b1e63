"""What a user can ask for: one frozen model per stage, one docstring per field, every default once.

Everything here except `Runtime` goes into fingerprints: it changes what is computed. `Runtime` says how
fast and where, and never changes a result beyond rounding. The docstrings below the fields are the help
texts in the Prefect form and in `--help`.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue


class Config(BaseModel):
    """Base: frozen, unknown fields and NaN refused, docstrings become descriptions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class TargetConfig(Config):
    """The frozen large model whose output is to be kept and whose speed is to be raised."""

    id: str = "demo/target"
    """Hugging Face id, or a folder that holds config.json, safetensors and the tokenizer."""
    revision: str = "main"
    """Branch, tag or commit of a Hugging Face id; it is resolved to a commit before anything is keyed by it."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type the target computes in; `extract.dtype` is the type that hidden states are stored in."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint. Off unless you have read that code."""
    template_options: dict[str, JsonValue] = {}
    """Further variables of the chat template, as the target is served with them, such as {reasoning_effort: high}.
    Part of what the target is: whatever was made with others is refused."""

    def __hash__(self) -> int:  # pydantic's own cannot hash a dict
        return hash(json.dumps(self.model_dump(mode="json"), sort_keys=True))


NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # what datasets may be called


class SourceConfig(Config):
    """One set of conversations."""

    name: str
    """Name of the source in reports and rows."""
    reader: str
    """How its rows are laid out; `dflash readers` lists the known ones."""
    path: str = ""
    """Hugging Face id, local file or folder, or s3:// URL. Empty where the reader brings its own text or
    knows the id of its set."""
    revision: str = "main"
    """Revision of a Hugging Face id."""
    subset: str = ""
    """Configuration of a Hugging Face id, where it has several."""
    split: str = "train"
    """Split of a Hugging Face id."""
    limit: int = Field(default=0, ge=0)
    """Rows to take at most, drawn evenly by content hash; 0 takes all."""
    weight: float = Field(default=0.0, ge=0)
    """Share of the corpus relative to the other sources' weights; 0 for all sources is by their rows."""


class FilterConfig(Config):
    """What makes a readable conversation unfit. Each has its own reason in the report."""

    max_characters: int = Field(default=200_000, ge=1)
    """Conversations with more characters than this are rejected."""
    min_answer_characters: int = Field(default=0, ge=0)
    """Conversations whose answers have fewer characters than this together are rejected."""
    min_supervised_share: float = Field(default=0.0, ge=0, le=1)
    """Least share of a conversation's characters that are answers; prompts without answers pass."""
    max_compression: float = Field(default=30.0, ge=0)
    """Rejects answers of which some 2,000 characters shrink more than this many times in zlib, as loops do;
    0 keeps them."""
    broken_unicode: Literal["reject", "keep"] = "reject"
    """Answers with U+FFFD, control characters, or UTF-8 that was read as Latin-1."""
    secrets: Literal["redact", "reject", "keep"] = "redact"
    """API keys, access tokens and private keys; a redacted one becomes `<redacted:kind>`."""
    refusals: Literal["reject", "keep"] = "keep"
    """Conversations in which an answer begins with a refusal (English phrases)."""
    languages: list[str] = []
    """ISO 639-1 codes to keep, such as en; empty keeps all. Needs the package py3langid."""


class CurateConfig(Config):
    """Raw conversations to a clean corpus."""

    sources: list[SourceConfig] = [SourceConfig(name="python-stdlib", reader="python-stdlib")]
    """Where conversations come from. A duplicate belongs to the first source that has it."""
    filters: FilterConfig = FilterConfig()
    """What is rejected or redacted."""
    near_duplicates: float = Field(default=0.0, ge=0, le=1)
    """Similarity (Jaccard, of runs of five words) from which a conversation is a duplicate of an earlier
    one, 0.8 for example; 0 drops only equal ones. Needs the package rensa."""
    decontaminate: list[str] = []
    """Evaluation sets whose prompts must not be in the corpus: those that `dflash prompt-sets` lists, such as
    gsm8k or human-eval, or files of prompts."""
    num_rows: int = Field(default=0, ge=0)
    """Rows of a weighted corpus; 0 takes as many as the shares allow. No row is ever taken twice."""
    temperature: float = Field(default=1.0, gt=0)
    """Evens out the shares of the sources: they are raised to 1 / temperature."""
    seed: int = 0
    """Seed of every draw; 0 draws the lowest content hashes."""
    held_out_fraction: float = Field(default=0.05, ge=0, lt=1)
    """Share kept for evaluation, chosen by hash of the row's group (or of its content), so it never moves."""
    rows_per_part: int = Field(default=8192, ge=1)
    """Rows of a source that are committed together; the unit of resume."""


class RegenerateConfig(Config):
    """Answers replaced by the target's own, so that the drafter learns what it will have to predict."""

    num_rows: int = Field(default=0, ge=0)
    """Training rows to answer, lowest content hash first; 0 answers all."""
    num_held_out: int = Field(default=0, ge=0)
    """Held-out rows to keep beside them; 0 keeps all."""
    max_new_tokens: int = Field(default=1024, ge=1)
    """Longest answer. Rows that reach it are kept and marked `cut_by_length`."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature as served; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling as served."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many most probable tokens only, as served; 0 takes all, whatever the target's
    generation_config.json says."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Leave out tokens below this share of the most probable one's probability, as served."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Penalty of tokens that the answer holds already, as served; servers only."""
    thinking: bool = False
    """Ask the target to think before it answers. Must match how it is served."""
    thinking_share: float = Field(default=1.0, ge=0, le=1)
    """With `thinking`, the share of rows that are answered with it, drawn by content hash; the others are
    answered without, and every row names its mode."""
    seed: int = 0
    """Seed of sampled answers."""
    rows_per_part: int = Field(default=128, ge=1)
    """Rows committed together; the unit of resume."""


class EndpointsConfig(Config):
    """Servers of the target that speak OpenAI's chat protocol: vLLM, SGLang, llama.cpp, `transformers serve`.

    Never part of a fingerprint: which server answers changes no more than rounding, as long as it samples as it
    is told. vLLM, SGLang and llama.cpp are told everything; others must have no sampling defaults of their own.
    """

    urls: list[str] = []
    """Base addresses, such as http://gpu1:8000/v1; empty loads the target into this process."""
    model: str = ""
    """Name by which the servers know the target; empty takes the one that they list."""
    api_key_variable: str = ""
    """Environment variable that holds the API key, where the servers want one. Never the key itself."""
    requests_per_url: int = Field(default=64, ge=1)
    """Answers that one server writes at a time."""
    timeout_s: float = Field(default=1800, gt=0)
    """Longest wait for one answer; then it is asked for again."""
    patience_s: float = Field(default=600, ge=0)
    """How long servers may all be unreachable before the run stops. What was answered stays."""


class TokenizeConfig(Config):
    """Conversations to token ids, loss masks and the pack plan."""

    thinking: bool = False
    """Thinking mode of the chat template. Must match how the target is served. Rows that name their own
    mode (`asked_to_think`, as regeneration writes it) are printed in that."""
    pack_tokens: int = Field(default=16_384, ge=64)
    """Rows of a pack: one forward of the target, one unit of extraction, one training sequence."""
    too_long: Literal["cut", "cut at turn", "drop"] = "cut"
    """What happens to a conversation longer than a pack: keep its beginning, keep its beginning up to the
    end of the last answer that fits, or reject it."""
    rows_per_part: int = Field(default=4096, ge=1)
    """Rows committed together; the unit of resume."""


class ExtractConfig(Config):
    """Hidden states of the target over the packs."""

    target_layer_ids: list[int] = []
    """Tapped layers: id k is the output of decoder layer k, 0-based (hidden_states[k+1] in Hugging Face).
    Empty takes five, evenly spaced from layer 1 to the third last, as the DFlash authors do."""
    chunk_rows: int = Field(default=256, ge=1)
    """Rows of an inner Zarr chunk: the smallest piece a reader fetches, with a checksum of its own."""
    shard_bytes: int = Field(default=128 * 2**20, ge=2**16)
    """Size to aim at for one object, before the codec."""
    dtype: Literal["bfloat16", "float8_e4m3"] = "bfloat16"
    """Type of the stored states. float8 has a scale for each row and tap and halves the store; a value is off by
    1/16 of itself at most."""
    codec: Literal["none", "lz4", "zstd"] = "none"
    """Lossless compression: zstd saves about a quarter of bfloat16, lz4 about a fifth for less CPU."""
    last: bool = False
    """Store the final hidden state, before the norm, as one more tap: the target's distribution for distillation."""
    teacher_top_k: int = Field(default=0, ge=0)
    """Store the target's most likely tokens with their log-probabilities, this many for each row; 0 stores none."""

    @property
    def taps_last_layer(self) -> bool:
        """Whether extraction runs the target to its last layer, whose states the options above need."""
        return self.last or self.teacher_top_k > 0


class DrafterConfig(Config):
    """Shape of the drafter. A 0 takes the target's value, or what the field's text says."""

    num_hidden_layers: int = Field(default=5, ge=1)
    """Decoder layers."""
    intermediate_size: int = Field(default=0, ge=0)
    """Width of the MLP; 0 takes the target's."""
    num_attention_heads: int = Field(default=0, ge=0)
    """Query heads; 0 takes the target's."""
    num_key_value_heads: int = Field(default=0, ge=0)
    """Key and value heads; 0 takes the target's."""
    head_dim: int = Field(default=0, ge=0)
    """Width of a head; 0 takes 128, or hidden size over heads when that is smaller."""
    block_size: int = Field(default=16, ge=2)
    """Tokens of a block: the known anchor and block_size - 1 drafts."""
    layout: Literal["in-place", "shifted"] = "in-place"
    """What slot j of a block predicts: the token j after the anchor (DFlash; slot 0 predicts nothing), or
    the token j + 1 after it (DSpark, Domino)."""
    attention: Literal["full-bidir", "swa-causal", "mixed", "swa-bidir"] = "full-bidir"
    """Attention contract: all layers full and bidirectional in the block; all sliding and causal;
    sliding causal with a full bidirectional last layer; all sliding and bidirectional."""
    sliding_window: int = Field(default=2048, ge=1)
    """Window of sliding layers, the current token counted."""
    rope_theta: float = Field(default=1e6, gt=0)
    """Base of the rotary embedding, plain and over the full head whatever the target does."""
    mask_token_id: int = Field(default=-1, ge=-1)
    """Token in the unknown slots; -1 finds one that has an embedding row and never occurs in text."""


Card = Literal["a100", "h100", "h200", "b200", "rtx-pro-6000"]
"""GPUs whose rate of extraction can be estimated."""
DEFAULT_CARD: Card = "h200"


class TrainConfig(Config):
    """The training run."""

    drafter: DrafterConfig = DrafterConfig()
    """Shape of the drafter."""
    num_steps: int = Field(default=10_000, ge=1)
    """Optimiser steps."""
    packs_per_step: int = Field(default=1, ge=1)
    """Packs in a step, over all ranks."""
    visits_per_pack: int = Field(default=1, ge=1)
    """Steps in a row that use the same packs, with other anchors; divides what has to be read."""
    anchors_per_pack: int = Field(default=512, ge=1)
    """Most anchors drawn from a pack; drawn anew at every visit."""
    loss: Literal["ce", "kl", "lk"] = "ce"
    """What a slot learns: the token of the text (`ce`), the target's distribution (`kl`), or to overlap with
    it, which is what sampled decoding accepts (`lk`)."""
    teacher: Literal["last", "top-k"] = "last"
    """How `kl` and `lk` know the target's distribution: whole, from its last states (extract.last), or from its
    most likely tokens with all others as one bucket (extract.teacher_top_k), which is much less to read."""
    slot_weights: Literal["decay", "dpace"] = "decay"
    """How the slots of a block weigh: exponential decay, or D-PACE, by how likely the drafter is to be
    right up to there; with loss `ce` only."""
    loss_decay: float = Field(default=7.0, gt=0)
    """With `decay` the k-th predicting slot weighs exp(-k / loss_decay), k from 0: 7 for blocks of 16,
    5 for 10, 4 for 8."""
    dpace_alpha: float = Field(default=0.5, ge=0, le=1)
    """With `dpace` the floor under the drafter's confidence; 1 weighs a slot by the slots behind it."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimiser of the matrices; norms always have AdamW. Muon wants about the same learning rate."""
    learning_rate: float = Field(default=6e-4, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay of matrices; norms have none."""
    warmup_fraction: float = Field(default=0.04, ge=0, le=1)
    """Share of the steps with rising learning rate."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up: a cosine to zero, or constant and a cosine to zero at the end (`wsd`)."""
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """Share of the steps in which the rate of `wsd` falls."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this norm."""
    ema_decay: float = Field(default=0.0, ge=0, lt=1)
    """Keep a running average of the weights, of which this share stays at every step (0.999, say; less in the
    first steps). It is what is checked, evaluated, exported and started from. 0 keeps none."""
    checkpoint_every: int = Field(default=500, ge=1)
    """Steps between checkpoints; the unit of resume."""
    keep_checkpoints: int = Field(default=3, ge=1)
    """Newest checkpoints kept; the untrained one and the last are always kept."""
    seed: int = 0
    """Seed of initial weights, pack order and anchors."""
    warm_start: str = ""
    """Drafter to start from: a run under the root, such as runs/demo-0123456789ab, or a folder, URL or
    Hugging Face id with an exported one. Layers beyond its own start as the identity. Empty draws fresh ones."""
    check_every: int = Field(default=0, ge=0)
    """Steps between checks on held-out prompts, which the target answers once before training; 0 for none."""
    check_prompts: int = Field(default=8, ge=1)
    """Held-out prompts of a check, lowest content hash first."""
    check_new_tokens: int = Field(default=128, ge=2)
    """Longest answer in a check."""

    @property
    def learns_from(self) -> Literal["text", "last", "top-k"]:
        """What the loss compares with: the text, or the target's distribution as `teacher` has it."""
        return "text" if self.loss == "ce" else self.teacher


class PromptSetConfig(Config):
    """One set of prompts to evaluate on."""

    set: str = "held-out"
    """`held-out` for the corpus' own, a known set (`dflash prompt-sets` lists them), or `file` for yours."""
    name: str = ""
    """Name in the report; empty takes the set's."""
    path: str = ""
    """File, folder, s3:// URL or Hugging Face id in place of the set's own."""
    revision: str = "main"
    """Revision of a Hugging Face id."""
    subset: str = ""
    """Configuration of a Hugging Face id; empty takes the set's own."""
    split: str = ""
    """Split of a Hugging Face id; empty takes the set's own."""

    @property
    def label(self) -> str:
        """Name in the report."""
        return self.name or self.set


class DrafterSource(Config):
    """A drafter to compare with."""

    name: str
    """Name in the report."""
    source: str
    """Path of a training run under the root (runs/...), or a folder, URL or Hugging Face id of an exported
    drafter in either layout."""
    revision: str = "main"
    """Revision of a Hugging Face id."""


class EvaluateConfig(Config):
    """Acceptance measured by decoding prompts with the real target.

    Every set is asked in every thinking mode at every temperature; the first of each is the headline.
    """

    prompt_sets: list[PromptSetConfig] = Field(default=[PromptSetConfig()], min_length=1)
    """What is asked."""
    num_prompts: int = Field(default=64, ge=1)
    """Prompts of each set, lowest content hash first."""
    num_untrained_prompts: int = Field(default=8, ge=1)
    """Of each set, how many are decoded with the drafter that training started from, too, for comparison."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest answer."""
    thinking: list[bool] = Field(default=[False], min_length=1)
    """Thinking modes of the chat template: off, on, or both."""
    temperatures: list[Annotated[float, Field(ge=0)]] = Field(default=[0.0], min_length=1)
    """Sampling temperatures; 0 is greedy, where answers must equal those of plain decoding."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling, where the temperature is above 0."""
    tree_nodes: list[Annotated[int, Field(ge=1)]] = []
    """Node budgets to decode with trees of drafts, too, beside chains."""
    seed: int = 0
    """Seed of sampled answers."""


class ServedConfig(Config):
    """Acceptance and speed of a running server, against what was measured offline."""

    endpoint: str = "http://127.0.0.1:8000"
    """URL of a vLLM or SGLang server that speculates with the drafter. A key is taken from OPENAI_API_KEY."""
    baseline: str = ""
    """URL of a server of the same target without a drafter, for the speed-up; may be empty."""
    model: str = ""
    """Name by which the server knows the model; empty takes the first it lists."""
    engine: Literal["auto", "vllm", "sglang"] = "auto"
    """Whose counters to read."""
    concurrency: list[Annotated[int, Field(ge=1)]] = Field(default=[1, 4, 16], min_length=1)
    """Requests in flight; each level asks all prompts."""
    num_prompts: int = Field(default=64, ge=1)
    """Prompts of the evaluation to ask, in its order."""
    tolerance: float = Field(default=0.05, gt=0)
    """Relative difference of served and offline acceptance length above which a warning is printed."""
    label: str = ""
    """Anything; change it to measure the same server again."""


class ExportConfig(Config):
    """Directories that serving engines load."""

    layouts: list[Literal["z-lab", "speculators"]] = ["z-lab"]
    """Layouts to write: z-lab is read by SGLang, vLLM and others, speculators by vLLM and speculators."""
    target_name: str = ""
    """How model card and engines shall call the target; empty takes its hub id, or its folder's name."""
    weights: Literal["bfloat16", "int8", "fp8"] = "bfloat16"
    """Type of the MLP and output projection weights; the others are bfloat16 in every case."""
    draft_vocab_size: int = Field(default=0, ge=0)
    """Propose only from this many tokens, the most frequent ones of the training answers (speculators layout
    only); 0 proposes from all."""


class Runtime(Config):
    """How and where to compute. Never part of a fingerprint: results do not depend on it."""

    device: str = "auto"
    """`cuda`, `cuda:1`, `cpu`, or `auto` for a GPU when there is one."""
    batch_tokens: int = Field(default=4096, ge=1)
    """Tokens of a padded batch, where packs are run as batches."""
    processes: int = Field(default=0, ge=0)
    """Processes that curate and tokenize side by side; 0 takes one for each core, fewer for little work."""
    generate_batch: int = Field(default=64, ge=1)
    """Conversations answered together by a local target."""
    writer_threads: int = Field(default=4, ge=1)
    """Threads that encode and upload hidden states."""
    reader_threads: int = Field(default=4, ge=1)
    """Threads that read packs ahead of training, one each."""
    prefetch_bytes: int = Field(default=4 * 2**30, ge=0)
    """Host memory for packs read ahead of training; at least one pack."""
    cache_folder: str = ""
    """Folder on a local disk that keeps what training reads from a bucket, for later epochs; empty keeps nothing."""
    cache_bytes: int = Field(default=500 * 10**9, ge=0)
    """Most bytes in `cache_folder`."""
    train_processes: int = Field(default=1, ge=1)
    """Processes that train together, one for each GPU; each takes a part of a step's packs."""
    sharding: Literal["replicate", "shard"] = "replicate"
    """With several processes: the drafter whole in each (DDP), or a part of it in each (FSDP2)."""
    tensorboard_folder: str = ""
    """Local folder for TensorBoard logs of training; empty for none."""
    wandb_project: str = ""
    """Weights & Biases project for training; empty for none."""
    recompute: bool = False
    """Compute the layers of the drafter again in the backward pass: less memory, a third more time."""
    span_packs: int = Field(default=64, ge=1)
    """Packs of one extraction task; a GPU waits for the last uploads of one before it gets the next."""
    device_processes: int = Field(default=0, ge=0)
    """Processes that load the target for extraction, regeneration and evaluation; 0 takes one for each GPU and,
    without a GPU, none: the flow's own process computes. On a CPU they share its threads."""
    gpus_per_target: int = Field(default=1, ge=1)
    """GPUs that hold one target in extraction, a run of its layers each; for targets too large for one GPU."""
    child_runs: int = Field(default=0, ge=0, le=1000)
    """Runs that extraction and regeneration are each cut into, for all workers of the gpu queue to share; none gets
    less than a task's work. Four for each worker let none idle for long at the end; each loads the target anew.
    0 computes in the run itself."""
    forward: Literal["auto", "padded"] = "auto"
    """Forward of extraction: whole packs as one row where family and kernels allow it, or padded batches."""
    compile: bool = True
    """On a GPU, compile the packed forward of extraction and the drafter in training; the first pack or step
    takes some 30 s longer."""
    kernel_cache: str = ""
    """Folder for compiled kernels, so that a restart does not pay again; empty leaves the libraries' own."""
    slot_bytes: int = Field(default=6 * 2**30, ge=0)
    """Host memory for packs on their way to the store; at least two packs."""
    slow_kernels: bool = False
    """Go on without the fast kernels of a hybrid target on a GPU, 5 to 10 times slower."""
