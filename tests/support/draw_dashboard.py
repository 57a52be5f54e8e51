"""Draw a Grafana dashboard's panels from a Prometheus server: what its queries give, without Grafana.

python tests/support/draw_dashboard.py DASHBOARD.json http://localhost:9090 OUT.png
"""

import argparse
import json
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STEP = 5  # seconds
RATE_INTERVAL = "30s"
UNITS = {"percentunit": (100, "%"), "bytes": (2**-20, " MiB"), "reqps": (1, "/s"), "short": (1, "")}


def series(prometheus: str, expression: str, start: float, end: float) -> list[dict[str, Any]]:
    """What a range query gives; raises where Prometheus refuses the expression."""
    for name in ("job", "model_name", "instance", "engine"):
        expression = expression.replace(f"${name}", ".*")
    expression = expression.replace("$__rate_interval", RATE_INTERVAL)
    asked = {"query": expression, "start": start, "end": end, "step": STEP}
    url = f"{prometheus}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
    with urllib.request.urlopen(url, timeout=60) as response:
        found: list[dict[str, Any]] = json.load(response)["data"]["result"]
    return found


def label(target: dict[str, Any], labels: dict[str, str]) -> str:
    text: str = target["legendFormat"]
    for name, value in labels.items():
        text = text.replace("{{" + name + "}}", value)
    return text


def draw(dashboard: dict[str, Any], prometheus: str, minutes: float) -> plt.Figure:
    end = time.time()
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    rows = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels)
    figure = plt.figure(figsize=(16, rows * 0.42), facecolor="#111217")
    grid = figure.add_gridspec(rows, 24, hspace=2.2, wspace=2.5)
    for panel in panels:
        at, defaults = panel["gridPos"], panel["fieldConfig"]["defaults"]
        factor, unit = UNITS[defaults["unit"]]
        inset = 0 if panel["type"] == "stat" else 1
        axes = figure.add_subplot(
            grid[at["y"] : at["y"] + at["h"] - inset, at["x"] : at["x"] + at["w"]]
        )
        axes.set_facecolor("#181b1f")
        axes.set_title(panel["title"], color="#ccccdc", fontsize=9, loc="left")
        axes.tick_params(colors="#8e8e99", labelsize=7)
        last = None
        for target in panel["targets"]:
            for found in series(prometheus, target["expr"], end - 60 * minutes, end):
                times, values = zip(*found["values"], strict=True)
                values = [factor * float(v) for v in values]
                last = values[-1]
                if panel["type"] == "timeseries":
                    minutes_ago = [(float(t) - end) / 60 for t in times]
                    axes.plot(minutes_ago, values, lw=1.2, label=label(target, found["metric"]))
        if panel["type"] == "stat":
            axes.set_axis_off()
            digits = defaults.get("decimals", 0 if last is None or last == round(last) else 1)
            text = "no traffic" if last is None else f"{last:,.{digits}f}{unit}"
            axes.text(0, 0.3, text, color="#73bf69", fontsize=17)
        elif axes.lines:
            axes.set_ylim(bottom=0)
            axes.set_xlabel("minutes", color="#8e8e99", fontsize=7)
            axes.legend(fontsize=7, facecolor="#181b1f", labelcolor="#ccccdc", edgecolor="#181b1f")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dashboard", type=Path)
    parser.add_argument("prometheus")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--minutes", type=float, default=10)
    options = parser.parse_args()
    dashboard = json.loads(options.dashboard.read_text())
    figure = draw(dashboard, options.prometheus, options.minutes)
    figure.savefig(options.picture, dpi=70, bbox_inches="tight", facecolor=figure.get_facecolor())


if __name__ == "__main__":
    main()
