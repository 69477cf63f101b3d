#!/usr/bin/env python3
"""Compares runs by their log.jsonl: a table on stdout and a picture of the loss, or of more.

    scripts/plot_log.py runs/quickstart                      writes runs/quickstart/loss.png
    scripts/plot_log.py runs/a runs/b --output compare.png   several runs in one picture
    scripts/plot_log.py runs/a runs/b --x hours --show loss grad_norm tokens_per_s
    scripts/plot_log.py runs/a runs/b --names AdamW Muon --top 3
    scripts/plot_log.py runs/a runs/b --html                 also loss.html: one page with all panels, to zoom into

Training values are drawn raw (faint) and smoothed; those of validation are dots. --x selects the x axis: steps, training
tokens, or minutes or hours of training with rollouts and without evaluations. --names gives the runs other names than
those of their directories. --top cuts off the losses above it, so that the end of a run is easier to see. The page needs no network
and no other file. Without matplotlib it prints one line and draws nothing (exit status 3, so that callers can tell it
from an error).
"""
import argparse
import html
import os
import statistics
import sys

from plot_main import plot_main
from printable import printable
from run_log import LogError, log_path, read_log, run_name, smoothed, values

LABELS = {"loss": "loss (nats per token)", "lr": "learning rate", "grad_norm": "gradient norm", "tokens_per_s": "tokens per second",
          "mfu": "MFU", "ms": "ms per step", "rewards_margin": "margin of the rewards",
          "rewards_accuracy": "accuracy of the rewards", "kl": "log-ratio to the reference (nats per token)",
          "reward": "reward", "reward_std": "standard deviation of the rewards",
          "completion_length": "tokens of a completion", "entropy": "entropy (nats per token)",
          "clip_fraction": "share of clipped tokens", "sampler_gap": "gap of training to sampling (nats per token)",
          "rollout_tokens_per_s": "tokens per second of rollouts", "rollout_seconds": "seconds of a rollout",
          "scoring_seconds": "seconds of scoring"}
SCORES = {"accuracy": "accuracy", "accuracy_norm": "accuracy per character",
          "perplexity": "perplexity of last words"}  # of evaluations
X_LABELS = {"step": "step", "tokens": "tokens", "minutes": "minutes", "hours": "hours"}
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")


def summary(names, logs):
    """Rows of text, the first of them names: what each run has come to. The loss is the mean over the last fiftieth of
    its steps, the rates are medians."""
    rows = [("run", "steps", "tokens", "hours", "loss", "best val_loss", "tokens/s", "mfu")]
    for name, (training, validation) in zip(names, logs):
        steps, losses = values(training, "loss")
        tail = losses[-max(1, len(losses) // 50):]
        val_steps, val_losses = values(validation, "val_loss")
        best = min(zip(val_losses, val_steps), default=None)
        _, rates = values(training, "tokens_per_s")
        _, mfus = values(training, "mfu")
        rows.append((name, f"{steps[-1]:,}" if steps else "-",
                     f"{training[-1]['tokens']:.4g}" if training else "-",
                     f"{training[-1]['hours']:.2f}" if training else "-",
                     f"{statistics.fmean(tail):.4f}" if tail else "-",
                     f"{best[0]:.4f} at {best[1]:,}" if best else "-",
                     f"{statistics.median(rates):,.0f}" if rates else "-",
                     f"{statistics.median(mfus):.3f}" if mfus else "-"))
    return rows


def table(rows):
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths)))
                     for row in rows)


def draw(names, logs, keys, x, top, output):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(len(keys), figsize=(8, 1 + 4 * len(keys)), constrained_layout=True, squeeze=False, sharex=True)
    for key, axes in zip(keys, panels[:, 0]):
        for index, (name, (training, validation)) in enumerate(zip(names, logs)):
            colour = f"C{index % 10}"
            xs, ys = values(training, key, x)
            if xs:
                axes.plot(xs, smoothed(ys), color=colour, label=f"{name}: training", linewidth=1.5)
                axes.plot(xs, ys, color=colour, alpha=0.2, linewidth=0.7)
            xs, ys = values(validation, "val_" + key, x)
            if xs:
                axes.plot(xs, ys, "o--", color=colour, markersize=4, linewidth=0.8,
                          label=f"{name}: validation, {ys[-1]:.3f} at the end")
        if key == "loss" and top is not None:
            axes.set_ylim(top=top)
        axes.set_ylabel(LABELS[key])
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    panels[-1, 0].set_xlabel(X_LABELS[x])
    figure.savefig(output, dpi=120)
    plt.close(figure)


PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title><style>
body {{ font-family: sans-serif; margin: 1em auto; max-width: 1100px; padding: 0 1em; }}
.table {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: 0.2em 0.8em; border-bottom: 1px solid #ccc; text-align: right; }}
td:first-child, th:first-child {{ text-align: left; }}
</style></head><body><h1>{title}</h1>
{table}
{figure}
</body></html>
"""


def page(names, logs, x):
    """The text of an HTML page: the table, and a panel for each of LABELS that the logs have numbers for."""
    from plotly import graph_objects, subplots

    keys = [key for key in LABELS if any(values(training, key)[0] for training, _ in logs) or
            any(values(validation, "val_" + key)[0] for _, validation in logs)]
    keys += [key for key in SCORES if any(values(validation, key)[0] for _, validation in logs)]
    if not keys:
        raise LogError("the logs hold no number to draw; train some steps first")
    figure = subplots.make_subplots(rows=len(keys), shared_xaxes=True, vertical_spacing=0.2 / len(keys))
    for row, key in enumerate(keys, 1):
        for index, (name, (training, validation)) in enumerate(zip(names, logs)):
            line = {"color": COLOURS[index % len(COLOURS)], "width": 1.5}
            options = {"legendgroup": str(index), "hovertemplate": "%{y:.5g} at %{x}"}
            xs, ys = values(validation if key in SCORES else training, key, x)
            if key not in SCORES and xs:
                raw = {"line": {**line, "width": 0.7}, "opacity": 0.25, "name": f"{name}: {key}, raw"}
                figure.add_trace(graph_objects.Scattergl(x=xs, y=ys, showlegend=False, **raw, **options), row, 1)
                ys = smoothed(ys)
            mode = "lines+markers" if key in SCORES else "lines"
            figure.add_trace(graph_objects.Scattergl(x=xs, y=ys, line=line, mode=mode, name=name,
                                                     showlegend=row == 1, **options), row, 1)
            xs, ys = values(validation, "val_" + key, x)
            if xs:
                figure.add_trace(graph_objects.Scattergl(x=xs, y=ys, mode="lines+markers", line={**line, "dash": "dot"},
                                                         name=f"{name}: validation", **options), row, 1)
        figure.update_yaxes(title_text=LABELS.get(key) or SCORES[key], row=row, col=1)
    figure.update_xaxes(showticklabels=True)
    figure.update_xaxes(title_text=X_LABELS[x], row=len(keys), col=1)
    figure.update_layout(height=320 * len(keys), template="simple_white", margin={"t": 80, "r": 10},
                         legend={"traceorder": "normal", "orientation": "h", "y": 1, "yanchor": "bottom"})
    cells = ["".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
             for tag, row in zip(["th"] + ["td"] * len(names), summary(names, logs))]
    return PAGE.format(title=html.escape(", ".join(names)),
                       table='<div class="table"><table>' + "\n".join(f"<tr>{row}</tr>" for row in cells) + "</table></div>",
                       figure=figure.to_html(full_html=False, include_plotlyjs=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run directories, or log.jsonl files")
    parser.add_argument("--output", help="the picture to write (default: loss.png in the first run's directory)")
    parser.add_argument("--html", action="store_true",
                        help="also write a page with all panels, beside the picture: loss.html")
    parser.add_argument("--x", choices=list(X_LABELS), default="step", help="what the curves run along (default %(default)s)")
    parser.add_argument("--show", nargs="+", choices=list(LABELS), default=["loss"], metavar="KEY",
                        help=f"a panel for each of: {', '.join(LABELS)} (default loss)")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="one for each run (default: its directory)")
    parser.add_argument("--top", type=float, metavar="LOSS", help="the upper end of the loss's axis in the picture")
    args = parser.parse_args()
    names = [printable(name) for name in args.names or map(run_name, args.runs)]
    if len(names) != len(args.runs):
        parser.error(f"--names has {len(names)} names for {len(args.runs)} runs; give one for each")
    output = args.output or os.path.join(os.path.dirname(log_path(args.runs[0])), "loss.png")

    def show():
        logs = [read_log(run) for run in args.runs]
        print(table(summary(names, logs)))
        draw(names, logs, args.show, args.x, args.top, output)
        if args.html:
            with open(os.path.splitext(output)[0] + ".html", "w", encoding="utf-8") as file:
                file.write(page(names, logs, args.x))

    return plot_main("plot_log", output, show, LogError)


if __name__ == "__main__":
    sys.exit(main())
