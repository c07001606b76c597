"""The pictures of the benchmarks, drawn with matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from scripts.bench.read_contenders import LIMIT, OURS

_PAPER: Final = {"facecolor": "white", "edgecolor": "none", "pad": 1}
_OURS, _PEER, _LIMIT = "#d1495b", "#8d99ae", "#2b2d42"
_WORKING, _WAITING = "#1a7f5a", "#d9d9d9"
#: Accelerators by the images a second that they can take.
_KNOWN: Final = {7500: "ResNet-50 on a TPU v3-8", 28000: "the most for ResNet-50 on a TPU v5e-8"}


#: Readers by what people call them, and where their images are; the others are called by their own names.
_READERS: Final = {
    "tpucache in memory": "tpucache, kept in memory",
    "tpucache jpeg in memory": "tpucache JPEG, decoded once, kept in memory",
    "tpucache raw": "tpucache, from the page cache",
    "tpucache jpeg": "tpucache JPEG, from the page cache",
    "tpucache yuv420": "tpucache yuv420, packed, from the page cache",
    "tpucache dct-lz4": "tpucache dct-lz4, packed, from the page cache",
    "tpucache dct-zstd": "tpucache dct-zstd, packed, from the page cache",
    "ffcv raw": "FFCV raw, from the page cache",
    "ffcv jpeg": "FFCV JPEG, from the page cache",
    "memmap": "np.memmap",
    "litdata": "LitData",
    "grain": "Grain",
    "mds": "MosaicML Streaming",
    "webdataset": "WebDataset",
    "torch.save": "one torch.save a sample",
    "jpeg folder": "a folder of JPEGs",
}
#: Formats in the same way, and the parts of the side that caches in bands are read at.
_FORMATS: Final = {"ffcv raw": "FFCV raw", "ffcv jpeg90": "FFCV JPEG", "tpucache jpeg90": "tpucache jpeg"}
_PARTS: Final = {"1/2": "half the side", "1/4": "a quarter of the side"}
_WHOLE: Final = " 1/1"


def draw_rates(report: dict[str, Any], path: Path) -> None:
    """Draw the rates as bars, fastest first, with the machine's limit as a line; 800 pixels wide.

    Of those who were measured with one and two threads, only the latter are drawn.
    """
    shown = [row for row in report["readers"] if not _is_limit(row) and not row["name"].endswith(" 1")]
    rows = [
        {**row, "name": reader_name(row["name"])} for row in sorted(shown, key=lambda row: row["images_per_second"])
    ]
    figure = _figure(1.7 + 0.27 * len(rows), dpi=100)
    axes = figure.subplots()
    _draw_bars(axes, rows)
    _draw_limits(axes, [row for row in report["readers"] if _is_limit(row) and not row["name"].endswith(" 1")])
    axes.set_xlim(0, 1.12 * max(row["max"] for row in report["readers"]))
    axes.xaxis.set_major_formatter(lambda value, _: _thousands(value))
    axes.spines[["top", "right"]].set_visible(False)
    size, cpus = report["size"], report["machine"]["cpus"]
    title = (
        f"Images a second: {size}x{size}, shuffled batches of {report['batch']}, two threads or workers on {cpus} CPUs"
    )
    figure.suptitle(title, fontsize=11)
    _save(figure, path)


def reader_name(name: str) -> str:
    """Return what a reader is called in a picture, without the number of its threads."""
    plain = name.removesuffix(" 1").removesuffix(" 2")
    return _READERS.get(plain, plain)


def format_name(name: str) -> str:
    """Return what a format is called in a picture."""
    codec, _, part = name.partition("-bands ")
    return f"{codec.removeprefix(OURS).strip()}, {_PARTS[part]}" if part in _PARTS else _FORMATS.get(name, name)


def draw_formats(report: dict[str, Any], path: Path) -> None:
    """Draw the rate with two threads against the bytes of an image, a point for each format.

    Whole images in bands are left out: their points are those of the same codec without bands.
    """
    figure = _figure(4.5, dpi=100)
    axes = figure.subplots()
    shown = [row for row in report["formats"] if not row["name"].endswith(_WHOLE)]
    rates = {row["name"]: row["images_per_second"].get("2") for row in shown}
    sizes = {row["name"]: row["bytes_per_image"] / 1000 for row in shown}
    points = {name: (sizes[name], rate) for name, rate in rates.items() if rate is not None}
    for name, (size, rate) in points.items():
        # The slower of two that are close has its name below.
        is_below = any(rate < other < 2 * rate and 0.6 < near / size < 1.7 for near, other in points.values())
        is_ours = name.startswith(OURS)
        axes.scatter(size, rate, s=70, color=_OURS if is_ours else _PEER, marker="o" if is_ours else "s", zorder=3)
        axes.annotate(
            f"{format_name(name)}, {_thousands(rate)}",
            (size, rate),
            xytext=(0, -16 if is_below else 8),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            fontweight=_weight(name),
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(0.18)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if str(value)[0] in "25" else "")
    axes.yaxis.set_major_formatter(lambda value, _: _thousands(value))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("kB an image on disk")
    size, cpus = report["size"], report["machine"]["cpus"]
    title = f"Images a second from the page cache, nothing kept in memory, by the bytes of an image\n{size}x{size}, "
    axes.set_title(f"{title}shuffled batches of {report['batch']}, two threads on {cpus} CPUs", fontsize=11)
    _save(figure, path)


def _draw_bars(axes: Any, rows: list[dict[str, Any]]) -> None:
    rates = [row["images_per_second"] for row in rows]
    below = [row["images_per_second"] - row["min"] for row in rows]
    above = [row["max"] - row["images_per_second"] for row in rows]
    colours = [_OURS if row["name"].startswith(OURS) else _PEER for row in rows]
    names = [row["name"] for row in rows]
    gap = max(rates, default=0) / 100
    axes.barh(names, rates, color=colours, xerr=[below, above], error_kw={"lw": 1, "alpha": 0.5})
    for at, row in enumerate(rows):
        text = f" {_thousands(row['images_per_second'])}"
        axes.text(row["max"] + gap, at, text, va="center", fontsize=9, fontweight=_weight(row["name"]), bbox=_PAPER)
    for label in axes.get_yticklabels():
        label.set_fontweight(_weight(label.get_text()))


def _weight(name: str) -> str:
    return "bold" if name.startswith(OURS) else "normal"


def _draw_limits(axes: Any, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        rate, threads = row["images_per_second"], row["threads"]
        label = (
            f"a copy in memory by {threads} thread{'s' if threads > 1 else ''}, the machine's limit: {_thousands(rate)}"
        )
        axes.axvline(rate, color=_LIMIT, linestyle="dashed", linewidth=1.2, zorder=0, label=label)
    if rows:
        axes.figure.legend(loc="outside lower right", fontsize=9, frameon=False)


def _is_limit(row: dict[str, Any]) -> bool:
    return str(row["name"]).startswith(LIMIT)


def _thousands(rate: float) -> str:
    if not rate:
        return "0"
    return f"{rate / 1000:.0f}k" if rate >= 10_000 else f"{rate / 1000:.1f}".removesuffix(".0") + "k"


def draw_idle(figures: dict[str, Any], path: Path) -> None:
    """Draw the shares of its time that an accelerator works and waits, a group of bars for each rate."""
    from matplotlib.patches import Patch

    rates, ways = figures["device_rates"], figures["ways"]
    height = 1.2 + (0.45 + 0.34 * len(ways)) * len(rates)
    figure = _figure(height, dpi=200, h_pad=0.08, hspace=0.04)
    figure.suptitle("How an accelerator spends its time, by what feeds it", size=14, weight="bold")
    groups = figure.subplots(len(rates), squeeze=False)[:, 0]
    for axes, rate in zip(groups, rates, strict=True):
        _draw_group(axes, rate, ways)
    legend = [Patch(color=_WORKING, label="working"), Patch(color=_WAITING, label="waiting for data")]
    figure.legend(handles=legend, loc="outside lower center", ncols=2, frameon=False, fontsize=10, handlelength=1.2)
    pixels = "x".join(map(str, reversed(figures["size"])))
    cores = _counted(figures["cores"], "processor core")
    rounds = _counted(figures["rounds"], "round")
    note = f"Simulated accelerator, images of {pixels}, fed by {cores}; medians of {rounds}"
    groups[-1].set_xlabel(note, size=9, color="#555555", labelpad=6)
    _save(figure, path)


def _draw_group(axes: Any, rate: int, ways: Sequence[dict[str, Any]]) -> None:
    """Draw the bars for an accelerator of one rate."""
    known = f" ({_KNOWN[rate]})" if rate in _KNOWN else ""
    axes.set_title(f"It can take {rate:,} images a second{known}", loc="left", size=10.5)
    idle = [way["idle"][str(rate)]["median"] for way in ways]
    places = range(len(ways))
    axes.barh(places, 1, height=0.74, color=_WAITING)
    axes.barh(places, [1 - share for share in idle], height=0.74, color=_WORKING)
    for at, share in zip(places, idle, strict=True):
        axes.text(1.15, at, f"{share:.1%} idle", ha="right", va="center", size=10.5)
    axes.set_yticks(places, [way["name"] for way in ways], size=10.5)
    axes.set_xlim(0, 1)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def draw_scale(report: dict[str, Any], path: Path) -> None:
    """Draw the rate of a host that reads from a shared file system by its threads, a line for each window."""
    figure = _figure(3.8, dpi=150, w_pad=0.1)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, read_ahead in zip(panels, (True, False), strict=True):
        rows = [row for row in report["reading"] if row["read_ahead"] == read_ahead]
        for number, name in enumerate(dict.fromkeys(row["window"] for row in rows)):
            points = [(row["threads"], row["images_per_second"]) for row in rows if row["window"] == name]
            style = {"marker": "osD^"[number % 4], "color": f"C{number}"}
            axes.plot(*zip(*points, strict=True), label=f"window {name}" if "," in name else 'shuffle="full"', **style)
        axes.axhline(report["device_rate"], color=_LIMIT, linestyle="dashed", linewidth=1.2, zorder=0)
        taken = f"what its accelerators take, {_thousands(report['device_rate'])}"
        axes.annotate(taken, (1, report["device_rate"]), xycoords=("axes fraction", "data"), xytext=(0, 4),
                      textcoords="offset points", ha="right", fontsize=8)  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({row["threads"] for row in rows}))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_major_formatter(lambda value, _: _thousands(value))
        axes.set_ylim(0, 1.12 * report["device_rate"])
        axes.set_xlabel("threads")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(
            f"the file system {'reads ahead when asked to' if read_ahead else 'does not read ahead'}", fontsize=10
        )
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9, frameon=False
    )
    sharing = report["sharing"]
    figure.suptitle(
        f"Images/s of one host of {report['hosts']}; simulated file system: {sharing['latency'] * 1e3:g} ms a request, "
        f"{sharing['bandwidth'] / 1e9:g} GB/s, {sharing['requests']} requests at once",
        fontsize=10,
    )
    _save(figure, path)


def draw_stream(report: dict[str, Any], path: Path) -> None:
    """Draw images/s of a first epoch by the link's bandwidth, at one latency, and by its latency, at one bandwidth."""
    links = report["links"]
    latency, rate = (statistics.mode(link[each] for link in links) for each in ("latency", "rate"))
    figure = _figure(4.0, dpi=150, w_pad=0.1)
    panels = figure.subplots(1, 2)
    for axes, along, fixed, value, title in (
        (panels[0], "rate", "latency", latency, f"{latency} ms an answer"),
        (panels[1], "latency", "rate", rate, f"{rate} MB/s"),
    ):
        chosen = sorted((link for link in links if link[fixed] == value), key=lambda link: float(link[along]))
        axes.set_yscale("log" if along == "rate" else "linear")
        _draw_readers(axes, chosen, along)
        axes.set_title(title, fontsize=10)
    panels[0].set_xlabel("MB/s of the link")
    panels[1].set_xlabel("ms an answer")
    panels[1].set_ylim(bottom=0)
    panels[0].set_ylabel("images/s in the first epoch")
    panels[0].legend(fontsize=8, loc="upper left")
    figure.suptitle("Reading from a URL: the same records, an empty disk, two processor cores", fontsize=11)
    _save(figure, path)


def _draw_readers(axes: Any, links: Sequence[dict[str, Any]], along: str) -> None:
    """Draw a line for each reader; the link itself is dashed."""
    names = dict.fromkeys(row["name"] for link in links for row in link["rows"])
    for number, name in enumerate(sorted(names, key=lambda name: (not name.startswith(OURS), name == "ranges", name))):
        found = [(link[along], row) for link in links for row in link["rows"] if row["name"] == name]
        points = [(at, row["first"]["images_per_second"]) for at, row in found]
        style: dict[str, Any] = {
            "marker": "osD^v"[number % 5],
            "color": ["C1", "C0", "C2", "C4", "C5"][number % 5],
            "markersize": 5,
        }
        if name == "ranges":
            style = {"color": _LIMIT, "linestyle": "dashed", "linewidth": 1.2, "zorder": 0}
        elif name.startswith(OURS):
            style |= {"color": _OURS, "linewidth": 2.4, "zorder": 3}
        axes.plot(*zip(*points, strict=True), label="the link" if name == "ranges" else name.split()[0], **style)
    axes.set_xscale("log")
    axes.set_xticks([link[along] for link in links], minor=False)
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: _thousands(value))
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _figure(height: float, dpi: int, **spacing: Any) -> Any:
    """Return a figure eight inches wide."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(8, height), dpi=dpi, layout=ConstrainedLayoutEngine(**spacing))


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, facecolor="white")
