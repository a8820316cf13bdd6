"""The dashboard: web pages that show the fleet, the queue, jobs, users and recent events.

It runs in a process of its own and only reads: it asks the Controller twice a second, however many pages are open.
`follower.py` asks, and sends changes to every open page; `cluster_view.py` turns the answers into tables of rows
(`rows.py`); `server.py` serves. The pages are plain HTML, CSS and JavaScript in ``static/``.

Start with `cluster_view.py`. May import: `actors.calls`, `actors.protocol` and the pure core. Only the
command line may import it; `slices.py`, which says how a slice stands, is for services as well.
"""
