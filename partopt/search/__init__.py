"""Searches: the best plan for a trainer, of planners, of layouts, by what a simulation says.

`solve` answers a job: plans of a profile, by variants and planners (`rows`), within what a trainer
can express (`trainer_limits`); or layouts of a transformer (`layout_plans`). `scaling`, `fitting`,
`judging`, `levers`, `compare` and `verify` ask `solve`, or what it asks.
"""
