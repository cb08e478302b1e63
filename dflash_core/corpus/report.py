"""What happened to the rows of every source: as JSON, as Parquet, and as text.

`report.json` holds the counts as the manifest does. `report.parquet` has one line for each number:
`source`, `kind`, `name`, `rows`, where kind is `rows` (in, kept, duplicates, ...), `rejected`, `repaired`,
`redacted` (name is the reason) or `length` (name is the upper bound in characters).
"""

from __future__ import annotations

from dflash_core.manifest import Dataset, canonical_json

_ROWS = ("rows_in", "kept", "train", "held_out", "duplicates", "near_duplicates", "over_limit")
_ROWS += ("not_drawn", "prompt_only")
_BAR_WIDTH = 50


def write(dataset: Dataset, sources: dict[str, dict]) -> dict[str, str]:
    """Writes both files and returns their keys, `json` and `parquet`."""
    import pyarrow as pa

    from dflash_core.corpus.rows import table_to_parquet

    keys = {"json": "report.json", "parquet": "report.parquet"}
    dataset.storage.put(keys["json"], canonical_json(sources).encode())
    table = pa.Table.from_pylist(
        lines(sources),
        schema=pa.schema(
            [
                ("source", pa.string()),
                ("kind", pa.string()),
                ("name", pa.string()),
                ("rows", pa.int64()),
            ]
        ),
    )
    dataset.storage.put(keys["parquet"], table_to_parquet(table))
    return keys


def lines(sources: dict[str, dict]) -> list[dict]:
    """The lines of `report.parquet`."""
    found = []
    for source, counts in sources.items():
        numbers = [("rows", name, counts[name]) for name in _ROWS]
        for kind in ("rejected", "repaired", "redacted"):
            numbers += [(kind, name, rows) for name, rows in counts[kind].items()]
        numbers += [("length", name, rows) for name, rows in counts["lengths"].items()]
        found += [
            {"source": source, "kind": kind, "name": name, "rows": rows}
            for kind, name, rows in numbers
        ]
    return found


def summary(sources: dict[str, dict]) -> list[dict]:
    """One line for each source, for people."""
    return [
        {
            "source": name,
            "rows in": counts["rows_in"],
            "kept": counts["kept"],
            "held out": counts["held_out"],
            "rejected": sum(counts["rejected"].values()),
            "duplicates": counts["duplicates"],
            "near-duplicates": counts["near_duplicates"],
            "contaminated": counts["rejected"].get("contaminated", 0),
            "over limit or not drawn": counts["over_limit"] + counts["not_drawn"],
            "turns a row": round(counts["turns"] / max(counts["kept"], 1), 2),
            "characters a row": round(counts["characters"] / max(counts["kept"], 1)),
            "supervised share": counts["supervised_share"],
            "tool-call share": counts["tool_call_share"],
        }
        for name, counts in sources.items()
    ]


def length_chart(sources: dict[str, dict]) -> str:
    """Rows by length for each source, as bars of text; lengths double from bar to bar."""
    return "\n\n".join(
        "\n".join([f"{name}: rows by characters", *_bars(counts["lengths"])])
        for name, counts in sources.items()
    )


def _bars(lengths: dict[str, int]) -> list[str]:
    if not lengths:
        return ["no rows"]
    powers = [int(bound).bit_length() - 1 for bound in lengths]
    most = max(lengths.values())
    bars = []
    for power in range(min(powers), max(powers) + 1):
        rows = lengths.get(str(2**power), 0)
        eighths = round(rows / most * _BAR_WIDTH * 8)
        bar = "█" * (eighths // 8) + "▏▎▍▌▋▊▉"[eighths % 8 - 1] * bool(eighths % 8)
        bars.append(f"{f'< {2**power:,}':>11} │{bar} {rows:,}")
    return bars
