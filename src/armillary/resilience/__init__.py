"""What keeps a run whole when the world is not. Importing this package imports no torch.

signals  a polite stop: SIGINT, SIGTERM, SIGUSR1
guard    a step that would poison the run changes nothing; what then, policies say
claim    one run at a time in a run folder, and enough room in it
"""
