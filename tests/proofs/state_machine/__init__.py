"""Random sequences of events for the controller's state, and what must hold after each.

`strategies.py` says what is drawn, `machine.py` makes it happen, `bookkeeping.py` keeps a second account from the
events alone, and `oracle.py` compares the state with it. `tests/proofs/test_state_random.py` runs them.
"""
