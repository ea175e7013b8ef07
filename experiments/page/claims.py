"""What was published, beside what was measured here."""

from __future__ import annotations

from dataclasses import dataclass

from kvcomp.eval.stats import Difference
from page.points import FULL, Key, Points, in_points

PILOT = {
    "Random": 53.2,
    "largest value ranges evicted": 14.3,
    "SnapKV": 64.3,
    "SnapKV + sampling": 70.9,
    "SnapKV + budget/4 V slots": 80.5,
    "VaSE attnv (sampling + budget/4 V slots)": 85.2,
    "CurDKV (fixed G)": 78.6,
    "VaSE dkv (G resampled)": 87.6,
    "full cache": 88.0,
}
"""Per cent right on GSM8K, Qwen3-4B, 512 rows, about a quarter: plots/plot_pilot.py and tables/ablation.json of
github.com/terarachang/VaSE at bfa2692. Its V slots are half of the budget."""

GSM8K = "VaSE, Qwen3-4B, GSM8K"
FIVE = "VaSE, Qwen3-4B, mean of five tasks"
AGAIN = "arXiv 2609.03430, Qwen3-4B, mean of five tasks"


@dataclass(frozen=True)
class Claim:
    """`first` minus `second`: points of a study here, `published` points there, from `source`."""

    text: str
    study: str
    first: str
    second: str
    published: float
    source: str

    def measured(self, found: Points) -> Difference:
        """Here, paired, of the share of a chain before the first error."""
        return found.minus(_key(self.first), _key(self.second), "before")

    def verdict(self, found: Points) -> str:
        """Whether the interval of the difference lies on the side that was published; against the full cache, whether
        it reaches the loss that was published."""
        here = self.measured(found)
        if self.second == FULL[0]:
            return "reproduced" if 100 * here.high >= self.published else "a larger loss"
        if here.low <= 0 <= here.high:
            return "undecided"
        return "reproduced" if (here.mean > 0) == (self.published > 0) else "the opposite"

    def line(self, found: Points) -> list[str]:
        """A line of the table."""
        return [self.text, f"{self.published:+.1f}", self.source, in_points(self.measured(found)), self.verdict(found)]


def _key(name: str) -> Key:
    return FULL if name == FULL[0] else (name, 0.25, "")


def _pilot(text: str, first: str, second: str) -> Claim:
    return Claim(text, "pilot", first, second, round(PILOT[first] - PILOT[second], 1), GSM8K)


ATTNV, SLOTS = "VaSE attnv (sampling + budget/4 V slots)", "SnapKV + budget/4 V slots"

CLAIMS = (
    _pilot("the largest value ranges matter more than random rows", "Random", "largest value ranges evicted"),
    _pilot("V slots help SnapKV", SLOTS, "SnapKV"),
    _pilot("sampling helps SnapKV", "SnapKV + sampling", "SnapKV"),
    _pilot("sampling helps beside V slots", ATTNV, SLOTS),
    _pilot("VaSE-AttnV beats SnapKV", ATTNV, "SnapKV"),
    _pilot("a new G each round beats a fixed one", "VaSE dkv (G resampled)", "CurDKV (fixed G)"),
    _pilot("VaSE-DKV is close to the full cache", "VaSE dkv (G resampled)", "full cache"),
    Claim("VaSE-AttnV beats SnapKV", "main", "vase-attnv", "snapkv", 9.9, FIVE),
    Claim("VaSE-AttnV beats R-KV", "main", "vase-attnv", "rkv-simplified", 4.4, FIVE),
    Claim("VaSE-DKV beats CurDKV", "main", "vase-dkv", "curdkv", 7.7, FIVE),
    Claim("VaSE-AttnV is close to the full cache", "main", "vase-attnv", "full cache", -6.0, FIVE),
    Claim("Random with the prompt protected beats VaSE-AttnV", "main", "random + prompt", "vase-attnv", 4.2, AGAIN),
    Claim("protecting the prompt helps VaSE-AttnV", "main", "vase-attnv + prompt", "vase-attnv", 0.3, AGAIN),
)
"""VaSE: tables/all_Qwen3-4B.json of the same commit, averages of AIME25, AIME26, HMMT25, GPQA-D and MATH-500; the
other: its table of VaSE beside Random, and its ablation of the prompt."""
