"""Self-contained pages about a run: charts, videos, imagination."""

from __future__ import annotations

from functools import cache

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, Template


@cache  # Compiling one takes longer than filling it in, and a run writes its page again and again.
def page_template(package: str, name: str) -> Template:
    """Return the template `name` of a package, which may extend "page.html"."""
    loader = ChoiceLoader([PackageLoader(package, "."), PackageLoader("vla_rl.evaluation.report", ".")])
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template(name)
