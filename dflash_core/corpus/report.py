"""What happened to the rows of every source: as JSON, as Parquet, and as a picture.

`report.json` holds the counts as the manifest does. `report.parquet` has one line for each number:
`source`, `kind`, `name`, `rows`, where kind is `rows` (in, kept, duplicates, ...), `rejected`, `repaired`,
`redacted` (name is the reason) or `length` (name is the upper bound in characters).
"""

from __future__ import annotations

from dflash_core.manifest import Dataset, canonical_json

_ROWS = ("rows_in", "kept", "train", "held_out", "duplicates", "near_duplicates", "over_limit")
_ROWS += ("not_drawn", "prompt_only")
_COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5")


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
    """Rows by length and source as an SVG of stacked bars; lengths double from bar to bar."""
    bounds = sorted({int(bound) for counts in sources.values() for bound in counts["lengths"]})
    bounds = [2**power for power in range(bounds[0].bit_length() - 1, bounds[-1].bit_length())]
    stacks = [
        [counts["lengths"].get(str(bound), 0) for counts in sources.values()] for bound in bounds
    ]
    tallest, bar, height = max(map(sum, stacks)), 46, 200
    legend = 18 * len(sources)
    shapes = []
    for column, (bound, stack) in enumerate(zip(bounds, stacks, strict=True)):
        x, y = 20 + column * bar, 30.0 + height
        for place, rows in enumerate(stack):
            if not rows:
                continue
            tall = height * rows / tallest
            y -= tall
            color = _COLORS[place % len(_COLORS)]
            shapes.append(
                f'<rect x="{x}" y="{y:.1f}" width="{bar - 4}" height="{tall:.1f}" fill="{color}"/>'
            )
        shapes.append(f'<text x="{x + 21}" y="{y - 4:.1f}">{sum(stack):,}</text>')
        shapes.append(f'<text x="{x + 21}" y="{height + 46}">&lt; {_short(bound)}</text>')
    for place, name in enumerate(sources):
        y = height + 66 + 18 * place
        shapes.append(f'<rect x="20" y="{y}" width="12" height="12" fill="{_COLORS[place % 8]}"/>')
        shapes.append(f'<text x="38" y="{y + 10}" text-anchor="start">{name}</text>')
    width = max(40 + bar * len(bounds), 320)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 76 + legend}" '
        f'width="{width}" font-family="sans-serif" font-size="11" text-anchor="middle">'
        f'<rect width="100%" height="100%" fill="white"/>'
        f'<text x="20" y="14" text-anchor="start">rows by characters</text>{"".join(shapes)}</svg>'
    )


def _short(number: int) -> str:
    return f"{number // 1024}K" if number >= 1024 else str(number)
