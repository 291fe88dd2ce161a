"""What Nightjar's paper reports (v2, tables 4 and 5), to stand beside what is measured here."""

from __future__ import annotations

from statistics import fmean

CELLS = ("7B Alpaca", "7B ShareGPT", "7B SpecBench", "13B Alpaca", "13B ShareGPT", "13B SpecBench")
WITHOUT = "w/o SD"
NAMES = {
    "ar": WITHOUT, "spec:3": "SD", "dsd": "DSD", "ucbspec": "BanditSpec", "tetris:3": "TETRIS", "nightjar": "Nightjar"
}  # fmt: skip
"""Policies here and the paper's methods."""
THROUGHPUT_TPS = {
    "Nightjar": (2102.73, 3734.23, 3326.20, 721.23, 1729.68, 1061.82),
    "BanditSpec": (1860.74, 3428.75, 2631.43, 679.82, 1383.81, 763.15),
    "DSD": (2044.40, 3614.65, 2789.51, 603.32, 1244.96, 692.01),
    "TETRIS": (1875.91, 3597.21, 2974.14, 702.65, 1628.86, 985.40),
    "SD": (1920.63, 3593.36, 3044.80, 628.47, 1689.53, 964.02),
    WITHOUT: (2072.38, 3653.61, 3207.28, 438.13, 1290.04, 673.48),
}
LATENCY_MS = {
    "Nightjar": (8868.17, 6534.76, 7618.85, 23525.49, 8133.92, 14691.81),
    "BanditSpec": (12340.83, 7799.63, 9288.23, 29077.32, 9667.04, 19294.42),
    "DSD": (9183.21, 6499.12, 8301.02, 16212.44, 10057.72, 22361.71),
    "TETRIS": (11734.19, 7409.62, 8789.48, 22133.43, 8046.25, 14937.37),
    "SD": (11110.68, 7047.49, 8567.04, 24671.40, 8152.97, 14212.97),
    WITHOUT: (8876.14, 6438.47, 7654.05, 32222.49, 9350.87, 23831.74),
}


def times(table: dict[str, tuple[float, ...]], method: str, other: str) -> float:
    """How many times another method one is: the mean of the six cells' ratios, which is how the paper averages."""
    return fmean(ours / theirs for ours, theirs in zip(table[method], table[other], strict=True))


def times_without(table: dict[str, tuple[float, ...]], method: str) -> float:
    """How many times plain decoding a method is."""
    return times(table, method, WITHOUT)
