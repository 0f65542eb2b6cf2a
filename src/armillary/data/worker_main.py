"""Entry of a data worker (see workers.py): `python -P -m armillary.data.worker_main`."""

import os
import sys

from armillary.data.workers import serve

if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    serve(sys.stdin.buffer, answers)
    os._exit(0)  # there is nothing to tear down
