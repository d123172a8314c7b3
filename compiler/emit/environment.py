"""The Jinja environment of all templates."""

import jinja2


def environment() -> jinja2.Environment:
    """Undefined names are errors; blocks leave no blank lines."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("ppc.templates", ""),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  # Python, not HTML; strings are quoted in the views
    )
