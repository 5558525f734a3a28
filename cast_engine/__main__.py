"""``python -m cast_engine`` is ``cast-engine``."""

from cast_engine.cli import main

main()
