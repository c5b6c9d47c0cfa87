"""Builds the README's table of results from the records in benchmarks/results.

    python benchmarks/report.py           writes the table into README.md
    python benchmarks/report.py --check   exits with 1 where README.md differs

Each record names the rows that it wants to show (`Record.headline`); records
without any do not appear. The table stands between two marker lines.
"""

import argparse
import sys
from pathlib import Path

from jaxaccel.records import Record

ROOT = Path(__file__).parents[1]
START = "<!-- headline: made by benchmarks/report.py -->"
END = "<!-- /headline -->"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="the README's table of results")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(arguments)
    try:
        records = [Record.read(path) for path in sorted(options.results.glob("*.json"))]
        old = options.readme.read_text(encoding="utf-8")
        new = insert(old, table(records), options.readme.name)
    except (OSError, TypeError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    if new == old:
        print(f"{options.readme.name} agrees with {len(records)} records")
        return 0
    if options.check:
        print(
            f"{options.readme.name} differs from the records; run "
            "`python benchmarks/report.py` and commit the result",
            file=sys.stderr,
        )
        return 1
    options.readme.write_text(new, encoding="utf-8")
    print(f"wrote the table of {len(records)} records into {options.readme.name}")
    return 0


def table(records: list[Record]) -> str:
    """The rows of all records, in the order of the records' names."""
    lines = [
        "| what | measured against | figure (median, 95 % interval) | verdict "
        "| record |",
        "|---|---|---|---|---|",
    ]
    for record in records:
        link = f"[{record.name}](benchmarks/results/{record.name}.json)"
        link += f" ({record.hardware['platform']})"
        for row in record.headline:
            cells = [row.what, row.against, record.figure(row.figure)]
            cells = [cell.replace("|", "\\|") for cell in cells]
            lines.append(f"| {' | '.join([*cells, record.verdict, link])} |")
    return "\n".join(lines)


def insert(text: str, table: str, name: str) -> str:
    """The text with the table between its markers."""
    if text.count(START) != 1 or text.count(END) != 1:
        raise ValueError(
            f"{name} needs the line {START!r} and after it the line {END!r}, once "
            "each, where the table of results belongs"
        )
    before, rest = text.split(START)
    if END not in rest:
        raise ValueError(f"{name} has {END!r} before {START!r}; exchange them")
    after = rest.split(END)[1]
    return f"{before}{START}\n{table}\n{END}{after}"


if __name__ == "__main__":
    sys.exit(main())
