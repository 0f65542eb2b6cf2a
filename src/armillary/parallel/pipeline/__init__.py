"""Pipeline parallelism: stages of layers on different ranks, and schedules that drive them."""
