"""`armillary ...`, `python -m armillary ...` and `torchrun -m armillary ...`."""

import sys


def main() -> int:
    """Runs the command line; whoever interrupts before it is loaded sees no traceback either."""
    try:
        from armillary.foundation.lasting_streams import outlive_terminal

        outlive_terminal()
        from armillary.cli.main import main as run
        from armillary.resilience.signals import ignore_stop_signals

        code = run()
        ignore_stop_signals()
        return code
    except KeyboardInterrupt:
        from armillary.foundation.errors import EXIT_INTERRUPTED
        from armillary.foundation.tell import tell

        tell("interrupted")
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
