"""The dashboard: web pages that show the fleet, the queue, jobs, users and what has happened.

It runs in a process of its own, so that pages cost the Controller nothing but one question twice a second, however
many people look. It only reads. `follower.py` asks; `cluster_view.py` turns the answers into tables of rows
(`rows.py`); `follower.py` sends what has changed to every open page; `server.py` serves. The pages are plain HTML,
CSS and JavaScript in ``static/``.

Start with `cluster_view.py`. May import: `actors.calls`, `actors.protocol` and the pure core. Nothing but the command
line may import it.
"""
