"""Random sequences of events for the controller's state, and what must hold after each.

`strategies.py` says what is drawn. `machine.py` makes it happen to jobs, `host_rules.py` to hosts. `bookkeeping.py`
keeps a second account from the events alone. `oracle.py` compares the state with it, and `plan_checks.py` each plan.
`tests/proofs/test_state_random.py` runs them.
"""
