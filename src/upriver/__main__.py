"""Run the command line as ``python -m upriver``."""

import sys

from upriver.cli import main

if __name__ == "__main__":
    sys.exit(main())
