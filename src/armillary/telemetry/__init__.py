"""Events, sinks, console, timing, memory, FLOP/s peaks and profiles of a run."""
