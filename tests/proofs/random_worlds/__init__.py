"""Random clusters in virtual time, whose Controller dies between any two writes. Millions of events in some minutes.

`world.py` is one cluster, `controller.py` its Controller's death and return, `chance.py` what is drawn, `pools.py` what
really runs on the hosts. Start with `world.py`; ``python -m tests.proofs.random_worlds --help`` runs many.
"""
