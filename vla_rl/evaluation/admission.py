"""Whether RL may start in a world model, and why: what trust decides, a run keeps and its report shows."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from vla_rl.config import Config, Number


class Verdict(Config):
    """One requirement held against a trust report.

    Attributes:
        figure: its name. value: what was judged (a value or an end of its interval); NaN where not measured.
        bound: "above 1.2", "at most 0.1".
        passed: reached. refuses: not reached, and RL must not start.
        text: for people.
    """

    figure: str
    value: Number
    bound: str
    passed: bool
    refuses: bool
    text: str


class Admission(Config):
    """The decision on one world model.

    Attributes:
        report: the trust.json asked. verdicts: on every requirement; empty where there is no report.
        problem: what refuses; "" where nothing does.
        ignored: something refuses and `env.trust.ignore=true` overruled it. To be shown in red.
        warnings: requirements that only warn and were not reached.
        trust_horizon: control steps after which imagination should end, 0 where nothing holds; None: not measured.
    """

    report: str
    verdicts: tuple[Verdict, ...] = ()
    problem: str = ""
    ignored: bool = False
    warnings: tuple[str, ...] = ()
    trust_horizon: int | None = None

    @property
    def page(self) -> Path:
        """The trust page, which lies beside the report."""
        return Path(self.report).with_suffix(".html")


class TrustClip(Config):
    """An imagined-beside-real clip: its file, relative to the trust report, and how both ended."""

    file: str
    start: str
    instruction: str
    real: bool
    imagined: bool


class TrustClips(BaseModel):
    """The clips that a trust.json names; whatever else it holds is the world model's own and passed over."""

    clips: tuple[TrustClip, ...] = ()
