"""Trains the demo target: a 5.9 M-parameter hybrid (Gated DeltaNet and full attention) on the standard library.

    python -m demo.train_target prepare --data build/target     # tokenizer and rows, on any machine, about two minutes
    python -m demo.train_target train --data build/target --out demo/target --minutes 4      # one GPU

`prepare` fixes the data: the machine that trains needs neither the same Python nor its library sources. The length of
a training run is given in time, not in steps, because learning rate and mixture follow the share of it that is over.

Transformers takes flash-linear-attention's kernels where that package is installed. Its version 0.6 refuses the gated
backward pass on Hopper with Triton 3.4 to 3.7.0, where it is wrong; train without the package there.
"""

import importlib.util
import json
import math
import random
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)
from transformers.models.qwen3_5 import modeling_qwen3_5

from demo import target_quality, target_rows
from demo.target_rows import ASSISTANT_WEIGHT, Rows
from dflash_core.corpus.readers.python_stdlib import Chat, Definition, chat_about

# B = rows of a batch, T = tokens of a row, V = vocabulary, D = channels of a convolution, W = its taps.

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

TEMPLATE = Path(__file__).parent / "target" / "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class Recipe:
    """One training run."""

    minutes: float
    """Time for the training loop, warm-up included, evaluation of the finished model not."""
    max_steps: int
    """Stops earlier; for smoke tests."""
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    warmup_share: float = 0.03
    """Share of the run in which the learning rate rises; afterwards it follows a cosine down to 2 %."""
    batch_tokens: int = 32_768
    """Tokens of a batch, padding included."""
    text_share: float = 0.5
    """Share of batches of plain source text, until half of the run; falls to zero at three quarters."""
    text_window: int = 384
    seed: int = 0


# --- commands ---------------------------------------------------------------------------------------------------------


@app.command()
def prepare(
    data: Annotated[Path, typer.Option(help="Folder to write.")],
    phrasings: Annotated[int, typer.Option(help="Chats for each definition.")] = 10,
    renamed_share: Annotated[float, typer.Option(help="Share of them with other names.")] = 0.6,
    modules: Annotated[str, typer.Option(help="Modules, comma-separated; all if empty.")] = "",
    tests: Annotated[bool, typer.Option(help="Add the library's tests to the plain text.")] = True,
) -> None:
    """Builds tokenizer, training rows, held-out rows, source text and prompts."""
    data.mkdir(parents=True, exist_ok=True)
    training, held_out = target_rows.split_definitions(modules.split(",") if modules else None)
    first = [chat_about(definition) for definition in training]
    sources = list(target_rows.source_texts(with_tests=False))
    answers = [turn["content"] or "" for chat in first for turn in chat["messages"]]
    tokenizer = target_rows.train_tokenizer([*sources, *answers], TEMPLATE.read_text("utf-8"))
    tokenizer.save_pretrained(data / "tokenizer")

    chats = target_rows.training_chats(training, phrasings, renamed_share)
    rows = target_rows.rows_of(tokenizer, chats)
    rows.save(data / "train.npz")
    tests_too = target_rows.source_texts(with_tests=True) if tests else sources
    text = target_rows.stream_of(tokenizer, tests_too)
    np.savez_compressed(data / "text.npz", ids=text)
    held_out_rows = target_rows.rows_of(tokenizer, [chat_about(d) for d in held_out])
    held_out_rows.save(data / "held_out.npz")
    _write_json(data / "prompts.json", _prompts(training, held_out))
    facts = {
        "training_definitions": len(training),
        "held_out_definitions": len(held_out),
        "phrasings": phrasings,
        "renamed_share": renamed_share,
        "training_rows": len(rows.offsets) - 1,
        "training_tokens": len(rows.ids),
        "training_answer_tokens": int((rows.weights == ASSISTANT_WEIGHT).sum()),
        "held_out_rows": len(held_out_rows.offsets) - 1,
        "held_out_answer_tokens": int((held_out_rows.weights == ASSISTANT_WEIGHT).sum()),
        "text_tokens": len(text),
        "vocab_size": len(tokenizer),
    }
    _write_json(data / "facts.json", facts)
    print(json.dumps(facts, indent=2))


def _prompts(training: list[Definition], held_out: list[Definition]) -> dict[str, list[Chat]]:
    """Chats whose requests the finished model answers: held-out ones, and some that it was trained on."""

    def of_kinds(
        definitions: list[Definition], phrasing: int, kinds: tuple[str, ...], count: int
    ) -> list[Chat]:
        chats = [chat_about(definition, phrasing) for definition in definitions]
        chats = [chat for chat in chats if chat["metadata"]["kind"] in kinds]
        random.Random(0).shuffle(chats)
        return chats[:count]

    written = ("code", "complete", "explain")
    return {
        "held_out": of_kinds(held_out, 0, written, 384) + of_kinds(held_out, 1, ("tool",), 128),
        "training": of_kinds(training, 0, ("code",), 128),
    }


@app.command()
def train(
    data: Annotated[Path, typer.Option(help="Folder that `prepare` wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for the model, its tokenizer and reports.")],
    minutes: Annotated[float, typer.Option(help="Length of the training loop.")] = 4.0,
    max_steps: Annotated[int, typer.Option(help="Stop after so many steps.")] = 10**9,
    learning_rate: Annotated[float, typer.Option(help="Peak of AdamW's learning rate.")] = 2e-3,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a batch.")] = 32_768,
    layers: Annotated[int, typer.Option(help="Decoder layers; 4 for a smoke test.")] = 8,
    prompts: Annotated[int, typer.Option(help="Held-out prompts to answer; 0 is all.")] = 0,
) -> None:
    """Trains, casts to bfloat16, saves, and measures the saved model."""
    recipe = Recipe(minutes, max_steps, learning_rate=learning_rate, batch_tokens=batch_tokens)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(recipe.seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(data / "tokenizer")
    model = new_model(tokenizer, layers).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters:,} parameters on {device}", flush=True)

    held_out = Batches(Rows.load(data / "held_out.npz"), device, recipe)
    started = time.monotonic()
    with training_convolution():
        curve = run(model, data, held_out, recipe, device)
    seconds = time.monotonic() - started

    save(model, tokenizer, out)
    report = {
        "recipe": asdict(recipe),
        "data": json.loads((data / "facts.json").read_text()),
        "parameters": parameters,
        "training_seconds": round(seconds, 1),
        "curve": curve,
    }
    _write_json(out / "training.json", report)  # before the long part, should it fail
    report |= evaluate(out, data, held_out, device, prompts)
    _write_json(out / "training.json", report)
    plot(report, out / "training.png")


# --- model ------------------------------------------------------------------------------------------------------------


def new_model(tokenizer: PreTrainedTokenizerFast, layers: int) -> Qwen3_5ForCausalLM:
    """A Qwen3.5-shaped text model in float32: three Gated DeltaNet layers, then one of full attention, repeated."""
    config = Qwen3_5TextConfig(
        vocab_size=target_rows.VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=400,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_key_head_dim=64,
        linear_num_value_heads=4,
        linear_value_head_dim=64,
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
        },
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen3_5ForCausalLM(config)
    for module in model.modules():
        if isinstance(module, modeling_qwen3_5.Qwen3_5GatedDeltaNet):
            _spread_decays(module)
    return model


@torch.no_grad()
def _spread_decays(layer: modeling_qwen3_5.Qwen3_5GatedDeltaNet) -> None:
    """Sets the heads' initial half-lives from a few tokens to hundreds.

    The stock initialisation draws them for dozens of heads; with four, all may come out too short to remember a name.
    """
    heads = len(layer.A_log)
    rates = torch.logspace(math.log10(0.003), math.log10(0.3), heads)
    layer.A_log.zero_()
    layer.dt_bias.copy_(torch.log(torch.expm1(rates)))  # softplus of this is the rate


def shifted_convolution(
    hidden_BDT: torch.Tensor,
    weight_DW: torch.Tensor,
    bias_D: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """The layers' causal convolution, silu(sum over taps), as shifted products; [B, D, T] in and out.

    Equal to the reference, a depthwise `conv1d`, whose backward pass is slow on GPUs. Takes the reference's arguments.
    """
    taps, length = weight_DW.shape[-1], hidden_BDT.shape[-1]
    padded = F.pad(hidden_BDT, (taps - 1, 0))
    weight_D1W = weight_DW.to(hidden_BDT.dtype)[:, None, :]
    out = padded[..., :length] * weight_D1W[..., 0]
    for tap in range(1, taps):
        out = torch.addcmul(out, padded[..., tap : tap + length], weight_D1W[..., tap])
    if bias_D is not None:
        out = out + bias_D[:, None]
    return F.silu(out) if activation == "silu" else out


@contextmanager
def training_convolution() -> Generator[None, None, None]:
    """Trains with `shifted_convolution` where Transformers would fall back to its reference."""
    if importlib.util.find_spec("causal_conv1d"):
        yield
        return
    stock = modeling_qwen3_5.causal_conv1d_fn
    modeling_qwen3_5.causal_conv1d_fn = shifted_convolution
    try:
        yield
    finally:
        modeling_qwen3_5.causal_conv1d_fn = stock


# --- batches ----------------------------------------------------------------------------------------------------------


class Batches:
    """Batches of whole rows, cut from tensors that stay on the device."""

    def __init__(self, rows: Rows, device: torch.device, recipe: Recipe) -> None:
        self.ids = torch.from_numpy(rows.ids.astype(np.int32)).to(device)
        self.weights = torch.from_numpy(rows.weights).to(device)
        self.offsets = rows.offsets
        self.batch_tokens = recipe.batch_tokens
        self.device = device

    def forever(self, draw: random.Random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield from self.once(draw)

    def once(self, draw: random.Random | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Every row once, in batches of similar length and in random order (as stored, without `draw`)."""
        order = list(range(len(self.offsets) - 1))
        if draw:
            draw.shuffle(order)
        lengths = np.diff(self.offsets)
        batches: list[list[int]] = []
        for first in range(
            0, len(order), 8192
        ):  # sort pools, not everything: neighbours stay random
            pool = sorted(order[first : first + 8192], key=lambda row: lengths[row])
            while pool:
                count = max(1, self.batch_tokens // _padded(lengths[pool[-1]]))
                batches.append(pool[-count:])
                del pool[-count:]
        if draw:
            draw.shuffle(batches)
        for batch in batches:
            yield self._gather(batch, _padded(max(lengths[row] for row in batch)))

    def _gather(self, rows: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """ids int64 [B, T] and weights float32 [B, T], zero where padded."""
        start_B = torch.from_numpy(self.offsets[rows]).to(self.device, non_blocking=True)
        end_B = torch.from_numpy(self.offsets[[row + 1 for row in rows]]).to(
            self.device, non_blocking=True
        )
        at_BT = start_B[:, None] + torch.arange(width, device=self.device)
        inside_BT = at_BT < end_B[:, None]
        at_BT = at_BT.clamp(max=len(self.ids) - 1)
        ids_BT = torch.where(inside_BT, self.ids[at_BT], 0).long()
        weights_BT = torch.where(inside_BT, self.weights[at_BT], 0).float() / ASSISTANT_WEIGHT
        return ids_BT, weights_BT


def _padded(length: int) -> int:
    """Row widths are multiples of 64, the chunk of the linear-attention kernels, so that few shapes are compiled."""
    return -(-int(length) // 64) * 64


def text_windows(
    stream: torch.Tensor, recipe: Recipe, draw: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches of random windows of source text, all tokens at full weight."""
    count = max(1, recipe.batch_tokens // recipe.text_window)
    within = torch.arange(recipe.text_window, device=stream.device)
    while True:
        starts = [draw.randrange(len(stream) - recipe.text_window) for _ in range(count)]
        start_B = torch.tensor(starts, device=stream.device)
        ids_BT = stream[start_B[:, None] + within].long()
        yield ids_BT, torch.ones_like(ids_BT, dtype=torch.float32)


# --- training ---------------------------------------------------------------------------------------------------------


def run(
    model: Qwen3_5ForCausalLM,
    data: Path,
    held_out: Batches,
    recipe: Recipe,
    device: torch.device,
) -> list[dict[str, float]]:
    """Trains `model` in place and returns the curve: step, seconds, losses in nats a token, learning rate."""
    draw = random.Random(recipe.seed)
    with np.load(data / "text.npz") as arrays:
        text = torch.from_numpy(arrays["ids"].astype(np.int32)).to(device)
    chat_batches = Batches(Rows.load(data / "train.npz"), device, recipe).forever(draw)
    text_batches = text_windows(text, recipe, draw)
    optimizer = new_optimizer(model, recipe)
    for batches in (chat_batches, text_batches):  # loads kernels before the clock starts
        loss_of(model, *next(batches)).backward()
    model.zero_grad(set_to_none=True)
    progress = _clock(recipe)
    curve: list[dict[str, float]] = []
    losses: dict[str, list[torch.Tensor]] = {"chat": [], "text": []}
    next_report, step, tokens, started = 0.0, 0, 0, time.monotonic()
    while (done := progress(step)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * schedule(done, recipe.warmup_share)
        kind = "text" if draw.random() < text_share(done, recipe.text_share) else "chat"
        ids_BT, weights_BT = next(text_batches if kind == "text" else chat_batches)
        loss = loss_of(model, ids_BT, weights_BT)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses[kind].append(loss.detach())
        step, tokens = step + 1, tokens + ids_BT.numel()
        if done >= next_report:
            seconds = time.monotonic() - started
            curve.append(_curve_point(model, held_out, losses, step, tokens, seconds))
            print(json.dumps(curve[-1]), flush=True)
            losses = {"chat": [], "text": []}
            next_report += 0.05
    curve.append(_curve_point(model, held_out, losses, step, tokens, time.monotonic() - started))
    print(json.dumps(curve[-1]), flush=True)
    return curve


def _clock(recipe: Recipe) -> Callable[[int], float]:
    """Share of the run that is over at a step, by time or by steps, whichever is further."""
    started = time.monotonic()

    def progress(step: int) -> float:
        minutes = (time.monotonic() - started) / 60
        return max(minutes / recipe.minutes, step / recipe.max_steps)

    return progress


def schedule(done: float, warmup_share: float) -> float:
    """Learning rate over its peak, when a share `done` of the run is over."""
    if done < warmup_share:
        return (done + 1e-3) / (warmup_share + 1e-3)
    after = min(1.0, (done - warmup_share) / (1 - warmup_share))
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * after))


def text_share(done: float, share: float) -> float:
    """Share of batches of plain text: constant until half of the run, zero from three quarters on."""
    return share * min(1.0, max(0.0, (0.75 - done) / 0.25))


def new_optimizer(model: torch.nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW; only matrices decay, and of these not the tied embedding."""
    decayed, kept = [], []
    for name, parameter in model.named_parameters():
        (decayed if parameter.ndim == 2 and "embed" not in name else kept).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    fused = next(model.parameters()).device.type == "cuda"
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=fused)


def loss_of(model: torch.nn.Module, ids_BT: torch.Tensor, weights_BT: torch.Tensor) -> torch.Tensor:
    """Weighted mean cross-entropy in nats a token. Right padding needs no mask: every layer is causal."""
    with torch.autocast(ids_BT.device.type, torch.bfloat16, enabled=ids_BT.is_cuda):
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    each = F.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1).float(), ids_BT[:, 1:].flatten(), reduction="none"
    )
    weights = weights_BT[:, 1:].flatten()
    return (each * weights).sum() / weights.sum()


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, held_out: Batches) -> float:
    """Mean cross-entropy of the assistant's tokens of held-out modules, in nats a token."""
    total, count = 0.0, 0.0
    for ids_BT, weights_BT in held_out.once(None):
        weights_BT = (weights_BT >= 1).float()
        weight = float(weights_BT[:, 1:].sum())
        total += float(loss_of(model, ids_BT, weights_BT)) * weight
        count += weight
    return total / count


def _curve_point(
    model: torch.nn.Module,
    held_out: Batches,
    losses: dict[str, list[torch.Tensor]],
    step: int,
    tokens: int,
    seconds: float,
) -> dict[str, float]:
    point = {"step": step, "seconds": round(seconds, 1), "tokens": tokens}
    for kind, values in losses.items():
        if values:
            point[f"{kind}_loss"] = round(float(torch.stack(values).mean()), 4)
    return point | {"held_out_loss": round(held_out_loss(model, held_out), 4)}


# --- result -----------------------------------------------------------------------------------------------------------


def save(model: Qwen3_5ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes the model in bfloat16 and everything `from_pretrained` needs."""
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=256,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    path = out / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8"))
    config = {key: value for key, value in config.items() if "local" not in key}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that older readers know too
    _write_json(path, config)


def evaluate(
    out: Path, data: Path, held_out: Batches, device: torch.device, prompts: int
) -> dict[str, Any]:
    """Loss and greedy answers of the model as saved, loaded anew; writes `samples.txt`."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    model = Qwen3_5ForCausalLM.from_pretrained(out, dtype=torch.bfloat16).to(device).eval()
    asked = json.loads((data / "prompts.json").read_text())
    chats = asked["held_out"][:prompts] if prompts else asked["held_out"]
    answers = target_quality.answer_all(model, tokenizer, chats, max_new_tokens=320)
    recalled = asked["training"][:prompts] if prompts else asked["training"]
    recalled_answers = target_quality.answer_all(model, tokenizer, recalled, max_new_tokens=320)
    by_kind = {
        kind: [a for a in answers if a.chat["metadata"]["kind"] == kind]
        for kind in ("code", "complete", "explain", "tool")
    }
    shown = [a for kind, count in _SHOWN.items() for a in by_kind[kind][:count]]
    (out / "samples.txt").write_text(target_quality.samples_text(shown, len(shown)), "utf-8")
    measures = {
        "held_out_loss_bfloat16": round(held_out_loss(model, held_out), 4),
        "greedy_held_out": target_quality.measure(answers),
        "greedy_training": target_quality.measure(recalled_answers),
    }
    print(json.dumps(measures, indent=2), flush=True)
    return measures


_SHOWN = {"code": 14, "complete": 4, "explain": 4, "tool": 6}
"""Answers in `samples.txt`, by kind."""


def plot(report: dict[str, Any], path: Path) -> None:
    """Draws the curve where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    labels = {
        "text_loss": "training: source text",
        "chat_loss": "training: chats (prompts at a tenth)",
        "held_out_loss": "held-out modules: answers",
    }
    for key, label in labels.items():
        points = [point for point in report["curve"] if key in point]
        axes.plot([p["tokens"] / 1e6 for p in points], [p[key] for p in points], label=label)
    axes.set(xlabel="million tokens", ylabel="nats a token", title="Demo target")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
