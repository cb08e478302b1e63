"""What an evaluation found: facts from the prompts' records, and the same as text and pictures.

Acceptance lengths count the bonus token: tokens emitted by verify steps over their number. Intervals hold
95 % of a value when prompts are drawn anew with replacement, fixed seed. Two drafters are compared on the
same resampled prompts, so their difference has a narrower interval than either.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from dflash_core.manifest import Dataset

log = logging.getLogger(__name__)

BEFORE, AFTER = "before", "after"
# A run may start from another drafter (warm_start), so the first is not called untrained.
LABELS = {BEFORE: "at the start", AFTER: "trained"}
BASELINE = "plain decoding by the same Transformers model on this machine"
_RESAMPLES = 10_000


# --- facts -------------------------------------------------------------------------------------


def summarise(records: list[dict]) -> dict:
    """The facts of an evaluation from its prompts' records.

    `before`, `after` and `others` are over the headline: all sets in the first thinking mode at the first
    temperature. `modes` has the same for each set, thinking mode and temperature by itself.

    For each drafter, `acceptance_length` is pooled: tokens emitted by verify steps over their number,
    bonus tokens counted, so long answers weigh more; `acceptance_length_per_prompt` is the mean over
    prompts.
    """
    first = _mode(records[0])[1:]
    headline = [record for record in records if _mode(record)[1:] == first]
    drafters = _drafters_facts(headline)
    facts: dict[str, Any] = {
        "baseline": BASELINE,
        "block_size": headline[0]["outcomes"][AFTER]["block_size"],
        "num_drafts": headline[0]["outcomes"][AFTER]["num_drafts"],
        "num_prompts": len(headline),
        "num_tokens": sum(record["plain"]["num_tokens"] for record in headline),
        "tokens_per_s": _rate(record["plain"] for record in headline),
        BEFORE: drafters.pop(BEFORE, None),
        AFTER: drafters.pop(AFTER),
        "others": drafters,
    }
    facts[AFTER]["by_source"] = {
        source: drafter_facts([r for r in headline if r["source"] == source], AFTER)
        for source in sorted({record["source"] for record in headline})
    }
    facts["modes"] = [_mode_facts(mode, records) for mode in dict.fromkeys(map(_mode, records))]
    return facts


def _mode(record: dict) -> tuple[str, bool, float]:
    return record["set"], record["thinking"], record["temperature"]


def _mode_facts(mode: tuple[str, bool, float], records: list[dict]) -> dict:
    chosen = [record for record in records if _mode(record) == mode]
    return {
        "set": mode[0],
        "thinking": mode[1],
        "temperature": mode[2],
        "num_prompts": len(chosen),
        "tokens_per_s": _rate(record["plain"] for record in chosen),
        "drafters": _drafters_facts(chosen),
    }


def _drafters_facts(records: list[dict]) -> dict[str, dict]:
    """Facts of every drafter over the records, and of all but `after` how far they are from it."""
    names = dict.fromkeys(name for record in records for name in record["outcomes"])
    facts = {name: drafter_facts(records, name) for name in names}
    for name in facts.keys() - {AFTER}:
        pairs = [r["outcomes"] for r in records if name in r["outcomes"]]
        facts[name]["difference_to_after"] = _difference_facts(
            [pair[name] for pair in pairs], [pair[AFTER] for pair in pairs]
        )
    return facts


def drafter_facts(records: list[dict], name: str) -> dict:
    """The facts of one drafter over the records that have it."""
    records = [record for record in records if name in record["outcomes"]]
    outcomes = [record["outcomes"][name] for record in records]
    accepted = [number for outcome in outcomes for number in outcome["accepted"]]
    judged = [number for outcome in outcomes for number in outcome["judged"]]
    lengths = [
        outcome["num_verified"] / len(outcome["accepted"])
        for outcome in outcomes
        if outcome["accepted"]
    ]
    verified = sum(outcome["num_verified"] for outcome in outcomes)
    slots = range(1, outcomes[0]["num_drafts"] + 1)
    plain, own = _rate(record["plain"] for record in records), _rate(outcomes)
    return {
        "num_prompts": len(records),
        "num_steps": len(accepted),
        "acceptance_length": verified / max(len(accepted), 1),
        "acceptance_length_per_prompt": sum(lengths) / max(len(lengths), 1),
        "interval": bootstrap_interval(outcomes),
        "histogram": [accepted.count(number) for number in (0, *slots)],
        "accepted_by_slot": [_share(accepted, judged, slot) for slot in slots],
        **_losslessness(records, outcomes),
        "plain_tokens_per_s": plain,
        "tokens_per_s": own,
        "speed_up": own / plain,
        "speed_up_interval": _speed_up_interval([record["plain"] for record in records], outcomes),
    }


def _losslessness(records: list[dict], outcomes: list[dict]) -> dict:
    """Greedy answers equal to plain decoding; None where answers are sampled, which differ by design."""
    if "lossless" not in outcomes[0]:
        return {"num_lossless": None, "num_explained": None, "differences": []}
    differences = [
        {"prompt": record["id"], **outcome["difference"]}
        for record, outcome in zip(records, outcomes, strict=True)
        if outcome["difference"]
    ]
    return {
        "num_lossless": sum(outcome["lossless"] for outcome in outcomes),
        "num_explained": sum(d["logit_gap"] <= 2 * d["rounding"] for d in differences),
        "differences": differences,
    }


def _rate(parts: Iterable[dict]) -> float:
    """Tokens per second, prompts' forwards included."""
    parts = list(parts)
    seconds = sum(part["seconds"] for part in parts)
    return sum(part["num_tokens"] for part in parts) / max(seconds, 1e-9)


def _share(accepted: list[int], judged: list[int], slot: int) -> float | None:
    """Share of steps in which the draft of this slot was accepted, of those in which it was judged."""
    pairs = [a for a, j in zip(accepted, judged, strict=True) if j >= slot]
    return sum(a >= slot for a in pairs) / len(pairs) if pairs else None


# --- intervals ---------------------------------------------------------------------------------


def bootstrap_interval(outcomes: list[dict]) -> list[float]:
    """95 % of the pooled acceptance length over resampled prompts."""
    return _interval(_ratio(_draws(len(outcomes)), *_accounts(outcomes)))


def _difference_facts(ours: list[dict], theirs: list[dict]) -> dict:
    """How much longer the first accepts than the second, on the same prompts."""
    once, draws = np.ones((1, len(ours))), _draws(len(ours))
    value, drawn = (
        _ratio(times, *_accounts(ours)) - _ratio(times, *_accounts(theirs))
        for times in (once, draws)
    )
    return {"acceptance_length": float(value[0]), "interval": _interval(drawn)}


def _speed_up_interval(plain: list[dict], outcomes: list[dict]) -> list[float]:
    draws = _draws(len(outcomes))

    def rates(parts: list[dict]) -> np.ndarray:
        tokens_P = np.array([part["num_tokens"] for part in parts])
        return _ratio(draws, tokens_P, np.array([max(part["seconds"], 1e-9) for part in parts]))

    return _interval(rates(outcomes) / rates(plain))


def _accounts(outcomes: list[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens emitted by verify steps, and steps, of each prompt."""
    tokens_P = np.array([outcome["num_verified"] for outcome in outcomes])
    return tokens_P, np.array([len(outcome["accepted"]) for outcome in outcomes])


def _draws(size: int) -> np.ndarray:
    """How often each prompt is drawn in each of the resamples, [R, P]; the same for the same size."""
    return np.random.default_rng(0).multinomial(size, np.full(size, 1 / size), _RESAMPLES)


def _ratio(times_RP: np.ndarray, above_P: np.ndarray, below_P: np.ndarray) -> np.ndarray:
    """Ratio of sums in each resample; not a number where nothing was drawn that counts."""
    below_R = times_RP @ below_P
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(below_R > 0, (times_RP @ above_P) / below_R, np.nan)


def _interval(drawn_R: np.ndarray) -> list[float]:
    drawn_R = drawn_R[np.isfinite(drawn_R)]
    if not len(drawn_R):
        return [0.0, 0.0]
    return [float(point) for point in np.quantile(drawn_R, (0.025, 0.975))]


# --- text --------------------------------------------------------------------------------------


def markdown(dataset: Dataset, facts: dict) -> str:
    """report.md: the headline, each set in each mode, the corpus' sources, and what to read into them."""
    inputs, config = dataset.request["inputs"], dataset.config
    request = (
        f"Run `{inputs['run']}`, corpus `{inputs['corpus']}`; at most {config['max_new_tokens']} tokens an "
        f"answer, blocks of {facts['block_size']}. Headline: {mode_text(facts['modes'][0])}, all sets."
    )
    drafters = _all_drafters(facts)
    lines = [f"# Evaluation of {dataset.name}", "", request, ""]
    lines += _table(
        ["", *(LABELS.get(name, name) for name in drafters)],
        ([label, *map(cell, drafters.values())] for label, cell in _CELLS.items()),
    )
    if facts["others"]:
        lines += [_paired(facts["others"]), ""]
    if len(facts["modes"]) > 1:
        lines += mode_lines(facts["modes"])
    lines += _table(
        ["source", "prompts", "acceptance length"],
        (
            [source, f"{part['num_prompts']}", _length(part)]
            for source, part in facts[AFTER]["by_source"].items()
        ),
    )
    return "\n".join([*lines, _LEGEND.format(**facts)]) + "\n"


def table(facts: dict) -> list[dict[str, str]]:
    """Each drafter in each mode as a row of plain texts."""
    labels = ("prompts", "acceptance length", "speed-up", "equal to plain decoding")
    return [
        {"set": mode["set"], "mode": mode_text(mode), "drafter": LABELS.get(name, name)}
        | {label: _CELLS[label](part) for label in labels}
        for mode in facts["modes"]
        for name, part in mode["drafters"].items()
    ]


_LEGEND = (
    "Acceptance length: tokens emitted by verify steps over their number, bonus token counted, pooled "
    "over prompts; in brackets the 95 % interval over resampled prompts. Histogram: steps by accepted "
    "drafts, 0 to {num_drafts}. Slot: share of steps that accepted the slot's draft and all before it, of those that "
    "judged it. Speed-up: tokens per second against {baseline}."
)


def _all_drafters(facts: dict) -> dict[str, dict]:
    named = {BEFORE: facts[BEFORE], AFTER: facts[AFTER], **facts["others"]}
    return {name: part for name, part in named.items() if part}


def mode_text(mode: dict) -> str:
    """How the answers of a mode were chosen."""
    how = f"temperature {mode['temperature']:g}" if mode["temperature"] else "greedy"
    return f"{how}, thinking {'on' if mode['thinking'] else 'off'}"


def mode_lines(modes: list[dict]) -> list[str]:
    """A table of the sets in their modes: every trained drafter's acceptance length, speed-up, losslessness."""
    names = list(
        dict.fromkeys(name for mode in modes for name in mode["drafters"] if name != BEFORE)
    )
    head = [
        "set",
        "mode",
        "prompts",
        *(LABELS.get(name, name) for name in names),
        "speed-up",
        "lossless",
    ]

    def row(mode: dict) -> list[str]:
        drafters, after = mode["drafters"], mode["drafters"][AFTER]
        lengths = [_length(drafters[name]) for name in names]
        ends = [_speed_up(after), _lossless(after)]
        return [mode["set"], mode_text(mode), f"{mode['num_prompts']}", *lengths, *ends]

    return _table(head, map(row, modes))


def _paired(others: dict[str, dict]) -> str:
    """How far other drafters are from the trained one on the same prompts."""
    parts = []
    for name, part in others.items():
        difference = part["difference_to_after"]
        low, high = difference["interval"]
        parts.append(f"{name} {difference['acceptance_length']:+.2f} [{low:+.2f}, {high:+.2f}]")
    return f"Acceptance length minus the trained drafter's, same prompts: {'; '.join(parts)}."


def _table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows]]
    return [*lines, ""]


def _length(facts: dict) -> str:
    low, high = facts["interval"]
    return f"{facts['acceptance_length']:.2f} [{low:.2f}, {high:.2f}]"


def _speed_up(facts: dict) -> str:
    low, high = facts["speed_up_interval"]
    return f"{facts['speed_up']:.2f} [{low:.2f}, {high:.2f}]"


def _lossless(facts: dict) -> str:
    """The lossless count and, where answers differ, what the logits say about it."""
    if facts["num_lossless"] is None:
        return "sampled"
    text = f"{facts['num_lossless']} of {facts['num_prompts']}"
    differences = facts["differences"]
    if not differences:
        return text
    largest = max(difference["logit_gap"] for difference in differences)
    return (
        f"{text}; {facts['num_explained']} of {len(differences)} differences within rounding, "
        f"largest logit gap {largest:.3g}"
    )


_CELLS: dict[str, Callable[[dict], str]] = {
    "prompts": lambda f: f"{f['num_prompts']}",
    "acceptance length": _length,
    "mean over prompts": lambda f: f"{f['acceptance_length_per_prompt']:.2f}",
    "equal to plain decoding": _lossless,
    "tokens per second": lambda f: f"{f['tokens_per_s']:.1f}",
    "plain tokens per second": lambda f: f"{f['plain_tokens_per_s']:.1f}",
    "speed-up": _speed_up,
    "histogram": lambda f: " ".join(map(str, f["histogram"])),
    "accepted by slot": lambda f: " ".join(
        "-" if share is None else f"{share:.2f}" for share in f["accepted_by_slot"]
    ),
}


# --- picture -----------------------------------------------------------------------------------


def picture(facts: dict) -> bytes | None:
    """acceptance.png: steps by accepted drafts, acceptance by slot, and where there are several modes the
    length in each with its interval; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        log.info("matplotlib is not installed, so there is no acceptance.png")
        return None
    drafters, modes = _all_drafters(facts), facts["modes"]
    panels = 3 if len(modes) > 1 else 2
    figure = Figure(figsize=(4.5 * panels, 3.5), layout="constrained")
    axes = figure.subplots(1, panels)
    width = 0.8 / len(drafters)
    for index, (name, part) in enumerate(drafters.items()):
        label, shift = LABELS.get(name, name), (index - (len(drafters) - 1) / 2) * width
        numbers = np.arange(len(part["histogram"]))
        share = np.array(part["histogram"]) / max(part["num_steps"], 1)
        axes[0].bar(numbers + shift, share, width=width, label=label)
        by_slot = [np.nan if value is None else value for value in part["accepted_by_slot"]]
        axes[1].plot(numbers[1:], by_slot, marker="o", label=label)
    axes[0].set(xlabel="accepted drafts", ylabel="share of verify steps")
    axes[1].set(xlabel="slot", ylabel="share accepted", ylim=(0, 1.02))
    axes[0].legend()
    if panels == 3:
        _draw_modes(axes[2], modes)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    return data.getvalue()


def _draw_modes(axis: Any, modes: list[dict]) -> None:
    """Acceptance length of the trained drafter in each mode, with its interval."""
    parts = [mode["drafters"][AFTER] for mode in modes]
    lengths = np.array([part["acceptance_length"] for part in parts])
    intervals = np.array([part["interval"] for part in parts])
    # A pooled value can lie outside the interval of a handful of prompts.
    errors = np.clip([lengths - intervals[:, 0], intervals[:, 1] - lengths], 0, None)
    rows = np.arange(len(modes))
    axis.errorbar(lengths, rows, xerr=errors, fmt="o", capsize=3)
    axis.set_yticks(rows, [f"{mode['set']}\n{mode_text(mode)}" for mode in modes], fontsize=7)
    axis.invert_yaxis()
    axis.set(xlabel="acceptance length", xlim=(1, None))
