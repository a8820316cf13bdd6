"""The cluster's Controller: it turns reports into events, plans into orders, and keeps records for its successor.

May import: `actors.host`, `actors.calls`, `actors.protocol`, `cloud`, `history` and the pure core; never `actors.pool`.
Start with `controller.py`, then `event_processor.py`.
"""
