"""What keeps a run whole when the world is not. Importing this package imports no torch.

signals  a polite stop: SIGINT, SIGTERM, SIGUSR1, SIGHUP
guard    a step that would poison the run changes nothing; what then, policies say
claim    one run at a time in a run folder, and enough room in it
roll_call, watchdog   ranks that were lost, and ranks that hold the others up, are named
garbage  Python's garbage is collected by all ranks at once
"""
