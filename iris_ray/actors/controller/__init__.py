"""The cluster's Controller: it turns reports into events, plans into orders, and keeps records for its successor.

May import: `actors.host`, `actors.calls`, `actors.protocol` and the pure core; never `actors.pool` or a service.
Start with `controller.py`, then `event_processor.py`.
"""
