"""Every number the paper reports, table by table, as it is printed. Nothing here was measured by us.

Values are means with their spread where the table gives one; `Quote.over` says what it is a spread of.
"""

from typing import NamedTuple

MIXERS = ("baseline", "gfnet", "afno", "ffc", "fno-d", "difffno", "fsel", "spectformer", "chasm")
HOSTS = ("hifi-mamba", "unet", "vit")


class Quote(NamedTuple):
    """One printed number."""

    mean: float
    spread: float | None = None
    over: str = "cases"  # what the spread is over: cases or seeds


def _table(text: str, columns: list[tuple[str, str]], over: str = "cases") -> dict[str, dict[str, dict[str, Quote]]]:
    """Lines of a mixer and one value (or value±spread) per (column group, metric) -> group -> mixer -> metric."""
    quotes: dict[str, dict[str, dict[str, Quote]]] = {}
    for line in text.strip().splitlines():
        mixer, *values = line.split()
        for (group, metric), value in zip(columns, values, strict=True):
            mean, _, spread = value.partition("±")
            quote = Quote(float(mean), float(spread) if spread else None, over)
            quotes.setdefault(group, {}).setdefault(mixer, {})[metric] = quote
    return quotes


def _columns(groups: tuple[str, ...], metrics: tuple[str, str]) -> list[tuple[str, str]]:
    return [(group, metric) for group in groups for metric in metrics]


IMAGE, OVERLAP = ("psnr", "ssim"), ("iou", "dice")  # the names of our scores; the paper prints IoU as mIoU

# Table 1 (CC359 reconstruction): acceleration -> host -> mixer -> metric.
CC359 = {
    8: _table(
        """
        baseline    26.82±0.72 0.791±0.015  24.79±0.57 0.737±0.014  24.16±0.55 0.722±0.014
        gfnet       28.13±0.75 0.826±0.015  25.38±0.60 0.751±0.014  24.70±0.57 0.733±0.014
        afno        27.30±0.73 0.805±0.015  25.28±0.59 0.748±0.014  24.66±0.57 0.732±0.014
        ffc         27.32±0.73 0.805±0.015  25.13±0.59 0.744±0.014  24.50±0.56 0.729±0.014
        fno-d       26.98±0.72 0.796±0.015  25.05±0.59 0.742±0.014  24.62±0.57 0.731±0.014
        difffno     27.92±0.74 0.819±0.015  25.31±0.60 0.749±0.014  24.58±0.57 0.730±0.014
        fsel        28.16±0.75 0.827±0.015  25.42±0.60 0.752±0.014  24.55±0.57 0.730±0.014
        spectformer 28.10±0.75 0.825±0.015  25.36±0.60 0.751±0.014  24.78±0.58 0.735±0.014
        chasm       28.68±0.74 0.840±0.016  25.72±0.61 0.761±0.014  25.19±0.59 0.745±0.014
        """,
        _columns(HOSTS, IMAGE),
    ),
    4: _table(
        """
        baseline    34.53±0.75 0.936±0.009  28.81±0.60 0.852±0.010  27.86±0.58 0.830±0.010
        gfnet       35.70±0.75 0.947±0.009  29.55±0.62 0.866±0.010  28.62±0.59 0.844±0.010
        afno        35.61±0.75 0.941±0.009  29.31±0.61 0.860±0.010  28.36±0.59 0.838±0.010
        ffc         35.62±0.75 0.946±0.009  29.24±0.61 0.858±0.010  28.45±0.59 0.840±0.010
        fno-d       34.77±0.75 0.939±0.009  29.20±0.61 0.858±0.010  28.34±0.59 0.838±0.010
        difffno     34.13±0.74 0.933±0.009  29.28±0.61 0.859±0.010  28.28±0.59 0.836±0.010
        fsel        36.22±0.76 0.951±0.008  29.61±0.62 0.867±0.010  28.56±0.59 0.843±0.010
        spectformer 35.91±0.75 0.948±0.008  29.50±0.62 0.865±0.010  28.65±0.59 0.845±0.010
        chasm       37.05±0.76 0.956±0.007  30.03±0.63 0.875±0.009  29.10±0.60 0.856±0.009
        """,
        _columns(HOSTS, IMAGE),
    ),
}

# Table 2 (cross-domain): setting -> mixer -> metric. Its last row is the largest case-level spread of any method.
_RECONSTRUCTION = _table(
    """
    baseline    31.24 0.741  34.31 0.849  23.67 0.750  27.89 0.835
    gfnet       31.56 0.761  34.50 0.853  23.97 0.762  28.20 0.846
    afno        31.32 0.752  34.47 0.850  23.74 0.753  27.97 0.838
    ffc         31.40 0.757  34.51 0.852  23.73 0.752  27.95 0.837
    fno-d       31.32 0.756  34.49 0.852  23.76 0.755  28.00 0.840
    difffno     31.28 0.755  34.59 0.854  23.79 0.756  28.04 0.841
    fsel        31.61 0.761  34.57 0.854  23.98 0.765  28.22 0.849
    spectformer 31.76 0.764  34.65 0.855  24.01 0.766  28.25 0.850
    chasm       32.31 0.779  35.22 0.872  24.52 0.783  28.58 0.864
    """,
    _columns(("fastmri-x8", "fastmri-x4", "ade20k", "imagenet"), IMAGE),
)
_SEGMENTATION = _table(
    """
    baseline    0.727 0.841  0.612 0.757
    gfnet       0.737 0.848  0.632 0.773
    afno        0.731 0.844  0.621 0.765
    ffc         0.730 0.843  0.619 0.763
    fno-d       0.733 0.845  0.625 0.768
    difffno     0.735 0.846  0.628 0.770
    fsel        0.739 0.850  0.639 0.778
    spectformer 0.742 0.853  0.643 0.781
    chasm       0.792 0.870  0.699 0.811
    """,
    _columns(("brats-x4", "brats-x8"), OVERLAP),
)
CROSS_DOMAIN = _RECONSTRUCTION | _SEGMENTATION
CROSS_DOMAIN_HOSTS = {setting: "hifi-mamba" if setting.startswith("fastmri") else "unet" for setting in CROSS_DOMAIN}

# Tables 1 and 2: (setting, host) -> mixer -> metric.
MAIN = {(f"cc359-x{r}", host): CC359[r][host] for host in HOSTS for r in (8, 4)}
MAIN |= {(setting, host): CROSS_DOMAIN[setting] for setting, host in CROSS_DOMAIN_HOSTS.items()}
LARGEST_SPREAD = {
    "fastmri-x8": {"psnr": 1.85, "ssim": 0.076},
    "fastmri-x4": {"psnr": 2.24, "ssim": 0.052},
    "ade20k": {"psnr": 1.80, "ssim": 0.045},
    "imagenet": {"psnr": 1.65, "ssim": 0.040},
    "brats-x4": {"iou": 0.035, "dice": 0.030},
    "brats-x8": {"iou": 0.050, "dice": 0.045},
}

# Table 3 (a): PSNR gain of CHASM over the strongest rival under structured and random masks, and the drop in per cent.
FALSIFICATION = {
    "cc359-x4": {"structured": 0.83, "random": 0.10, "drop": 88.0},
    "cc359-x8": {"structured": 0.52, "random": 0.08, "drop": 84.6},
    "fastmri-x4": {"structured": 0.57, "random": 0.08, "drop": 86.0},
    "fastmri-x8": {"structured": 0.55, "random": 0.06, "drop": 89.1},
    "mean": {"structured": 0.62, "random": 0.08, "drop": 86.9},
}
# Table 3 (b) and (c), CC359 x8 in the HiFi-Mamba host: variant -> metric.
BASIS = _table(
    """
    chasm-identity 27.86 0.820
    chasm-untied   28.43 0.833
    chasm-signed   28.51 0.836
    chasm-complex  28.56 0.838
    chasm          28.68 0.840
    """,
    _columns(("cc359-x8",), IMAGE),
)["cc359-x8"]
AXES = _table(
    """
    chasm-ch    28.31 0.831
    chasm-cw    28.27 0.829
    chasm-cw-ch 28.54 0.837
    chasm-sum   28.48 0.835
    chasm       28.68 0.840
    """,
    _columns(("cc359-x8",), IMAGE),
)["cc359-x8"]


# Appendix, three-seed stability: setting -> mixer -> metric; the rival is the strongest one of its setting.
def _seeds(rival: str, psnr: str, ssim: str) -> dict[str, dict[str, Quote]]:
    text = "\n".join(f"{m} {p} {s}" for m, p, s in zip((rival, "chasm"), psnr.split(), ssim.split(), strict=True))
    return _table(text, _columns(("all",), IMAGE), over="seeds")["all"]


SEEDS = {
    "cc359-x8": _seeds("fsel", "28.16±0.03 28.68±0.02", "0.827±0.002 0.840±0.001"),
    "cc359-x4": _seeds("fsel", "36.22±0.05 37.05±0.03", "0.951±0.001 0.956±0.001"),
    "fastmri-x8": _seeds("spectformer", "31.76±0.04 32.31±0.05", "0.764±0.002 0.779±0.003"),
    "fastmri-x4": _seeds("spectformer", "34.65±0.02 35.22±0.03", "0.855±0.001 0.872±0.002"),
}
SEEDS_GAIN = {"cc359-x8": 0.52, "cc359-x4": 0.83, "fastmri-x8": 0.55, "fastmri-x4": 0.57}  # printed, PSNR
SEEDS_BASIS = _seeds("chasm-untied", "28.43±0.04 28.68±0.02", "0.833±0.002 0.840±0.001")

# Appendix, model-level FLOPs in G: host -> mixer. And Table 1's Core Params in M, at 96 channels.
FLOPS = {
    host: dict(zip(MIXERS, values, strict=True))
    for host, values in {
        "hifi-mamba": (24.64, 24.62, 24.62, 25.57, 29.06, 21.26, 34.96, 26.43, 28.22),
        "unet": (12.56, 12.56, 12.56, 12.74, 13.36, 11.88, 14.71, 12.96, 13.27),
        "vit": (11.54, 11.01, 11.01, 11.13, 10.56, 11.01, 12.44, 11.27, 11.48),
    }.items()
}
CORE_PARAMETERS = dict(zip(MIXERS, (0.00, 0.80, 0.01, 1.19, 4.74, 4.77, 0.06, 0.02, 0.07), strict=True))
