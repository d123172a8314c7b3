"""python -m ppc"""

from .cli import app

app(prog_name="ppc")
