"""`python -m armillary ...` and `torchrun -m armillary ...`."""

import sys

from armillary.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
