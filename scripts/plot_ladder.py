#!/usr/bin/env python3
"""Draws a kernel ladder written by `build/<backend>/dev/ladder/<op> --csv FILE`: one bar per rung, the limit dashed.

    scripts/plot_ladder.py matmul.csv                     writes matmul.png
    scripts/plot_ladder.py matmul.csv --output out.png

Without matplotlib it prints one line and draws nothing (exit status 3, so that callers can tell it from an error).
"""
import argparse
import csv
import io
import math
import os
import sys

from plot_main import plot_main
from run_log import open_regular


class LadderError(Exception):
    """A message of one line that names the file and the fault."""


def read_ladders(path):
    """{title: rows in order}, numbers converted."""
    ladders = {}
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8", newline="") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                try:
                    for key in ("ms", "rate", "limit", "fraction"):
                        row[key] = float(row[key])
                    if not all(0 < row[key] < math.inf for key in ("ms", "rate", "limit")):
                        raise ValueError
                    ladders.setdefault(row["ladder"], []).append({key: row[key] for key in (
                        "rung", "ms", "rate", "unit", "limit_name", "limit", "fraction")})
                except (KeyError, TypeError, ValueError):
                    raise LadderError(f"{path}:{number}: not a rung of a ladder; write the file by --csv") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise LadderError(f"{path}: cannot be read ({error})") from None
    if not ladders:
        raise LadderError(f"{path}: holds no rungs; write the file by --csv")
    return ladders


def draw(ladders, output):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, plots = plt.subplots(len(ladders), 1, squeeze=False, constrained_layout=True, figsize=(
        9, 0.6 * len(ladders) + 0.45 * sum(len(rows) for rows in ladders.values())),
        gridspec_kw={"height_ratios": [1 + len(rows) for rows in ladders.values()]})
    for axes, (title, rows) in zip(plots[:, 0], ladders.items()):
        names = [row["rung"] for row in rows]
        axes.barh(names, [row["rate"] for row in rows], color="tab:green")
        axes.invert_yaxis()
        axes.set_xscale("log")  # the first rung is a hundred times slower than the last
        left = min(row["rate"] for row in rows) / 2
        right = max(max(row["rate"], row["limit"]) for row in rows)
        axes.set_xlim(left, right * (right / left) ** 0.35)  # room for the text
        for name, row in zip(names, rows):
            axes.text(row["rate"], name, f"  {row['ms']:.3g} ms, {100 * row['fraction']:.0f}%", va="center", fontsize=9)
        limit = rows[-1]
        axes.axvline(limit["limit"], color="black", linestyle="--", linewidth=1)
        axes.set_title(f"{title}: {limit['unit']}, and % of {limit['limit_name']} ({limit['limit']:.4g})", fontsize=10)
        axes.grid(axis="x", alpha=0.3)
    figure.savefig(output, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", help="what a ladder has written by --csv")
    parser.add_argument("--output", help="the picture to write (default: the same name with .png)")
    args = parser.parse_args()
    output = args.output or os.path.splitext(args.csv)[0] + ".png"
    return plot_main("plot_ladder", output, lambda: draw(read_ladders(args.csv), output), LadderError)


if __name__ == "__main__":
    sys.exit(main())
