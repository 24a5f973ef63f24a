"""A simulation of a downstream's outage: what a policy does to it, and how soon everything is done.

The policies are the very ones that workers use: `policy.backoff` and `policy.breaker`.  Brokers, threads and clocks are
simulated, with simpy, so that minutes of thousands of workers take seconds.

`scenario` says what happens, `downstream` who suffers it, `policies` what the workers do about it, `world` runs it,
`measure` says what came of it, `picture` shows it.  None of it is imported by anything a worker runs.
"""
